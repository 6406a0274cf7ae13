"""The command as a process: at a terminal, and on a stream too long for memory."""

import json
import os
import pty
import re
import resource
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from builders import REAL_LINES, save_tiny_transformer, save_transformer, tiny_tokenizer

from nmtkit.cli.prompt import typed_translations
from nmtkit.translation.search.options import SearchOptions
from nmtkit.translation.translator import Translator

WORDS = ["a", "the", "dog", "cat", "runs", "sleeps", "in", "on", "park", "street", ".", "!", "two", "men", "women"]


@pytest.fixture(scope="module")
def command(tmp_path_factory) -> list[str]:
    """Returns a command that translates each line of standard input into a few pieces with a random model."""
    path: Path = tmp_path_factory.mktemp("streams") / "model.pt"
    save_tiny_transformer(path, tiny_tokenizer(), decoder_layers=1)
    limits = ["--device", "cpu", "--threads", "1", "--max-len-a", "0", "--max-len-b", "3"]
    return [sys.executable, "-m", "nmtkit", "generate", "--path", str(path), *limits]


@pytest.mark.slow
@pytest.mark.parametrize("flags", [(), pytest.param(("--alignment", "hard"), marks=pytest.mark.slow)])
def test_a_terminal_gets_a_prompt_with_translation_score_and_on_request_links(command, flags):
    done = typed(command, b"a dog runs .\nthe cat\n", *flags)
    out, talk = done.stdout, done.stderr
    assert done.returncode == 0, talk
    translations = out.splitlines()
    assert len(translations) == 2 and all(translations)
    assert "Ctrl-D" in talk and len(re.findall("^> ", talk, re.MULTILINE)) == 3
    scored = re.findall(r"^(?:> )?  (-\d+\.\d{3})  (.*)$", talk, re.MULTILINE)
    assert len(scored) == 2
    for _, links in scored:
        assert bool(links) == bool(flags)
        assert all(re.fullmatch(r"\S+→\S+", pair) for pair in links.split())


def test_each_typed_line_has_its_number(tmp_path, monkeypatch):
    translator = Translator.load(save_tiny_transformer(tmp_path / "model.pt", tiny_tokenizer()))
    lines, options = ["the cat", "the cat", "the cat"], {"sampling": True, "max_len_a": 0.0, "max_len_b": 3}
    monkeypatch.setattr("nmtkit.cli.prompt.typed_lines", lambda: iter(lines))
    found = list(typed_translations(translator, translator.pipeline(SearchOptions(**options))))
    expected = translator.translate(lines, **options)
    assert [(each.id, each.text) for each in found] == [(each.id, each.text) for each in expected]
    assert len({each.text for each in found}) == 3


@pytest.mark.parametrize("alignment", ["hard", None])
def test_links_at_the_prompt_name_the_pieces_of_a_long_line(tmp_path, monkeypatch, caplog, alignment):
    """The tag is before each part of the line, but hard alignments count the tag once."""
    translator = Translator.load(save_transformer(tmp_path / "model.pt", tags=["<formal>"]), max_source_len=8)
    pipeline = translator.pipeline(SearchOptions(alignment=alignment, max_len_a=0.0), source_tag="<formal>")
    shown: list[str] = []
    monkeypatch.setattr("nmtkit.cli.prompt.print_line", lambda text, _: shown.append(text))
    monkeypatch.setattr("nmtkit.cli.prompt.typed_lines", lambda: iter(["the cat", REAL_LINES[0]]))
    _, translation = typed_translations(translator, pipeline)
    pieces = translator.tokenizer.source_pieces(translator.tokenizer.encode_source([f"<formal> {REAL_LINES[0]}"]).ids)
    best = translation.hypotheses[0]
    links = [f"{pieces[source]}→{best.pieces[target]}" for source, target in best.alignment or []]
    loop = "decoded again with --no-repeat-ngram 3, because of a loop"
    assert shown[1] == f"  {best.score:.3f}  {' '.join([*links, loop])}" and bool(links) == (alignment == "hard")
    warnings = [record.getMessage() for record in caplog.records]
    assert warnings and all(message.startswith("line 2 has") for message in warnings)
    assert alignment is not None or len(warnings) == 1


def typed(command: list[str], text: bytes, *flags: str) -> subprocess.CompletedProcess[str]:
    """Types a text at the prompt of the command."""
    ours, theirs = pty.openpty()
    with subprocess.Popen(
        [*command, "--engine", "torch", *flags], stdin=theirs, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        os.close(theirs)
        os.write(ours, text + b"\x04")
        out, talk = process.communicate(timeout=600)
        os.close(ours)
    return subprocess.CompletedProcess(flags, process.returncode, out, talk)


@pytest.mark.slow
def test_a_terminal_gets_objects_and_reports_where_they_are_asked_for(command, tmp_path):
    terms = tmp_path / "terms.tsv"
    terms.write_text("dog\tpark\n")
    reports = ["--glossary-report", str(tmp_path / "terms"), "--quality-report", str(tmp_path / "quality")]
    done = typed(
        command, b"a dog runs .\nthe cat\n", "--format", "jsonl", "--nbest", "2", "--glossary", str(terms), *reports
    )
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in done.stdout.split("\n")[:-1]]
    assert [(row["id"], row["source"], len(row["hypotheses"])) for row in rows] == [
        (0, "a dog runs .", 2), (1, "the cat", 2)]  # fmt: skip
    assert "park" in rows[0]["hypotheses"][0]["text"] and rows[0]["hypotheses"][0]["quality"]["score"] > 0
    assert (tmp_path / "terms").read_text() == "line\tresult\tterm\ttargets\tfound\n1\thit\tdog\tpark\tpark\n"
    assert [line.split("\t")[0] for line in (tmp_path / "quality").read_text().split("\n")] == ["line", "1", "2", ""]
    assert "1 term in 1 of" in done.stderr


@pytest.mark.slow
def test_bytes_that_are_not_utf_8_at_a_terminal_are_told_and_the_next_line_is_translated(command):
    done = typed(command, b"caf\xe9\nthe cat\n")
    assert done.returncode == 0 and done.stdout.count("\n") == 1
    assert "standard input:1: byte 4" in done.stderr


def peak_memory_of(command: list[str], lines: int) -> int:
    """Translates so many lines. Returns the kilobytes of the largest child process so far."""
    with subprocess.Popen([*command, "--beam", "1"], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:

        def feed() -> None:
            for number in range(lines):
                process.stdin.write((" ".join(WORDS[number % 7 : number % 7 + 1 + number % 9]) + "\n").encode())
            process.stdin.close()

        feeder = threading.Thread(target=feed)
        feeder.start()
        assert sum(1 for _ in process.stdout) == lines
        feeder.join()
    assert process.returncode == 0
    return resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss


@pytest.mark.slow
def test_60_000_lines_take_the_memory_of_20_000(command):
    """20,000 lines fill the window of lines that are sorted together, and the lines that are read ahead."""
    few = peak_memory_of(command, 20_000)
    assert peak_memory_of(command, 60_000) < 1.2 * few
