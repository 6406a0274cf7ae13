"""`generate --output-dir` and `merge`: the joined shards are the output of `generate` on the whole input."""

import gzip
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from builders import WORDS, save_tiny_transformer, tiny_tokenizer
from click.testing import CliRunner, Result

from nmtkit.cli import main
from nmtkit.cli.shards import run_shards
from nmtkit.jobs.shard_options import ShardOptions
from nmtkit.jobs.shard_plan import Shard, divide, open_plan
from nmtkit.translation.engines.engine import Decoder

LINES = [" ".join(WORDS[number % 7 : number % 7 + 1 + number % 5]) for number in range(23)] + ["", "a\u2028dog"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("shards")
    save_tiny_transformer(path / "model.pt", tiny_tokenizer(), decoder_layers=1)
    text = "".join(f"{line}\r\n" for line in LINES).encode()
    (path / "text").write_bytes(b"\xef\xbb\xbf" + text)
    (path / "text.gz").write_bytes(gzip.compress(text))
    (path / "table.tsv").write_text("en\tde\n" + "".join(f"{line}\tx\n" for line in LINES))
    (path / "reference").write_text("".join(f"{line} .\n" for line in reversed(LINES)))
    (path / "reference.gz").write_bytes(gzip.compress((path / "reference").read_bytes()))
    return path


def generate(folder: Path, *arguments: object) -> Result:
    command = ["generate", "--path", folder / "model.pt", "--device", "cpu", *arguments]
    return CliRunner().invoke(main, list(map(str, command)))


def rounded(lines: str) -> str:
    """Returns the lines with numbers of 4 significant digits."""
    return re.sub(r"-?\d+\.\d+", lambda number: f"{float(number[0]):.4g}", lines)


SHORT = ("--max-len-a", 0, "--max-len-b", 6)
CASES: dict[str, tuple[str, ...]] = {
    "text": ("--input", "text"),
    "two processes": ("--input", "text", "--workers", "2"),
    "compressed": ("--input", "text.gz"),
    "two files": ("--input", "text", "--input", "text.gz"),
    "a corpus": ("--input", "table.tsv", "--source-lang", "en", "--target-lang", "de"),
    "lines of a corpus": ("--input", "table.tsv", "--input-format", "text"),
    "n-best lists": ("--input", "text", "--nbest", "3", "--format", "jsonl"),
    "samples": ("--input", "text", "--sampling", "--seed", "3", "--nbest", "2", "--format", "jsonl"),
    "prefixes": ("--input", "text", "--prefix", "reference.gz"),
    "scores": ("--input", "text", "--score-reference", "--reference", "reference"),
}


def test_the_log_names_the_engine_once_for_all_processes(
    folder: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Decoder, "tell", lambda *arguments, **more: os.write(2, b"told by %d\n" % os.getpid()))
    words = ["--input", folder / "text", "--output-dir", tmp_path / "job", "--shard-lines", 5, "--workers", 2]
    assert generate(folder, *words, *SHORT).exit_code == 0
    assert len(set(re.findall(r"told by \d+", capfd.readouterr().err))) == 1


@pytest.mark.parametrize("sharded", [False, True])
def test_lines_of_several_sentences_are_told_if_they_are_translated(
    folder: Path, tmp_path: Path, sharded: bool
) -> None:
    (tmp_path / "text").write_text("A dog runs. A cat sleeps.\n" * 3)
    flags = ["--input", tmp_path / "text", *(["--output-dir", tmp_path / "shards"] if sharded else [])]
    assert "--split-sentences" in generate(folder, *flags, *SHORT).stderr
    flags = [*flags[:2], *(["--output-dir", tmp_path / "scores"] if sharded else [])]
    scored = generate(folder, *flags, "--score-reference", "--reference", tmp_path / "text")
    assert scored.exit_code == 0 and "--split-sentences" not in scored.stderr


@pytest.mark.slow
@pytest.mark.parametrize("arguments", CASES.values(), ids=CASES)
def test_the_joined_shards_are_the_output_of_the_whole_input(
    folder: Path, tmp_path: Path, arguments: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    if "--source-lang" in arguments:  # the languages of the columns are not languages of this model
        monkeypatch.setattr("nmtkit.cli.generate_run.languages_of_input", lambda *_: ("en", "de"))
        arguments = arguments[:2]
    lengths = () if "--score-reference" in arguments else SHORT
    whole = generate(folder, *arguments, *lengths)
    assert whole.exit_code == 0, whole.output
    shards = generate(folder, *arguments, *lengths, "--output-dir", tmp_path / "shards", "--shard-lines", 4)
    assert shards.exit_code == 0, shards.output
    assert shards.stdout == ""
    merged = CliRunner().invoke(main, ["merge", str(tmp_path / "shards")])
    assert whole.stdout.count("\n") >= len(LINES)
    if "jsonl" in arguments:  # the last digits of scores depend on the batch
        assert rounded(merged.stdout) == rounded(whole.stdout)
    else:
        assert merged.stdout == whole.stdout
    messages = [line for line in whole.stderr.splitlines() if "carriage" in line or "byte-order" in line]
    assert [line for line in shards.stderr.splitlines() if "carriage" in line or "byte-order" in line] == messages


def test_a_job_array_and_merge(folder: Path, tmp_path: Path) -> None:
    flags = ("--input", folder / "text", *SHORT, "--output-dir", tmp_path / "shards", "--shard-lines", 4)
    one = generate(folder, *flags, "--shard", "1/3")
    assert "shards 2-3, 5-6 of 7" in one.stderr
    missing = CliRunner().invoke(main, ["merge", str(tmp_path / "shards"), "--output", str(tmp_path / "out")])
    assert (missing.exit_code, (tmp_path / "out").exists()) == (2, False)
    assert "lacks shards 2-3, 5-6 of 7" in missing.stderr
    assert "continuing, shards 2, 5 left" not in generate(folder, *flags, "--shard", "2/3").stderr
    done = generate(folder, *flags)
    assert "continuing, shards 3, 6 left" in done.stderr
    assert f"nmtkit merge {tmp_path / 'shards'} --output FILE" in done.stderr
    merged = CliRunner().invoke(main, ["merge", str(tmp_path / "shards"), "--output", str(tmp_path / "out")])
    assert "25 lines of 7 shards" in merged.stderr
    assert (tmp_path / "out").read_text() == generate(folder, "--input", folder / "text", *SHORT).stdout


def test_another_search_or_model_is_refused_and_speed_may_change(folder: Path, tmp_path: Path) -> None:
    flags = ("--input", folder / "text", *SHORT, "--output-dir", tmp_path / "shards", "--shard-lines", 20)
    assert generate(folder, *flags).exit_code == 0
    assert generate(folder, *flags, "--max-tokens", 100).exit_code == 0
    other = generate(folder, *flags, "--beam", 2)
    assert other.exit_code == 2 and "--beam  4              2" in other.stderr
    save_tiny_transformer(tmp_path / "model.pt", tiny_tokenizer(), decoder_layers=1, seed=2)
    other = CliRunner().invoke(
        main, ["generate", "--path", str(tmp_path / "model.pt"), "--device", "cpu", *map(str, flags)]
    )
    assert other.exit_code == 2 and "  model  " in other.stderr


@pytest.mark.parametrize("corpus_first", [True, False])
def test_a_job_on_the_sentences_of_a_corpus_is_not_continued_on_its_lines(
    folder: Path, tmp_path: Path, corpus_first: bool
) -> None:
    (tmp_path / "a.tsv").write_text("a dog\tein Hund\ntwo men\tzwei Männer\n")
    flags = ("--input", tmp_path / "a.tsv", *SHORT, "--output-dir", tmp_path / "shards", "--shard-lines", 1)
    first, second = [(), ("--input-format", "text")][:: 1 if corpus_first else -1]
    assert generate(folder, *flags, *first, "--shard", "1/2").exit_code == 0
    assert generate(folder, *flags, *second).exit_code == 2
    assert generate(folder, *flags, *first).exit_code == 0


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--shard", "1/2"], "--shard does nothing"),
        (["--output-dir", "out"], "--output-dir does nothing"),
        (["--output-dir", "out", "--input", "text", "--output", "b"], "--output-dir and --output"),
        (["--output-dir", "out", "--input", "text", "--actor-gpus", "1"], "--actor-gpus does nothing without"),
        (["--output-dir", "out", "--input", "a.html"], "--output-dir and a document"),
        (["--output-dir", "out", "--input", "/dev/stdin"], "/dev/stdin is not"),
        (["--output-dir", "out", "--input", "text", "--pivot", "en"], "--output-dir and --pivot"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_flags_without_effect_are_refused(
    folder: Path, flags: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("text", "a.html"):
        Path(name).touch()
    result = generate(folder, *flags)
    assert result.exit_code == 2 and message in result.stderr


@pytest.mark.slow
def test_a_wrong_line_stops_the_job_with_its_number(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "text").write_bytes("".join(f"{line}\n" for line in LINES).encode() + b"\xff\n")
    result = generate(folder, "--input", tmp_path / "text", "--output-dir", tmp_path / "shards", "--shard-lines", 4)
    assert result.exit_code == 2 and "text:26: byte 1" in result.stderr


@pytest.mark.parametrize("text", ["text", "text.gz"])
def test_a_wrong_constraint_of_any_shard_is_an_error_before_the_first_batch(
    folder: Path, tmp_path: Path, text: str
) -> None:
    """The job translated all shards before the shard of the wrong line."""
    prefixes, avoided = tmp_path / "prefixes", tmp_path / "avoided"
    prefixes.write_text("\n" * 20 + "dog\n" + "\n" * 4), avoided.write_text("\n" * 20 + "dog\n" + "\n" * 4)
    flags = ["--prefix", prefixes, "--avoid", avoided, "--output-dir", tmp_path / "out", "--shard-lines", 4]
    result = generate(folder, "--input", folder / text, *flags, *SHORT)
    assert result.exit_code == 2 and "line 21" in result.stderr, result.stderr
    assert not list((tmp_path / "out").glob("shard-*")) and not (tmp_path / "out/plan.json").exists()
    prefixes.write_text("\n" * 25)
    assert generate(folder, "--input", folder / text, *flags, *SHORT).exit_code == 0


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=["SIGINT", "SIGTERM"])
def test_a_signal_stops_the_job_and_shows_the_command_to_continue(
    number: signal.Signals, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "text").write_text("a\nb\nc\n")
    plan = open_plan(tmp_path / "out", {}, {}, ".txt", 1, "nmtkit", lambda: divide([tmp_path / "text"], 1))
    before = signal.getsignal(signal.SIGTERM)

    def run(shards: Sequence[Shard]) -> Iterator[tuple[Shard, dict[str, Any]]]:
        def lines() -> Iterator[bytes]:
            os.kill(os.getpid(), number)
            yield b"never"

        yield shards[0], {"lines": 1}
        plan.write(shards[1], lines(), {})  # type: ignore[arg-type]

    monkeypatch.setattr(sys, "argv", ["nmtkit", "generate", "--output-dir", "my shards", "--shard=1/1"])
    with pytest.raises(SystemExit) as stop:
        run_shards(ShardOptions(output_dir=plan.folder), plan, run)
    assert stop.value.code == 128 + number
    command = "nmtkit generate --output-dir 'my shards' --shard=1/1"
    assert f"{number.name}. To continue: {command}" in capsys.readouterr().err
    assert sorted(os.listdir(plan.folder)) == [".lock", "plan.json"]
    assert signal.getsignal(signal.SIGTERM) == before


@pytest.mark.slow
def test_killed_workers_and_drivers_change_no_byte(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "text").write_text("".join(f"{line}\n" for line in LINES * 200))
    shards = tmp_path / "shards"
    flags = ("--input", tmp_path / "text", *SHORT)
    words = ["generate", "--path", folder / "model.pt", "--device", "cpu", *flags, "--output-dir", shards]
    command = [sys.executable, "-m", "nmtkit", *map(str, words), "--shard-lines", "50", "--workers", "2"]
    for victim in ("worker", "driver"):
        before = len(list(shards.glob("*.done")))
        with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as driver:
            while len(list(shards.glob("*.done"))) < before + 2:
                assert driver.poll() is None
                time.sleep(0.02)
            children = Path(f"/proc/{driver.pid}/task/{driver.pid}/children").read_text().split()
            os.kill(int(children[0]) if victim == "worker" else driver.pid, signal.SIGKILL)
            assert driver.stderr is not None
            messages = driver.stderr.read()
        assert driver.returncode == (2 if victim == "worker" else -signal.SIGKILL)
        assert ("SIGKILL" in messages) == (victim == "worker")
        assert not (victim == "worker" and [name for name in os.listdir(shards) if ".tmp" in name])
    done = subprocess.run(command, stderr=subprocess.PIPE, text=True, check=True)
    assert "continuing, shard" in done.stderr
    merged = CliRunner().invoke(main, ["merge", str(shards)])
    assert merged.stdout == generate(folder, *flags).stdout
    assert [name for name in os.listdir(shards) if ".tmp" in name] == []
