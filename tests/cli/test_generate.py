"""The command: what it reads, what it writes where, and how it refuses."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner, Result

from nmtkit import checkpoint
from nmtkit.architectures import ARCHITECTURES
from nmtkit.cli import main
from nmtkit.data.spm_training import train_model
from nmtkit.data.tokenizer import Tokenizer
from nmtkit.models import build, to_checkpoint, vocabulary_of
from nmtkit.registry import derive

WORDS = ["a", "the", "dog", "cat", "runs", "sleeps", "in", "on", "park", "street", ".", "!", "two", "men", "women"]
LINES = ["a dog runs .", "", "two men sleeps in the park !", "  ", "🙂 كلب", "the cat"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Holds model.pt, of a random tiny Transformer, and the text test.en and test.de."""
    path = tmp_path_factory.mktemp("generate")
    tokenizer = Tokenizer(train_model([" ".join(WORDS[i:] + WORDS[:i]) for i in range(len(WORDS))], 330))
    torch.manual_seed(1)
    small = {"encoder_layers": 1, "decoder_layers": 1, "d_model": 16, "d_ff": 24, "heads": 2}
    config = derive(ARCHITECTURES["transformer_tiny"].preset, small, "test")
    model = build("transformer_tiny", config, vocabulary_of(tokenizer))
    checkpoint.save(path / "model.pt", to_checkpoint(model, "transformer_tiny", config, tokenizer, [], 1))
    for language in ("en", "de"):
        (path / f"test.{language}").write_text("\n".join(LINES) + "\n")
    return path


def run(*arguments: object, text: str | bytes | None = None) -> Result:
    command = ["generate", "--device", "cpu", "--max-len-a", "0", "--max-len-b", "6", *map(str, arguments)]
    return CliRunner().invoke(main, command, input=text)


def test_standard_input_gives_a_line_for_each_line(folder):
    result = run("--path", folder / "model.pt", text="\n".join(LINES))
    assert result.exit_code == 0, result.output
    lines = result.stdout.split("\n")
    assert len(lines) == len(LINES) + 1 and lines[-1] == ""
    assert lines[1] == lines[3] == "" and lines[0] != ""
    assert result.stderr == ""


def test_nothing_in_gives_nothing_out(folder):
    result = run("--path", folder / "model.pt", text="")
    assert (result.exit_code, result.stdout) == (0, "")


def test_files_one_after_the_other_equal_standard_input(folder):
    twice = run("--path", folder / "model.pt", "--input", folder / "test.en", "--input", folder / "test.en")
    assert twice.stdout == run("--path", folder / "model.pt", text="\n".join(LINES)).stdout * 2


def test_workers_equal_one_process(folder):
    one = run("--path", folder / "model.pt", "--input", folder / "test.en")
    two = run("--path", folder / "model.pt", "--input", folder / "test.en", "--workers", 2, "--max-tokens", 8)
    assert two.exit_code == 0 and one.stdout == two.stdout


def test_jsonl_holds_the_nbest(folder):
    result = run("--path", folder / "model.pt", "--format", "jsonl", "--nbest", 3, text="\n".join(LINES))
    rows = [json.loads(line) for line in result.stdout.split("\n")[:-1]]
    assert [row["id"] for row in rows] == list(range(len(LINES)))
    assert [row["source"] for row in rows] == LINES
    for row in rows:
        assert {"text", "pieces", "score", "log_probability"} <= set(row["hypotheses"][0])
    assert [len(row["hypotheses"]) for row in rows] == [3, 1, 3, 1, 3, 3]
    text = run("--path", folder / "model.pt", text="\n".join(LINES)).stdout.split("\n")[:-1]
    assert [row["hypotheses"][0]["text"] for row in rows] == text


@pytest.mark.parametrize(
    ("arguments", "text", "message"),
    [
        (["--path", "nowhere.pt"], "", "checkpoint nowhere.pt: no such file"),
        (["--path", "FOLDER/model.pt", "--input", "nowhere.en"], "", "nowhere.en"),
        (["--path", "FOLDER/model.pt", "--input", "FOLDER/empty"], "", "empty is empty"),
        (["--path", "FOLDER/model.pt"], b"fine\nb\xffd\n", "standard input:2: byte 2 of the line is no UTF-8"),
        (["--path", "FOLDER/model.pt", "--gen-subset", "test"], "", "--gen-subset names a part of a dataset"),
        (["--path", "FOLDER/model.pt", "--nbest", "2"], "", "--nbest above 1 needs --format jsonl"),
        (["--path", "FOLDER/model.pt", "--beam", "0"], "", "--beam is 0"),
        (["--path", "FOLDER/model.pt", "--workers", "2", "--threads", "2"], "", "--workers are CPU processes"),
        (["FOLDER", "--path", "FOLDER/model.pt"], "", "is no nmtkit dataset"),
    ],
)
def test_mistakes_are_named_and_exit_with_2(folder, arguments, text, message):
    (folder / "empty").write_bytes(b"")
    result = run(*[argument.replace("FOLDER", str(folder)) for argument in arguments], text=text)
    assert result.exit_code == 2
    assert message in result.stderr
    assert result.stdout == "" or "UTF-8" in message


def test_a_reader_that_leaves_early_ends_the_run_quietly(folder):
    command = f"{sys.executable} -m nmtkit generate --device cpu --max-len-b 3 --max-len-a 0 --path {folder}/model.pt"
    lines = "a dog runs .\n" * 20_000
    result = subprocess.run(f"{command} | head -n 1", shell=True, input=lines.encode(), capture_output=True)
    assert result.stdout.count(b"\n") == 1
    assert result.stderr == b""
