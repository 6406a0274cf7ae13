"""Exports: what another program reads gives what nmtkit gives, and what comes back is what went out."""

import dataclasses
import json
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from testing import TINY_CONFIGS, tiny_model, tiny_tokenizer, tiny_transformer

from nmtkit import Translator, checkpoint
from nmtkit import export as export_module
from nmtkit.architectures import ARCHITECTURES, Vocabulary
from nmtkit.architectures.transformer import Transformer, TransformerConfig
from nmtkit.cli import main
from nmtkit.data.spm_training import train_model
from nmtkit.data.tokenizer import Tokenizer
from nmtkit.generation.requests import Request
from nmtkit.models import to_checkpoint, vocabulary_of
from nmtkit.registry import derive, option

# the beginning of the Universal Declaration of Human Rights: real sentences of several lengths, free to copy
LINES = [
    "All human beings are born free and equal in dignity and rights.",
    "They are endowed with reason and conscience and should act towards one another in a spirit of brotherhood.",
    "Everyone has the right to life, liberty and security of person.",
    "No one shall be held in slavery or servitude; slavery and the slave trade shall be prohibited in all their forms.",
    "No one shall be subjected to torture or to cruel, inhuman or degrading treatment or punishment.",
    "Everyone has the right to recognition everywhere as a person before the law.",
    "All are equal before the law.",
    "No one shall be subjected to arbitrary arrest, detention or exile.",
]


def save_model(path: Path, **changes: object) -> Path:
    tokenizer = Tokenizer(train_model(LINES, 400))
    small = {"encoder_layers": 2, "d_model": 32, "d_ff": 48, "heads": 4, **changes}
    model = tiny_transformer(vocabulary_of(tokenizer), sharpness=2.0, **small)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.1 * torch.randn_like(parameter)  # so that no norm is still 1 and no bias 0
    checkpoint.save(path, to_checkpoint(model, "transformer_tiny", model.config, tokenizer, [], 7))
    return path


def export(*arguments: object) -> str:
    result = CliRunner().invoke(main, ["export", *map(str, arguments)])
    assert result.exit_code == 0, result.output
    return result.stderr


@pytest.mark.parametrize("changes", [{}, {"pre_norm": True}, {"positions": "learned", "share_embeddings": False}])
def test_ctranslate2_gives_the_same_translations_and_probabilities(tmp_path, changes):
    ctranslate2 = pytest.importorskip("ctranslate2")
    model = save_model(tmp_path / "model.pt", **changes)
    export("--format", "ctranslate2", model, tmp_path / "ct2")
    theirs, ours = ctranslate2.Translator(str(tmp_path / "ct2")), Translator.load(model)
    tokenizer = Tokenizer.load(tmp_path / "ct2")
    sources = [tokenizer.source_pieces(ids[:-1]) for ids in tokenizer.encode_source(LINES).split()]
    never = {"disable_unk": True, "suppress_sequences": [["<s>"]]}  # as nmtkit does by itself
    greedy = theirs.translate_batch(sources, beam_size=1, max_decoding_length=20, **never)
    for line, result in zip(ours.translate(LINES, beam=1, max_len_a=0, max_len_b=20), greedy, strict=True):
        assert line.hypotheses[0].pieces == result.hypotheses[0]
    targets = [tokenizer.target_pieces(ids[:-1]) for ids in tokenizer.encode_target(LINES[::-1]).split()]
    requests = [Request(line, reference=other) for line, other in zip(LINES, LINES[::-1], strict=True)]
    scored = ours.translate(requests, score_reference=True)
    for line, result in zip(scored, theirs.score_batch(sources, targets), strict=True):
        assert sum(result.log_probs) == pytest.approx(line.hypotheses[0].log_probability, rel=1e-4)


def test_int8_for_ctranslate2_is_smaller_and_loads(tmp_path):
    ctranslate2 = pytest.importorskip("ctranslate2")
    model = save_model(tmp_path / "model.pt")
    export("--format", "ctranslate2", "--quantization", "int8", model, tmp_path / "int8")
    export("--format", "ctranslate2", model, tmp_path / "float32")
    assert (tmp_path / "int8/model.bin").stat().st_size < (tmp_path / "float32/model.bin").stat().st_size
    assert ctranslate2.Translator(str(tmp_path / "int8")).translate_batch([["▁All"]], max_decoding_length=5)


def test_safetensors_and_back_is_the_same_checkpoint(tmp_path):
    pytest.importorskip("safetensors")
    model = save_model(tmp_path / "model.pt")
    export("--format", "safetensors", model, tmp_path / "folder")
    assert {path.name for path in (tmp_path / "folder").iterdir()} == {
        "nmtkit.json",
        "model.safetensors",
        "joint.model",
    }
    assert json.loads((tmp_path / "folder/nmtkit.json").read_text())["config"]["d_model"] == 32
    export("--format", "checkpoint", tmp_path / "folder", tmp_path / "back.pt")
    before, after = checkpoint.load(model), checkpoint.load(tmp_path / "back.pt")
    assert before.keys() == after.keys()
    assert all(torch.equal(value, after["model"][name]) for name, value in before["model"].items())
    assert {key: before[key] for key in ("architecture", "config", "plugins", "update")} == {
        key: after[key] for key in ("architecture", "config", "plugins", "update")
    }
    assert Tokenizer.from_state(before["tokenizer"]).fingerprint == Tokenizer.from_state(after["tokenizer"]).fingerprint


def test_every_setting_of_the_transformer_is_known_to_the_export() -> None:
    fields = {field.name for field in dataclasses.fields(TransformerConfig)}
    assert export_module.SAME | export_module.TRAINING | export_module.FIXED.keys() == fields


@pytest.mark.parametrize("name", [name for name in ARCHITECTURES.names() if "tiny" in name or "small" in name])
def test_what_ctranslate2_does_not_have_is_refused_with_the_reason(name: str, tmp_path) -> None:
    pytest.importorskip("ctranslate2")
    tokenizer = tiny_tokenizer()
    model = tiny_model(name, vocabulary_of(tokenizer))
    config = derive(ARCHITECTURES[name].preset, TINY_CONFIGS[name], "test")
    checkpoint.save(tmp_path / "model.pt", to_checkpoint(model, name, config, tokenizer, [], 7))
    result = CliRunner().invoke(
        main, ["export", "--format", "ctranslate2", str(tmp_path / "model.pt"), str(tmp_path / "out")]
    )
    if name == "transformer_tiny":
        assert result.exit_code == 0, result.output
    else:
        assert result.exit_code == 2 and "plain Transformer only" in result.stderr
        assert not (tmp_path / "out").exists()


def test_a_subclass_and_an_unknown_setting_are_refused() -> None:
    class Other(Transformer):
        pass

    @dataclasses.dataclass(frozen=True, kw_only=True)
    class Wider(TransformerConfig):
        gates: int = option(1, "gates", min=1)

    vocabulary = Vocabulary(source=30, target=30, joint=True)
    for model in (Other(TransformerConfig(d_model=16, heads=2, d_ff=8), vocabulary), tiny_model("transformer_tiny")):
        if type(model) is Transformer:
            model.config = Wider(d_model=16, heads=2, d_ff=8)
        with pytest.raises(ValueError, match="plain Transformer only"):
            export_module.check_expressible(model, Path("model.pt"))


def test_a_damaged_folder_is_refused(tmp_path) -> None:
    pytest.importorskip("safetensors")
    model = save_model(tmp_path / "model.pt")
    export("--format", "safetensors", model, tmp_path / "folder")
    text = (tmp_path / "folder/nmtkit.json").read_text()
    facts = json.loads(text)
    for wrong in ([], 3, {}, facts | {"config": None}, facts | {"shared": []}, facts | {"update": "7"},
                  facts | {"nmtkit": 1}, facts | {"shared": {"a": "b"}}):  # fmt: skip
        (tmp_path / "folder/nmtkit.json").write_text(json.dumps(wrong))
        result = CliRunner().invoke(
            main, ["export", "--format", "checkpoint", str(tmp_path / "folder"), str(tmp_path / "back.pt")]
        )
        assert (result.exit_code == 2 and "nmtkit.json" in result.stderr) or "is damaged" in result.stderr, wrong
        assert not (tmp_path / "back.pt").exists()


@pytest.mark.parametrize(
    ("changes", "arguments", "message"),
    [
        ({"window": 5}, ["--format", "ctranslate2", "model.pt", "out"], "has window 5"),
        ({"d_key": 4}, ["--format", "ctranslate2", "model.pt", "out"], "has d_key 4"),
        ({}, ["--format", "safetensors", "model.pt", "taken"], "exists already"),
        ({}, ["--format", "safetensors", "--quantization", "int8", "model.pt", "out"], "--quantization is for"),
        ({}, ["--format", "checkpoint", "taken", "out.pt"], "holds no nmtkit.json"),
    ],
)
def test_mistakes_are_named_and_leave_nothing(tmp_path, monkeypatch, changes, arguments, message):
    for package in ("ctranslate2", "safetensors"):
        pytest.importorskip(package)
    monkeypatch.chdir(tmp_path)
    save_model(tmp_path / "model.pt", **changes)
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken/file").touch()
    result = CliRunner().invoke(main, ["export", *arguments])
    assert result.exit_code == 2
    assert message in result.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model.pt", "taken"]
