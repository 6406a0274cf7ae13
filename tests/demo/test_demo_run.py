"""The demo's commands are real ones, shown as a shell takes them; its baselines are what they claim to be."""

import io
import shlex
from pathlib import Path

import click
import pytest
from rich.console import Console

from nmtkit.cli import main
from nmtkit.demo import corpus
from nmtkit.demo.baselines import nearest_translations
from nmtkit.demo.run import Step, command_line, conclude, run, steps


@pytest.mark.parametrize("step", steps(Path("nmtkit-demo")), ids=lambda step: step.arguments[0])
def test_the_demo_runs_commands_that_parse(step: Step) -> None:
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


def test_a_folder_with_something_in_it_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("mine")
    with pytest.raises(FileExistsError, match="--dir"):
        run(tmp_path, ["nmtkit"], Console(file=io.StringIO()))
    assert [path.name for path in tmp_path.iterdir()] == ["mine.txt"]


@pytest.mark.parametrize("width", [80, 120])
def test_the_closing_screen_fits_and_sets_the_score_beside_the_baselines(tmp_path: Path, width: int) -> None:
    pairs = corpus.generate(seed=2, train=300, valid=20, test=60)
    translations = [pair.german for pair in pairs.test]
    translations[3] = "Falsch."
    (tmp_path / "test.de").write_text("".join(f"{line}\n" for line in translations), encoding="utf-8")
    screen = io.StringIO()
    conclude(pairs, tmp_path, ["nmtkit"], Console(file=screen, width=width, force_terminal=True, no_color=True), 60, 70)
    lines = Console(file=io.StringIO()).render_str(screen.getvalue()).plain.splitlines()
    scores = [line.split()[-2] for line in lines if line.startswith(("this model", "the nearest", "the English"))]
    assert float(scores[0]) > 90 > 50 > float(scores[1]) > float(scores[2])
    assert "59 of 60" in screen.getvalue()
