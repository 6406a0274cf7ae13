"""The demo runs exactly the commands that it shows, and computes its baselines as described."""

import io
import shlex
import subprocess
from pathlib import Path

import click
import pytest
from rich.console import Console
from rich.text import Text

from nmtkit.cli import main
from nmtkit.cli.command import show_next
from nmtkit.demo.run import DemoStep, call, command_line, nearest_translations, read_corpus, run, steps


@pytest.mark.parametrize("step", steps(Path("nmtkit-demo")), ids=lambda step: step.arguments[0])
def test_the_demo_runs_commands_that_parse(step: DemoStep) -> None:
    name, *arguments = step.arguments
    command = main.get_command(click.Context(main), name)
    assert command is not None
    command.make_context(name, arguments)


@pytest.mark.parametrize("width", [None, 80, 120])
def test_shown_commands_are_what_is_run(width: int | None) -> None:
    for step in steps(Path("a folder")):
        shown = command_line(step, ["nmtkit"], width)
        assert all(len(line) <= (width or 10_000) for line in shown.splitlines())
        words = shlex.split(shown.removeprefix("$ ").replace("\\\n", " "))
        expected = ["nmtkit", *step.arguments, *([">", str(step.output)] if step.output else [])]
        assert words == expected


def test_the_nearest_sentence_shares_most_words() -> None:
    known = [("the cat sleeps", "A"), ("the dog sleeps now", "B"), ("a dog", "C")]
    assert nearest_translations(["The dog sleeps", "a dog", "zebra"], known) == ["B", "C", "A"]


def test_a_folder_of_other_files_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("mine")
    for overwrite in (False, True):
        with pytest.raises(FileExistsError, match="--dir"):
            run(tmp_path, ["nmtkit"], Console(file=io.StringIO()), overwrite)
    assert [path.name for path in tmp_path.iterdir()] == ["mine.txt"]


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Replaces the commands: records their names, and writes the references, except the fourth, as translations."""
    names: list[str] = []

    def call(step: DemoStep) -> None:
        names.append(step.arguments[0])
        if step.output:
            lines = (step.output.parent / "data/test.de").read_text(encoding="utf-8").splitlines(keepends=True)
            step.output.write_text("".join([*lines[:3], "Falsch.\n", *lines[4:]]), encoding="utf-8")

    monkeypatch.setattr("nmtkit.demo.run.call", call)
    monkeypatch.setattr("nmtkit.demo.run.read_corpus", lambda: SMALL)
    return names


SIZES = {"train": 300, "valid": 20, "test": 60}
SMALL = {subset: pairs[: SIZES[subset]] for subset, pairs in read_corpus().items()}


def screen_of(folder: Path, overwrite: bool = False, width: int = 80) -> str:
    screen = io.StringIO()
    out = Console(file=screen, width=width, force_terminal=True, no_color=True)
    run(folder, ["nmtkit"], out, overwrite)
    return Text.from_ansi(screen.getvalue()).plain


@pytest.mark.parametrize("width", [80, 120])
def test_the_closing_screen_fits_and_sets_the_score_beside_the_baselines(tmp_path, calls, width) -> None:
    lines = screen_of(tmp_path, width=width).splitlines()
    closing = next(i for i, line in enumerate(lines) if line.startswith("Translations and their"))
    assert all(len(line) <= width for line in lines[closing:-1])
    scores = [line.split()[-2] for line in lines if line.startswith(("this model", "the German of", "the English"))]
    assert float(scores[0]) > 90 > 50 > float(scores[1]) > float(scores[2])
    assert any(line.startswith("59 of 60") for line in lines)
    assert any(line == f"$ nmtkit serve --path {tmp_path / 'averaged.pt'}" for line in lines) or width < 120


def test_brackets_in_the_name_of_the_folder_are_shown(tmp_path: Path, calls: list[str]) -> None:
    screens = [screen_of(tmp_path / "a[b]", overwrite, width=500) for overwrite in (False, True)]
    assert f"{tmp_path}/a[b]/data" in screens[0] and f"demo in {tmp_path}/a[b]." in screens[1]


def test_the_caveat_stands_beside_each_score(tmp_path: Path, calls: list[str]) -> None:
    lines = screen_of(tmp_path, width=120).splitlines()
    scores = [i for i, line in enumerate(lines) if line.startswith(("5. Score", "the English source"))]
    assert len(scores) == 2 and all("grammar" in " ".join(lines[i : i + 2]) for i in scores)


def test_commands_of_the_demo_print_no_other_next_command(monkeypatch, tmp_path, capfd) -> None:
    environments = []
    result = subprocess.CompletedProcess([], 0)
    monkeypatch.setattr("nmtkit.demo.run.subprocess.run", lambda *_, env, **__: environments.append(env) or result)
    for step in (DemoStep("Train", ["train"]), DemoStep("Generate", ["generate"], tmp_path / "out")):
        call(step)
    for environment in ({}, *environments):
        monkeypatch.setattr("os.environ", environment)
        with click.Context(click.Command("train")):
            show_next("nmtkit one", "nmtkit two")
    assert capfd.readouterr().err == "next: nmtkit one\nthen: nmtkit two\n"


def test_a_second_call_shows_the_result_again_and_runs_nothing(tmp_path: Path, calls: list[str]) -> None:
    folder = tmp_path / "demo"
    first = screen_of(folder)
    assert len(calls) == 5
    second = screen_of(folder)
    assert len(calls) == 5
    closing = first[first.index("\nTranslations and their") :]
    assert second.startswith(closing) and f"$ nmtkit demo --dir {folder} --overwrite" in second


def test_overwrite_and_an_interrupted_demo_start_again_and_leave_other_files(tmp_path, calls) -> None:
    screen_of(tmp_path)
    (tmp_path / "mine.txt").write_text("mine")
    (tmp_path / "checkpoints").mkdir()
    assert "Replacing an earlier demo" in " ".join(screen_of(tmp_path, overwrite=True).split())
    assert len(calls) == 10 and not (tmp_path / "checkpoints").exists()
    (tmp_path / "test.de").unlink()
    assert "Replacing an unfinished demo" in " ".join(screen_of(tmp_path).split())
    assert len(calls) == 15 and (tmp_path / "mine.txt").read_text() == "mine"
