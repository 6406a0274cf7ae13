"""Commands with workers on a system that cannot fork: the same output as with forked workers."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from builders import save_transformer

WITHOUT_FORK = """
import multiprocessing, os, sys
if __name__ == "__main__":
    multiprocessing.get_all_start_methods = lambda: ["spawn"]
    multiprocessing.set_start_method("spawn")
    del os.fork
    from nmtkit.cli import main
    main(sys.argv[1:])
"""
COMMANDS = {
    "preprocess": "-s en -t de --trainpref text --destdir out --vocab-size 300 --workers 2",
    "clean": "-s en -t de text --output out/text --workers 2",
    "clean in shards": "-s en -t de text --output-dir out --shard-lines 400 --workers 2",
    "generate": "--path model.pt --device cpu --max-len-b 5 --input lines --output out/text --workers 2",
    "generate in shards": "--path model.pt --device cpu --max-len-b 5 --input lines --output-dir out --shard-lines 20 "
    "--workers 2",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("text")
    save_transformer(folder / "model.pt")
    lines = [f"bado kelu {number} miro sate {number % 7}" for number in range(1000)]
    (folder / "text.en").write_text("".join(f"{line}\n" for line in lines))
    (folder / "text.de").write_text("".join(f"{line.replace('e', 'ü')} rufo\n" for line in lines))
    (folder / "lines").write_text("".join(f"{line}\n" for line in lines[:60]))
    (folder / "without_fork.py").write_text(WITHOUT_FORK)
    return folder


def output(folder: Path, *command: str) -> dict[str, bytes]:
    """Runs a command. Returns the contents of the files that it writes, except JSON files, which have dates."""
    shutil.rmtree(folder / "out", ignore_errors=True)
    (folder / "out").mkdir()
    run = subprocess.run([sys.executable, *command], cwd=folder, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    files = [path for path in sorted((folder / "out").rglob("*")) if path.is_file() and path.suffix != ".json"]
    return {path.name: path.read_bytes() for path in files}


@pytest.mark.slow
@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_writes_the_same_files_without_fork(name: str, folder: Path) -> None:
    arguments = [name.split()[0], *COMMANDS[name].split()]
    forked = output(folder, "-m", "nmtkit", *arguments)
    assert forked and output(folder, "without_fork.py", *arguments) == forked
