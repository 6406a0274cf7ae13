"""Checkpoints with 8-bit weights: their size, and their use in every command."""

import io
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from builders import REAL_LINES, WORDS, save_tiny_transformer, save_transformer, tiny_tokenizer
from click.testing import CliRunner

import nmtkit
from nmtkit.cli import main
from nmtkit.data import checkpoint_file
from nmtkit.models import checkpoint
from nmtkit.models.architectures import ARCHITECTURES
from nmtkit.models.architectures.transformer import Transformer
from nmtkit.models.building import build, from_checkpoint, to_checkpoint, tokenizer_of, vocabulary_of
from nmtkit.models.layers import int8, prepack
from nmtkit.translation.search.shortlist import Shortlist

LINES = [*REAL_LINES[5:], ""]


def command(*arguments: object) -> str:
    result = CliRunner().invoke(main, [str(argument) for argument in arguments])
    assert result.exit_code == 0, result.output
    return result.stdout


def refused(*arguments: object) -> str:
    result = CliRunner().invoke(main, [str(argument) for argument in arguments])
    assert result.exit_code == 2 and result.stdout == "", result.output
    return " ".join(result.stderr.split())


def shrink(path: Path, name: str = "small.pt") -> Path:
    small = path.with_name(name)
    command("export", "--format", "checkpoint", "--quantization", "int8", path, small)
    return small


def shortlist_for(path: Path) -> dict[str, torch.Tensor]:
    size = tokenizer_of(checkpoint.load(path), path).source_size
    ids = np.arange(size)
    return Shortlist.from_entries(ids, ids, np.arange(3, 40), size, size).state()


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The checkpoint of a random model, with a shortlist and training state."""
    path = save_transformer(tmp_path_factory.mktemp("small") / "model.pt")
    checkpoint_file.save(
        path, checkpoint.load(path) | {"shortlist": shortlist_for(path), "training": {"x": torch.ones(9)}}
    )
    return path


@pytest.fixture(scope="module")
def small(path: Path) -> Path:
    return shrink(path)


def in_fp32(path: Path) -> dict[str, torch.Tensor]:
    """Returns the weights of a small checkpoint: each row of integers times its scale."""
    contents = torch.load(path, weights_only=True)
    weights, owner = contents["model"], checkpoint.tied_to(contents["model"])
    return {
        name: (weights[name].double() * contents["scales"][owner[name]].double()[:, None]).float()
        if weights[name].dtype == torch.int8
        else weights[name]
        for name in weights
    }


def test_a_small_checkpoint_is_complete_and_holds_rounded_matrices(path: Path, small: Path) -> None:
    contents = torch.load(small, weights_only=True)
    assert "training" not in contents
    assert contents["shortlist"].keys() == {"lengths", "targets", "frequent"}
    before, stored, after = (source["model"] for source in (checkpoint.load(path), contents, checkpoint.load(small)))
    assert before.keys() == stored.keys() == after.keys()
    for name, weight in before.items():
        if weight.dim() == 2:
            assert stored[name].dtype == torch.int8
            assert torch.equal(after[name], in_fp32(small)[name])
            half = weight.abs().amax(1, keepdim=True) / 127 / 2
            assert ((after[name] - weight).abs() <= half * 1.001).all() and not torch.equal(after[name], weight)
        else:
            assert torch.equal(stored[name], weight) and torch.equal(after[name], weight)
    tied = ("source_embedding.tokens.weight", "output_projection.weight")
    for model in (stored, after):
        assert len({model[name].data_ptr() for name in tied}) == 1
    assert set(contents["scales"]) & set(tied) == {tied[0]}


def test_a_file_has_a_byte_for_each_weight_of_a_matrix(tmp_path: Path) -> None:
    """The rest is 4 bytes for each row and for each number of a vector, the tokenizer, and 64 kB of the format."""
    tokenizer, config = tiny_tokenizer(), ARCHITECTURES["student_tiny"].preset
    model = build("student_tiny", config, vocabulary_of(tokenizer))
    contents = to_checkpoint(model, "student_tiny", config, tokenizer, [], 1)
    checkpoint_file.save(tmp_path / "model.pt", contents)
    parameters = list(model.parameters())  # a tied weight once
    matrices = sum(weight.numel() + 4 * len(weight) for weight in parameters if weight.dim() == 2)
    vectors = sum(4 * weight.numel() for weight in parameters if weight.dim() == 1)
    pieces = sum(part.numel() for part in contents["tokenizer"].values())
    size = shrink(tmp_path / "model.pt").stat().st_size
    assert 0 < size - (matrices + vectors + pieces) < 65_536
    assert size < (tmp_path / "model.pt").stat().st_size / 3.7


def generate(path: Path, *flags: object) -> list[dict[str, Any]]:
    folder = path.parent
    (folder / "in").write_text("".join(f"{line}\n" for line in LINES))
    lines = command(
        "generate", "--path", path, "--input", folder / "in", "--format", "jsonl", "--device", "cpu", *flags
    )
    return [json.loads(line) for line in lines.splitlines()]


@pytest.mark.slow
@pytest.mark.parametrize(
    "flags",
    [[], ["--precision", "int8"], ["--shortlist"], ["--precision", "int8", "--shortlist"], ["--alignment", "soft"]],
    ids=["fp32", "int8", "shortlist", "int8_shortlist", "alignment"],
)
def test_translations_are_those_of_the_rounded_weights(path: Path, small: Path, flags: list[str]) -> None:
    expected_path = path.with_name("rounded.pt")
    checkpoint_file.save(expected_path, checkpoint.load(path) | {"model": in_fp32(small)})
    found, expected = generate(small, *flags), generate(expected_path, *flags)
    assert [row["hypotheses"][0]["text"] for row in found] == [row["hypotheses"][0]["text"] for row in expected]
    assert any(row["hypotheses"][0]["text"] for row in found)
    for one, other in zip(found, expected, strict=True):
        assert one["hypotheses"][0]["score"] == pytest.approx(other["hypotheses"][0]["score"], abs=1e-4)


@pytest.mark.slow
def test_int8_inference_uses_the_integers_of_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The model has the same embeddings in both files, and only int8 layers: results are bitwise equal.

    Processors without VNNI would use integers up to 63, and so round the weights of the file again.
    """
    monkeypatch.setattr(prepack, "largest_int8_weight", lambda: 127)
    wide = {"d_model": 512, "d_ff": 512, "heads": 2, "encoder_layers": 1, "decoder_layers": 1}
    path = save_tiny_transformer(tmp_path / "wide.pt", tiny_tokenizer(), sharpness=3.0, tie_output=False, **wide)
    contents = checkpoint.load(path)
    for name, weight in contents["model"].items():
        if "embedding" in name:
            weight.copy_(int8.dequantize(*int8.quantize(weight)))
    checkpoint_file.save(path, contents)
    lines = [" ".join(WORDS[start : start + 6]) for start in range(6)]
    found = [nmtkit.load(str(file), device="cpu", precision="int8").translate(lines, nbest=2, max_len_b=8)
             for file in (path, shrink(path))]  # fmt: skip
    texts = [[[h.text for h in t.hypotheses] for t in each] for each in found]
    scores = [[h.score for t in each for h in t.hypotheses] for each in found]
    assert texts[0] == texts[1] and scores[0] == scores[1]


@pytest.mark.slow
def test_other_commands_read_a_small_checkpoint(small: Path, tmp_path: Path) -> None:
    pytest.importorskip("safetensors")
    (tmp_path / "in").write_text(f"{LINES[0]}\n")
    flags = ["--input", tmp_path / "in", "--reference", tmp_path / "in", "--score-reference", "--device", "cpu"]
    assert float(command("generate", "--path", small, *flags).split()[0]) < 0
    assert command("generate", "--path", small, "--path", small, "--input", tmp_path / "in", "--device", "cpu").strip()
    command("attention", "--path", small, "--output", tmp_path / "page.html", LINES[0])
    inspected = command("inspect", small, "--verify")
    assert re.search("weights +8 bits", inspected)
    assert "checksum is correct" in inspected
    command("export", "--format", "safetensors", small, tmp_path / "folder")
    command("export", "--format", "checkpoint", small, tmp_path / "back.pt")
    command("export", "--format", "checkpoint", "--quantization", "int8", tmp_path / "folder", tmp_path / "again.pt")
    whole = torch.load(tmp_path / "back.pt", weights_only=True)
    assert "scales" not in whole and whole["checksum"] == checkpoint_file.checksum(whole)
    again = torch.load(tmp_path / "again.pt", weights_only=True)
    for name, weight in checkpoint_file.read(small)["model"].items():
        assert torch.equal(again["model"][name], weight)
        assert torch.equal(whole["model"][name], checkpoint.load(small)["model"][name])
    for name, part in checkpoint_file.read(small)["shortlist"].items():
        assert torch.equal(again["shortlist"][name], part)


def test_a_shortlist_is_added_to_a_small_checkpoint_that_stays_small(mirror_data: Path, tmp_path: Path) -> None:
    from nmtkit.data.dataset.binarized import Dataset

    path = save_tiny_transformer(tmp_path / "model.pt", Dataset.open(mirror_data).tokenizer)
    small = shrink(path)
    command("shortlist", mirror_data, "--path", small)
    contents = checkpoint_file.read(small)
    assert "shortlist" in contents and contents["scales"]
    assert contents["model"]["output_projection.weight"].dtype == torch.int8


def test_an_average_of_small_checkpoints_is_refused(path: Path, small: Path, tmp_path: Path) -> None:
    told = refused("average-checkpoints", path, small, "--output", tmp_path / "mean.pt")
    assert f"{small} has 8-bit weights" in told
    assert not (tmp_path / "mean.pt").exists()


def test_an_existing_file_and_a_format_without_types_are_refused(path: Path, small: Path, tmp_path: Path) -> None:
    told = refused("export", "--format", "checkpoint", "--quantization", "int8", path, small)
    assert f"{small} exists already" in told


@pytest.mark.slow
@pytest.mark.parametrize("adapted", [False, True], ids=["all_weights", "adapters"])
def test_training_continues_from_a_small_checkpoint(mirror_data: Path, tmp_path: Path, adapted: bool) -> None:
    from nmtkit.data.dataset.binarized import Dataset

    small = shrink(save_tiny_transformer(tmp_path / "model.pt", Dataset.open(mirror_data).tokenizer))
    flags = ["--max-update", "1", "--lr", "1e-9", "--metrics", "none", "--threads", "1", "--save-dir", tmp_path / "run"]
    flags += ["--adapter-rank", "2"] if adapted else []
    command("train", mirror_data, "--finetune-from", small, *flags)
    trained, start = checkpoint.load(tmp_path / "run/last.pt"), checkpoint.load(small)
    for name, weight in start["model"].items():
        torch.testing.assert_close(trained["model"][name], weight, rtol=0, atol=1e-6)


@pytest.mark.parametrize("change", ["missing_row", "float_weights", "infinite", "list"])
def test_scales_that_do_not_match_are_refused(small: Path, tmp_path: Path, change: str) -> None:
    contents = checkpoint_file.read(small)
    name = "output_projection.weight"
    first = "source_embedding.tokens.weight"
    assert torch.equal(contents["model"][name], contents["model"][first])
    scale = contents["scales"][first]
    if change == "missing_row":
        contents["scales"][first] = scale[1:]
    elif change == "float_weights":
        contents["model"] |= {key: contents["model"][first].float() for key in contents["model"] if "tokens" in key}
    elif change == "infinite":
        scale[3] = torch.inf
    else:
        contents["scales"] = [1]
    checkpoint_file.save(tmp_path / "wrong.pt", contents)
    with pytest.raises(ValueError, match=r"wrong\.pt( is damaged: the scales of |: scales is a list, not a dict)"):
        checkpoint.load(tmp_path / "wrong.pt")


def test_a_model_is_read_from_bytes_of_a_small_file_without_code(small: Path) -> None:
    contents = torch.load(io.BytesIO(small.read_bytes()), weights_only=True)
    assert contents["checksum"] == checkpoint_file.checksum(contents)
    model, _ = from_checkpoint(small)
    assert isinstance(model, Transformer) and model.output_projection.weight is model.target_embedding.tokens.weight
