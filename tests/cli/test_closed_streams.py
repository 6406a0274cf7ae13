"""With a closed or full standard stream, a command does its work or ends with exit code 2 and one line of error."""

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from builders import save_tiny_transformer
from forked import Forks

from nmtkit.data.dataset.binarized import Dataset

READERS = {  # of standard input
    "generate": "generate --device cpu --path a.pt --max-len-a 0 --max-len-b 3",
    "score": "score --ref text --metric bleu",
}
WRITERS = {  # of standard output
    **READERS,
    "generate with workers": "generate --device cpu --path a.pt --max-len-a 0 --max-len-b 3 --workers 2",
    "generate json": "generate --device cpu --path a.pt --max-len-a 0 --max-len-b 3 --format jsonl",
    "score json": "score --sys text --ref text --metric bleu --format json",
    "score sentences": "score --sys text --ref text --metric bleu --sentence-level",
    "inspect": "inspect data",
    "dry run": "train data --dry-run --device cpu --arch transformer_tiny",
    "help": "train --help",
    "version": "--version",
}
OTHERS = {  # write files only
    "average-checkpoints": "average-checkpoints a.pt b.pt --output new",
    "shortlist": "shortlist data --path a.pt --output new",
    "export": "export --format safetensors a.pt new",
    "preprocess": "preprocess -s xx -t yy --trainpref text --destdir new --workers 1 --tokenizer-from data",
    "attention": "attention --path a.pt --output new bado",
}


@pytest.fixture(scope="module")
def forks() -> Iterator[Forks]:
    with Forks() as forks:
        yield forks


@pytest.fixture(scope="module")
def folder(mirror_data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("streams")
    tokenizer = Dataset.open(mirror_data).tokenizer
    save_tiny_transformer(folder / "a.pt", tokenizer)
    save_tiny_transformer(folder / "b.pt", tokenizer, seed=2)
    shutil.copytree(mirror_data, folder / "data")
    for name in ("text", "text.xx", "text.yy"):
        (folder / name).write_text("bado kelu\nmiro\n")
    return folder


def run(forks: Forks, folder: Path, command: str, *streams: str | None) -> tuple[int, str]:
    """Runs the command on `text` with other standard streams. Returns the exit code and the standard error."""
    shutil.rmtree(folder / "new", ignore_errors=True)
    if (folder / "new").exists():
        (folder / "new").unlink()
    error = folder / "stderr"
    error.write_text("")
    names = {"a.pt", "b.pt", "text", "data", "new"}
    arguments = [str(folder / word) if word in names else word for word in command.split()]
    files = [str(error) if stream == "stderr" else stream for stream in streams]
    result = forks.run(*arguments, files=(files[0] and files[0].format(folder), files[1], files[2]))
    return result.code, error.read_text()


def check_error(code: int, stderr: str) -> None:
    assert code == 2 and "Traceback" not in stderr, stderr
    (error,) = [line for line in stderr.splitlines() if not line.startswith("engine: ")]
    assert error.startswith("nmtkit: error: "), stderr


@pytest.mark.slow
@pytest.mark.parametrize("stream", [None, "/dev/full"], ids=["closed", "full"])
@pytest.mark.parametrize("command", WRITERS.values(), ids=WRITERS)
def test_output_that_cannot_be_written_is_an_error(
    forks: Forks, folder: Path, command: str, stream: str | None
) -> None:
    check_error(*run(forks, folder, command, "{}/text", stream, "stderr"))


@pytest.mark.slow
@pytest.mark.parametrize("command", READERS.values(), ids=READERS)
def test_input_that_cannot_be_read_is_an_error(forks: Forks, folder: Path, command: str) -> None:
    check_error(*run(forks, folder, command, None, os.devnull, "stderr"))


@pytest.mark.parametrize("command", OTHERS.values(), ids=OTHERS)
def test_commands_that_write_files_do_without_standard_input(forks: Forks, folder: Path, command: str) -> None:
    code, stderr = run(forks, folder, command, None, os.devnull, "stderr")
    assert code == 0, stderr
    check_error(
        *run(forks, folder, command, None, None, "stderr")
    )  # a file would get the descriptor of standard output


@pytest.mark.slow
@pytest.mark.parametrize("stream", [None, "/dev/full"], ids=["closed", "full"])
@pytest.mark.parametrize("command", [*READERS.values(), "inspect missing", "score --ref missing"])
def test_without_stderr_the_exit_code_is_as_ever(forks: Forks, folder: Path, command: str, stream: str | None) -> None:
    code, _ = run(forks, folder, command, "{}/text", os.devnull, stream)
    assert code == (2 if "missing" in command else 0)
