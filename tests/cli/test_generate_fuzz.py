"""With hostile flags and text, generate and score do their work, or end with exit code 2 and one line of error."""

import random
from pathlib import Path

import pytest
from builders import save_tiny_transformer, tiny_tokenizer
from click.testing import CliRunner

from nmtkit.cli import main
from nmtkit.cli.generate import command as generate
from nmtkit.cli.score import command as score

WORDS = ["0", "1", "2", "3", "-1", "0.5", "1e9", "nan", "inf", "-inf", "1e400", "99999999999999999999", "none", "true"]
WORDS += [
    "",
    " ",
    "text",
    "nowhere",
    "chrf",
    "bleu",
    "ter",
    "hard",
    "soft",
    "jsonl",
    "json",
    "cpu",
    "cuda:9",
    "\x00",
    "ü",
]
LINES = ["a dog runs .", "", "\t", "the cat\ttwo men", "x" * 300, "🙂", "▁", "\x00\x1b[0m", "two\rmen", "<unk> </s>"]
KEPT = {"--device", "--workers", "--plugin", "--threads", "--path"}  # slow flags, and flags of the process itself


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("fuzz")
    save_tiny_transformer(path / "model.pt", tiny_tokenizer())
    (path / "text").write_text("".join(line + "\n" for line in LINES))
    return path


def random_flags(command, draw: random.Random, number: int) -> list[str]:
    """Draws some flags of a command, most of them with a valid value."""
    options = [option for option in command.params if option.opts[0].startswith("-") and option.opts[-1] not in KEPT]
    flags: list[str] = []
    for option in draw.sample(options, number):
        flags.append(option.opts[-1])
        if not option.is_flag:
            choices = (option.metavar or "").split("|")
            flags.append(draw.choice(choices if len(choices) > 1 and draw.random() < 0.8 else WORDS))
    return flags


def check(arguments: list[str], text: bytes) -> bool:
    result = CliRunner().invoke(main, arguments, input=text)
    assert result.exception is None or isinstance(result.exception, SystemExit), (arguments, result.exception)
    assert result.exit_code in (0, 2), (arguments, result.exit_code)
    if result.exit_code == 2:
        assert result.stderr.splitlines()[-1].startswith("nmtkit: error: "), (arguments, result.stderr)
    return result.exit_code == 0


def fuzz_generate(folder: Path, seeds: range) -> None:
    done = 0
    for seed in seeds:
        draw = random.Random(seed)
        limits = [] if draw.random() < 0.3 else ["--max-len-a", "0", "--max-len-b", str(draw.randint(0, 6))]
        flags = random_flags(generate, draw, draw.randint(0, 3))
        text = "".join(draw.choice(LINES) + "\n" for _ in range(draw.randint(0, 5))).encode()
        if draw.random() < 0.1:
            text += bytes(draw.randrange(256) for _ in range(20))
        done += check(["generate", "--device", "cpu", "--path", str(folder / "model.pt"), *limits, *flags], text)
    assert done > len(seeds) / 20


def fuzz_score(folder: Path, seeds: range) -> None:
    done = 0
    for seed in seeds:
        draw = random.Random(seed)
        flags = random_flags(score, draw, draw.randint(0, 2))
        text = (folder / "text").read_bytes() if draw.random() < 0.9 else bytes(draw.randrange(256) for _ in range(20))
        done += check(["score", "--ref", str(folder / "text"), "--metric", "bleu,chrf", *flags], text)
    assert done > len(seeds) / 20


@pytest.mark.slow
def test_random_flags_and_lines_do_not_break_generate(folder, monkeypatch):
    monkeypatch.chdir(folder)
    fuzz_generate(folder, range(60))


@pytest.mark.slow
def test_random_flags_and_lines_do_not_break_score(folder, monkeypatch):
    monkeypatch.chdir(folder)
    fuzz_score(folder, range(60))


@pytest.mark.slow
@pytest.mark.parametrize("part", range(3))
def test_many_random_flags_and_lines_break_neither(folder, monkeypatch, part):
    monkeypatch.chdir(folder)
    fuzz_generate(folder, range(1000 + 100 * part, 1100 + 100 * part))
    fuzz_score(folder, range(1000 + 100 * part, 1100 + 100 * part))
