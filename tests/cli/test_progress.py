"""Every command shows its progress on stderr: a bar in a terminal, lines of text elsewhere, nothing with --quiet."""

import io
import logging
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import click
import pytest
from builders import save_tiny_transformer, save_transformer, tiny_tokenizer
from click.testing import CliRunner
from rich.console import Console

from nmtkit.cli import command, main
from nmtkit.cli import progress as display
from nmtkit.cli.command import Command, echo, set_up_logging
from nmtkit.data.corpora.lines import count_lines, count_lines_ahead
from nmtkit.jobs import progress
from nmtkit.jobs.progress import WorkStage, pace, quantity, rate


def stage(done: float, total: float | None, seconds: float, unit: str = "lines") -> WorkStage:
    now = time.monotonic()
    return WorkStage("Translating", unit, total, done=done, began=now - seconds, ended=now)


@pytest.mark.parametrize("width", [40, 80, 120])
def test_the_bar_fits_into_the_terminal_and_shows_count_rate_and_time_left(width: int) -> None:
    line = display.bar(stage(2500, 10_000, 5), width).plain
    assert len(line) <= max(width, 56)
    if width >= 80:
        assert line.count("━") >= 20
        for fact in ("Translating", "2,500/10,000 lines", "500 lines/s", "15 s left"):
            assert fact in line


def test_without_a_total_the_count_and_the_rate_are_shown() -> None:
    assert display.fields(stage(2500, None, 5)) == ["Translating", "2,500 lines", "500 lines/s"]
    assert display.fields(stage(0, None, 5, unit="")) == ["Translating", "5.0 s"]


def test_an_error_wraps_between_words_with_its_prefix(monkeypatch: pytest.MonkeyPatch) -> None:
    console = Console(file=io.StringIO(), force_terminal=True, width=40, color_system=None)
    monkeypatch.setattr(command, "stderr", console)
    with pytest.raises(SystemExit):
        command.fail("a message of several words that is [longer] than a line of the terminal")
    lines = console.file.getvalue().splitlines()  # type: ignore[attr-defined]
    assert max(map(len, lines)) <= 40 and lines[0].startswith("nmtkit: error: a message")
    assert " ".join(" ".join(lines).split()).endswith("words that is [longer] than a line of the terminal")


def test_a_line_about_the_work_wraps_between_words_and_a_command_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    """A terminal broke words in two, and a command with line feeds cannot be copied."""
    console = Console(file=io.StringIO(), force_terminal=True, width=40, color_system=None)
    monkeypatch.setattr(command, "stderr", console)
    monkeypatch.delenv(command.SHOWS_COMMANDS, raising=False)
    with click.Context(Command("test")) as context:
        shown = context.meta["display"] = display.CommandProgress(console)
        shown._began -= display.SUMMARY
        shown.begin(stage(10, 10, 4))
        command.tell("the checkpoint has 163,177 entries for 6,000 source pieces")
        set_up_logging(context.meta)
        command.show_next("nmtkit generate --path a-long-name-of-a-checkpoint.pt < source.txt")
    lines = console.file.getvalue().splitlines()  # type: ignore[attr-defined]
    assert max(map(len, lines[:2])) <= 40 and " ".join(map(str.strip, lines[:2])).endswith("source pieces")
    assert "10 lines in" in lines[2] and lines[3:] == [
        "next: nmtkit generate --path a-long-name-of-a-checkpoint.pt < source.txt"
    ]


def test_texts_of_counts() -> None:
    assert quantity(1, "lines") == "1 line"
    assert quantity(2000.4, "lines") == "2,000 lines"
    assert rate(0.25, "files") == "0.25 files/s"
    assert pace(2000, "lines", 4) == "4.0 s, 500 lines/s"


@pytest.fixture
def shown(monkeypatch: pytest.MonkeyPatch) -> display.CommandProgress:
    """A display in a terminal of 80 columns, without its thread. The clock stands still."""
    monkeypatch.setattr(time, "monotonic", lambda: 1000.0)
    console = Console(file=io.StringIO(), force_terminal=True, width=80, _environ={"TERM": "xterm"})
    shown = display.CommandProgress(console)
    monkeypatch.setattr(progress, "_display", shown)
    return shown


def test_passes_over_one_unit_count_once(shown: display.CommandProgress) -> None:
    progress.begin("Learning", "pairs", total=10, passes=5)
    for _ in range(5):
        progress.advance(10)
    assert shown.stage.done == pytest.approx(10)


def test_work_in_between_has_a_stage_of_its_own_and_muted_work_counts_nothing(shown: display.CommandProgress) -> None:
    progress.begin("Working", "lines", total=10)
    working = shown.stage
    progress.advance(2)
    with progress.pause_for("Loading"):
        assert shown.stage.title == "Loading" and working.ended is not None
    with pytest.raises(ValueError), progress.pause_for("Loading"):
        raise ValueError
    assert shown.stage is working and working.ended is None
    with progress.muted():
        progress.begin("Inside")
        progress.advance(5)
    progress.reach(1)
    assert (shown.stage, working.done) == (working, 2)
    progress.reach(4)
    assert working.done == 4


def test_a_total_that_is_not_shown_is_not_counted() -> None:
    counted: list[int] = []

    def total() -> int:
        counted.append(3)
        return 3

    progress.begin("Reading", "lines", total)
    progress.advance(3)
    assert counted == []
    display_of_lines = display.CommandProgress(Console(file=io.StringIO()))
    progress.show_on(display_of_lines)
    try:
        progress.begin("Reading", "lines", total)
        assert (counted, display_of_lines.stage.total) == ([3], 3)
    finally:
        progress.show_on(None)


def test_the_last_line_is_about_the_work_that_took_longest(shown: display.CommandProgress) -> None:
    shown._began -= 100
    for title, unit, seconds in (("Reading", "bytes", 1), ("Translating", "lines", 40), ("Loading", "", 50)):
        progress.begin(title, unit)
        progress.advance(200)
        shown.stage.began = time.monotonic() - seconds
    assert shown.summary() == "200 lines in 40 s, 5 lines/s"
    assert shown.summary() is None  # only once


def test_a_short_command_has_no_last_line(shown: display.CommandProgress) -> None:
    progress.begin("Translating", "lines")
    progress.advance(2)
    assert shown.summary() is None


def test_output_on_the_same_terminal_removes_the_bar_first(
    shown: display.CommandProgress, monkeypatch: pytest.MonkeyPatch
) -> None:
    written = shown.console.file
    shown._shares_terminal = True
    progress.begin("Working", "lines", 4)
    shown._draw()
    assert "Working" in written.getvalue() and shown._live is not None
    echo("data")
    assert shown._live is None and written.getvalue().endswith("\x1b[2K")  # the line of the bar is erased
    shown._draw()
    assert shown._live is None  # the bar stays away while output comes
    shown._output -= display.QUIET_OUTPUT
    shown._draw()
    assert shown._live is not None
    shown.close()


def run(command: Command, *arguments: str) -> str:
    result = CliRunner().invoke(command, list(arguments))
    assert result.exit_code == 0, result.output
    assert result.stdout == ""
    return result.stderr


def test_a_command_without_a_terminal_prints_lines_of_text(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(display, "FIRST_LINE", 0.0)
    monkeypatch.setattr(display, "REDRAW", 0.001)
    printed = threading.Event()

    class Watching(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            printed.set()

    def work() -> None:
        progress.begin("Counting", "sheep", 4)
        progress.advance(2)
        logging.getLogger("nmtkit").addHandler(Watching())
        assert printed.wait(300)

    assert "Counting  2/4 sheep" in run(Command("count", callback=work))


def test_quiet_commands_and_other_ranks_show_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def work() -> None:
        assert progress._display is None

    assert run(Command("count", callback=work), "--quiet") == ""
    monkeypatch.setenv("RANK", "1")
    assert run(Command("count", callback=work)) == ""


def thread_names() -> set[str]:
    return {thread.name for thread in threading.enumerate()}


def test_an_error_ends_the_display() -> None:
    def work() -> None:
        assert "progress" in thread_names()
        raise ValueError("no sheep")

    assert CliRunner().invoke(Command("count", callback=work), []).exit_code == 2
    assert progress._display is None and "progress" not in thread_names()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_process_has_neither_the_display_nor_its_thread() -> None:
    def work() -> None:
        assert "progress" in thread_names()
        child = os.fork()
        if child == 0:
            os._exit(0 if progress._display is None and "progress" not in thread_names() else 1)
        assert os.waitpid(child, 0)[1] == 0
        assert progress._display is not None and "progress" in thread_names()

    run(Command("count", callback=work))


# --- totals ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", [b"", b"one", b"one\n", b"one\ntwo", b"one\n\n\n", b"a\r\nb\r\n"])
def test_lines_are_counted_as_they_are_read(tmp_path: Path, text: bytes) -> None:
    (tmp_path / "text").write_bytes(text)
    assert count_lines([tmp_path / "text"]) == len(io.BytesIO(text).readlines())
    assert count_lines([tmp_path / "text"] * 2) == 2 * len(io.BytesIO(text).readlines())


def test_no_total_of_compressed_or_missing_files_or_pipes(tmp_path: Path) -> None:
    (tmp_path / "text.gz").write_bytes(b"\n\n")
    assert count_lines([tmp_path / "text.gz"]) is None
    assert count_lines([tmp_path / "nothing"]) is None
    reading, writing = os.pipe()
    with open(reading, "rb") as stream, open(writing, "wb") as other:
        other.write(b"one\n")
        other.flush()
        assert count_lines_ahead(stream) is None
        assert stream.readline() == b"one\n"


def test_counting_does_not_move_a_redirected_file(tmp_path: Path) -> None:
    (tmp_path / "text").write_bytes(b"one\ntwo\nthree\n")
    with (tmp_path / "text").open("rb") as file:
        assert count_lines_ahead(file) == 3
        assert file.read() == b"one\ntwo\nthree\n"


# --- commands -------------------------------------------------------------------------------------------------------


def stages_of(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> list[WorkStage]:
    """Runs a command, and returns the stages that it has shown."""
    stages: list[WorkStage] = []
    begin = display.CommandProgress.begin

    def record(self: display.CommandProgress, stage: WorkStage) -> None:
        stages.append(stage)
        begin(self, stage)

    monkeypatch.setattr(display.CommandProgress, "begin", record)
    result = CliRunner().invoke(main, list(arguments), prog_name="nmtkit")
    assert result.exit_code == 0, result.output
    return stages


def counted(stages: list[WorkStage]) -> dict[str, tuple[float, float | None]]:
    return {stage.unit: (round(stage.done, 6), stage.total) for stage in stages if stage.unit}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return save_tiny_transformer(tmp_path / "model.pt", tiny_tokenizer())


def test_generate_counts_lines_also_with_split_sentences_and_empty_lines(
    monkeypatch: pytest.MonkeyPatch, model: Path, tmp_path: Path
) -> None:
    (tmp_path / "text").write_text("a b. c d. e f.\n\nb\n" * 3, encoding="utf-8")
    words = ["generate", "--path", str(model), "--input", str(tmp_path / "text"), "--output", str(tmp_path / "out")]
    stages = stages_of(monkeypatch, *words, "--split-sentences", "en", "--beam", "1", "--max-len-b", "3")
    assert counted(stages) == {"lines": (9, 9)}
    (tmp_path / "text").write_text("\n\n", encoding="utf-8")
    assert counted(stages_of(monkeypatch, *words)) == {"lines": (2, 2)}


def test_a_translation_through_a_pivot_counts_each_line_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    path = save_transformer(tmp_path / "many.pt", languages=("it", "en", "de"))
    (tmp_path / "text").write_text("a b\n" * 5, encoding="utf-8")
    words = ["generate", "--path", str(path), "--input", str(tmp_path / "text"), "--output", str(tmp_path / "out")]
    words += ["--source-lang", "it", "--target-lang", "de", "--pivot", "en", "--max-len-b", "3"]
    assert counted(stages_of(monkeypatch, *words)) == {"lines": (5, 5)}


@pytest.mark.parametrize("workers", [1, 2])
def test_shards_count_their_lines_once(
    monkeypatch: pytest.MonkeyPatch, model: Path, tmp_path: Path, workers: int
) -> None:
    (tmp_path / "text").write_text("a b\n" * 7, encoding="utf-8")
    words = [
        "generate",
        "--path",
        str(model),
        "--input",
        str(tmp_path / "text"),
        "--output-dir",
        str(tmp_path / "shards"),
    ]
    stages = stages_of(monkeypatch, *words, "--shard-lines", "2", "--max-len-b", "3", "--workers", str(workers))
    assert counted(stages) == {"lines": (7, 7)}
    assert counted(stages_of(monkeypatch, "merge", str(tmp_path / "shards"), "--output", str(tmp_path / "all"))) == {
        "lines": (7, 7)
    }


def test_average_counts_checkpoints(monkeypatch: pytest.MonkeyPatch, model: Path, tmp_path: Path) -> None:
    (tmp_path / "other.pt").write_bytes(model.read_bytes())
    words = ["average-checkpoints", str(model), str(tmp_path / "other.pt"), "--output", str(tmp_path / "averaged.pt")]
    assert counted(stages_of(monkeypatch, *words)) == {"checkpoints": (2, 2)}


def test_no_file_of_the_cli_writes_data_around_the_progress() -> None:
    folder = Path(display.__file__).parent
    writers = {path.name for path in folder.glob("*.py") if "click.echo(" in path.read_text(encoding="utf-8")}
    assert writers == {"command.py"}


@pytest.mark.slow
def test_a_person_who_types_into_a_pipe_sees_no_bar(model: Path) -> None:
    """`cat | nmtkit generate` in a terminal: no bar comes between the typed lines and the translations."""
    import pty

    leader, follower = pty.openpty()
    command = [sys.executable, "-m", "nmtkit", "generate", "--path", str(model), "--max-len-b", "3"]
    process = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=follower, stderr=follower, env=os.environ | {"TERM": "xterm"}
    )
    os.close(follower)
    assert process.stdin is not None
    process.stdin.write(b"a b\n")
    process.stdin.close()
    seen = b""
    while True:
        try:
            part = os.read(leader, 1 << 16)
        except OSError:
            break
        if not part:
            break
        seen += part
    assert process.wait() == 0
    assert "━".encode() not in seen and b"Translating" not in seen
    assert seen.rpartition(b"\x1b[2K")[2].strip()  # the bar of the start is gone before the translation
