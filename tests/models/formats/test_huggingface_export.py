"""A Transformer that is exported for transformers translates alike there, and is the same model after an import."""

import json
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from builders import REAL_LINES, fragments, save_ending_transformer, save_transformer
from click.testing import CliRunner
from make_huggingface import real_lines

from nmtkit.cli import main
from nmtkit.data import checkpoint_file
from nmtkit.models import checkpoint
from nmtkit.models.building import from_checkpoint
from nmtkit.models.formats import huggingface
from nmtkit.models.formats.huggingface_export import save
from nmtkit.models.formats.writing import BEAM, LENGTH_EXPONENT
from nmtkit.translation.translator import Translator

pytest.importorskip("safetensors")

SEARCH = {"lenpen": 0.0, "max_len_a": 0.0, "max_len_b": 60, "keep_loops": True}
VARIANTS = {
    "paper": {},
    "marian": {"positions": "sinusoidal_halves", "activation": "swish", "attention_bias": True, "output_bias": True},
    "two matrices": {"share_embeddings": False, "scale_embeddings": False},
}


def translations(path: Path, lines: Sequence[str] = REAL_LINES, beam: int = 4) -> list[tuple[list[str], float]]:
    model, tokenizer = from_checkpoint(path)
    found = Translator([model], tokenizer).translate(lines, beam=beam, **SEARCH)
    return [(line.hypotheses[0].pieces, line.hypotheses[0].log_probability) for line in found]


@pytest.mark.slow
@pytest.mark.parametrize("changes", VARIANTS.values(), ids=VARIANTS)
def test_export_and_import_give_the_same_translations(changes: dict[str, object], tmp_path: Path) -> None:
    path = save_transformer(tmp_path / "model.pt", **changes)
    save(path, tmp_path / "folder")
    checkpoint_file.save(tmp_path / "again.pt", huggingface.load(tmp_path / "folder"))
    for (before, score), (after, again) in zip(translations(path), translations(tmp_path / "again.pt"), strict=True):
        assert before == after
        assert score == pytest.approx(again, abs=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("changes", VARIANTS.values(), ids=VARIANTS)
def test_transformers_translates_an_exported_folder_as_nmtkit_does(changes: dict[str, object], tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    path = save_ending_transformer(tmp_path / "model.pt", **changes)
    folder = tmp_path / "folder"
    result = CliRunner().invoke(main, ["export", "--format", "huggingface", str(path), str(folder)])
    assert result.exit_code == 0, result.output
    model = transformers.MarianMTModel.from_pretrained(folder).eval()
    model.generation_config.forced_eos_token_id = None  # at the limit, transformers would not count its log probability
    tokenizer = transformers.MarianTokenizer.from_pretrained(folder)
    lines = real_lines(200)
    for beam in (1, 4):
        ended, seen = 0, set()
        for line, (pieces, score) in zip(lines, translations(path, lines, beam=beam), strict=True):
            source = tokenizer(line, return_tensors="pt").input_ids
            found = model.generate(source, num_beams=beam, length_penalty=0.0, max_length=62)
            ids = found[0].tolist()
            if len(pieces) == 60 or ids[-1] != model.config.eos_token_id:
                continue
            ended += 1
            seen.add(tuple(pieces))
            assert tokenizer.convert_ids_to_tokens(ids[1:-1]) == pieces, line
            with torch.inference_mode():
                steps = model(input_ids=source, decoder_input_ids=found[:, :-1]).logits.log_softmax(-1)
            theirs = steps.gather(2, found[:, 1:, None]).double().sum()
            assert float(theirs) == pytest.approx(score, rel=1e-5, abs=2e-4)
        assert ended > 0.5 * len(lines) and len(seen) > len(lines) / 10


@pytest.mark.slow
def test_the_defaults_of_both_programs_differ_in_few_lines(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    path = save_ending_transformer(tmp_path / "model.pt")
    save(path, tmp_path / "folder")
    model = transformers.MarianMTModel.from_pretrained(tmp_path / "folder").eval()
    tokenizer = transformers.MarianTokenizer.from_pretrained(tmp_path / "folder")
    lines, differing = fragments(), {}
    expected = Translator.load(path, device="cpu").translate(lines)
    for name, settings in {"export": {}, "transformers": {"length_penalty": 1.0, "early_stopping": False}}.items():
        texts = []
        for line in lines:
            (ids,) = model.generate(tokenizer(line, return_tensors="pt").input_ids, **settings)
            texts.append(tokenizer.decode(ids, skip_special_tokens=True))
        differing[name] = sum(text != each.text for text, each in zip(texts, expected, strict=True))
    assert differing["export"] <= min(len(lines) // 20, differing["transformers"])


def test_a_model_card_tells_what_the_model_is(tmp_path: Path) -> None:
    path = save_transformer(tmp_path / "model.pt")
    contents = checkpoint.load(path)
    contents |= {"scores": {"bleu": 31.25}, "run": {"command": "nmtkit train data-bin"}}
    checkpoint_file.save(path, contents)
    save(path, tmp_path / "folder")
    card = (tmp_path / "folder/README.md").read_text()
    assert "31.25" in card and "nmtkit train data-bin" in card and "32 wide" in card
    assert json.loads((tmp_path / "folder/config.json").read_text())["model_type"] == "marian"
    search = json.loads((tmp_path / "folder/generation_config.json").read_text())
    assert (search["num_beams"], search["length_penalty"]) == (BEAM, LENGTH_EXPONENT)
    assert "generation_config.json" in card and f"length ** {LENGTH_EXPONENT}" in card


@pytest.mark.parametrize(
    ("changes", "named"),
    [({"pre_norm": True}, "pre_norm"), ({"activation": "swiglu"}, "activation"), ({"window": 3}, "window")],
)
def test_what_marian_cannot_express_is_refused_by_name(changes: dict[str, object], named: str, tmp_path: Path) -> None:
    path = save_transformer(tmp_path / "model.pt", **changes)
    with pytest.raises(ValueError, match=named):
        save(path, tmp_path / "folder")
    assert not (tmp_path / "folder").exists()
