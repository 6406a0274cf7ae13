"""The command `nmtkit average-checkpoints`."""

from pathlib import Path

import pytest
import torch
from click.testing import CliRunner, Result

from nmtkit.cli import main
from nmtkit.data import checkpoint_file
from nmtkit.models import checkpoint
from nmtkit.training import checkpoints


def average(*arguments: object) -> Result:
    return CliRunner().invoke(main, ["average-checkpoints", *map(str, arguments)])


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for update in (1, 2, 3):
        contents = {"architecture": "a", "config": {}, "tokenizer": {}, "plugins": [], "update": update}
        model = {"weight": torch.tensor([float(update)])}
        scores = {"loss": float(update)}
        checkpoint_file.save(tmp_path / checkpoints.file_name(update), contents | {"model": model, "scores": scores})
    return tmp_path


@pytest.mark.parametrize(("choice", "expected"), [(("--last", 2), 2.5), (("--best", 2), 1.5)])
def test_last_and_best_of_a_folder(folder: Path, choice: tuple[str, int], expected: float) -> None:
    result = average(folder, *choice, "--output", folder / "averaged.pt")
    assert result.exit_code == 0, result.output
    assert checkpoint.load(folder / "averaged.pt")["model"]["weight"].tolist() == [expected]


def test_explicit_files(folder: Path) -> None:
    files = [folder / checkpoints.file_name(update) for update in (1, 3)]
    assert average(*files, "--output", folder / "averaged.pt").exit_code == 0
    assert checkpoint.load(folder / "averaged.pt")["averaged"] == [path.name for path in files]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["{}", "--last", 2, "--best", 2], "give only one"),
        (["{}"], "is a folder"),
        (["{}", "{}", "--last", 1], "2 paths"),
        (["{}/none.pt"], "no such file"),
        (["{}/log.jsonl"], "not a checkpoint"),
    ],
)
def test_mistakes_exit_with_2_and_write_nothing(folder: Path, arguments: list[object], said: str) -> None:
    (folder / "log.jsonl").write_text("{}\n")
    filled = [str(argument).format(folder) for argument in arguments]
    result = average(*filled, "--output", folder / "averaged.pt")
    assert result.exit_code == 2
    assert said in result.stderr
    assert not (folder / "averaged.pt").exists()


def test_a_member_is_never_overwritten_or_counted_twice(folder: Path) -> None:
    first, second = (folder / checkpoints.file_name(update) for update in (1, 2))
    (folder / "last.pt").symlink_to(second.name)
    before = second.read_bytes()
    for output in (second, folder / "last.pt", folder / "." / second.name):
        result = average(first, second, "--output", output)
        assert result.exit_code == 2 and "one of the checkpoints" in result.stderr
    result = average(first, second, folder / "last.pt", "--output", folder / "averaged.pt")
    assert result.exit_code == 2 and "are the same file" in result.stderr
    assert second.read_bytes() == before
