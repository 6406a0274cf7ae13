"""Commands with workers on a system that cannot fork: the same output as with forked workers."""

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from builders import save_transformer
from serving_process import serving

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
    (folder / "sitecustomize.py").write_text("import os\ndel os.fork\n")  # Python imports it if PYTHONPATH names it
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_writes_the_same_files_without_fork(name: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def output() -> dict[str, bytes]:
        """Runs the command. Returns the contents of the files that it writes, except JSON files, which have dates."""
        shutil.rmtree(folder / "out", ignore_errors=True)
        (folder / "out").mkdir()
        command = [sys.executable, "-m", "nmtkit", name.split()[0], *COMMANDS[name].split()]
        run = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
        assert run.returncode == 0, run.stderr
        files = [path for path in sorted((folder / "out").rglob("*")) if path.is_file() and path.suffix != ".json"]
        return {path.name: path.read_bytes() for path in files}

    forked = output()
    monkeypatch.setenv("PYTHONPATH", str(folder), prepend=os.pathsep)
    assert forked and output() == forked


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="finds the process in /proc")
def test_the_server_has_one_worker_without_fork_and_replaces_it(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("starlette")
    monkeypatch.setenv("PYTHONPATH", str(folder), prepend=os.pathsep)
    with serving(folder, "--path", f"en-de={folder / 'model.pt'}", "--max-len-b", "5") as server:
        before = server.translate("bado kelu")
        assert server.metric("nmtkit_workers") == 1
        children = Path(f"/proc/{server.process.pid}/task/{server.process.pid}/children").read_text().split()
        os.kill(int(children[0]), signal.SIGKILL)
        assert server.translate("bado kelu") == before
        assert server.metric("nmtkit_reloads_total") == 1
