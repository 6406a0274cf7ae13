"""CTranslate2 gives the translations of nmtkit. Models that CTranslate2 cannot express are refused."""

import dataclasses
from pathlib import Path

import pytest
from builders import REAL_LINES, TINY_CONFIGS, save_transformer, tiny_model, tiny_tokenizer
from click.testing import CliRunner

from nmtkit.cli import main
from nmtkit.config import derive, option
from nmtkit.data import checkpoint_file
from nmtkit.data.tokenizers.tokenizer import Tokenizer
from nmtkit.models.architectures import ARCHITECTURES, Vocabulary
from nmtkit.models.architectures.transformer import Transformer
from nmtkit.models.architectures.transformer_config import TransformerConfig
from nmtkit.models.building import to_checkpoint, vocabulary_of
from nmtkit.models.formats import ctranslate2
from nmtkit.models.formats.writing import TRAINING, check_expressible
from nmtkit.translation.search.types import Request
from nmtkit.translation.translator import Translator


def export(*arguments: object) -> str:
    result = CliRunner().invoke(main, ["export", *map(str, arguments)])
    assert result.exit_code == 0, result.output
    return result.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"pre_norm": True},
        {"positions": "learned", "share_embeddings": False, "tie_output": False},
        {"activation": "swish", "attention_bias": True, "output_bias": True, "positions": "sinusoidal_halves"},
        {"pre_norm": True, "activation": "gelu", "embedding_norm": True, "position_offset": 2, "norm_eps": 0.01},
        {"activation": "swiglu", "positions": "sinusoidal_fairseq", "scale_embeddings": False},
        {"positions": "rotary", "rotary_base": 100.0, "kv_heads": 2},
        {"positions": "rotary", "pre_norm": True, "norm": "rms", "d_key": 12, "d_value": 12, "kv_heads": 1},
        {"positions": "relative", "max_distance": 3},
        {"positions": "none", "norm": "rms"},
    ],
)
def test_ctranslate2_gives_the_same_translations_and_probabilities(tmp_path, changes):
    package = pytest.importorskip("ctranslate2")
    model = save_transformer(tmp_path / "model.pt", **changes)
    export("--format", "ctranslate2", model, tmp_path / "ct2")
    theirs, ours = package.Translator(str(tmp_path / "ct2")), Translator.load(model)
    tokenizer = Tokenizer.load(tmp_path / "ct2")
    sources = [tokenizer.source_pieces(ids[:-1]) for ids in tokenizer.encode_source(REAL_LINES).split()]
    never = {"disable_unk": True, "suppress_sequences": [["<s>"]]}  # nmtkit does this without an option
    greedy = theirs.translate_batch(sources, beam_size=1, max_decoding_length=20, **never)
    for line, result in zip(
        ours.translate(REAL_LINES, beam=1, max_len_a=0, max_len_b=20, keep_loops=True), greedy, strict=True
    ):
        assert line.hypotheses[0].pieces == result.hypotheses[0]
    targets = [tokenizer.target_pieces(ids[:-1]) for ids in tokenizer.encode_target(REAL_LINES[::-1]).split()]
    requests = [Request(line, reference=other) for line, other in zip(REAL_LINES, REAL_LINES[::-1], strict=True)]
    scored = ours.translate(requests, score_reference=True)
    for line, result in zip(scored, theirs.score_batch(sources, targets), strict=True):
        assert sum(result.log_probs) == pytest.approx(line.hypotheses[0].log_probability, rel=1e-4)


def test_int8_for_ctranslate2_is_smaller_and_loads(tmp_path):
    package = pytest.importorskip("ctranslate2")
    model = save_transformer(tmp_path / "model.pt")
    export("--format", "ctranslate2", "--quantization", "int8", model, tmp_path / "int8")
    export("--format", "ctranslate2", model, tmp_path / "float32")
    assert (tmp_path / "int8/model.bin").stat().st_size < (tmp_path / "float32/model.bin").stat().st_size
    assert package.Translator(str(tmp_path / "int8")).translate_batch([["▁All"]], max_decoding_length=5)


def test_every_setting_of_the_transformer_is_known_to_the_export() -> None:
    fields = {field.name for field in dataclasses.fields(TransformerConfig)}
    refused = {"window", "decoder_self_attention", "average_ffn", "average_gate", "ssru_norm"}
    refused |= {"average_separate_gates", "decoder_ffn", "decoder_tied_layers", "encoder_tied_layers", "zero_bos"}
    refused |= {"encoder_self_attention", "kernels", "qk_norm", "residual", "base_width"}
    assert ctranslate2.SAME | TRAINING | refused | {"positions"} == fields


@pytest.mark.parametrize("name", list(TINY_CONFIGS))
def test_what_ctranslate2_does_not_have_is_refused_with_the_reason(name: str, tmp_path) -> None:
    pytest.importorskip("ctranslate2")
    tokenizer = tiny_tokenizer()
    model = tiny_model(name, vocabulary_of(tokenizer))
    config = derive(ARCHITECTURES[name].preset, TINY_CONFIGS[name], "test")
    checkpoint_file.save(tmp_path / "model.pt", to_checkpoint(model, name, config, tokenizer, [], 7))
    result = CliRunner().invoke(
        main, ["export", "--format", "ctranslate2", str(tmp_path / "model.pt"), str(tmp_path / "out")]
    )
    if name == "transformer_tiny":
        assert result.exit_code == 0, result.output
    else:
        reason = "has decoder_self_attention ssru" if name == "student_tiny" else "use a Transformer, or"
        assert result.exit_code == 2 and reason in result.stderr
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
        with pytest.raises(ValueError, match="use a Transformer, or"):
            check_expressible(model, Path("model.pt"), "CTranslate2", ctranslate2.SAME, {})


@pytest.mark.parametrize(
    ("changes", "arguments", "message"),
    [
        ({"window": 5}, ["--format", "ctranslate2", "model.pt", "out"], "has window 5"),
        ({"d_key": 4}, ["--format", "ctranslate2", "model.pt", "out"], "keys of width 4"),
        ({"qk_norm": True}, ["--format", "ctranslate2", "model.pt", "out"], "has qk_norm True"),
        ({}, ["--format", "safetensors", "model.pt", "taken"], "exists already"),
        (
            {},
            ["--format", "safetensors", "--quantization", "int8", "model.pt", "out"],
            "--format argos",
        ),
        ({}, ["--format", "checkpoint", "taken", "out.pt"], "does not hold nmtkit.json"),
    ],
)
def test_mistakes_are_named_and_leave_nothing(tmp_path, monkeypatch, changes, arguments, message):
    for package in ("ctranslate2", "safetensors"):
        pytest.importorskip(package)
    monkeypatch.chdir(tmp_path)
    save_transformer(tmp_path / "model.pt", **changes)
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken/file").touch()
    result = CliRunner().invoke(main, ["export", *arguments])
    assert result.exit_code == 2
    assert message in result.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model.pt", "taken"]
