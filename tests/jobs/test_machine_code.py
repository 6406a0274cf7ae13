"""The folder of machine code: complete or not there, one compilation at a time, for any state of the cache."""

import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from nmtkit.jobs import machine_code
from nmtkit.jobs.machine_code import Compilation, ensure, folder, folder_name, is_kept, is_ready

pytest.importorskip("llvmlite")


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of the cache, which is empty."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "nmtkit"


def compile_all() -> None:
    folder().mkdir(parents=True, exist_ok=True)
    (folder() / "search").write_bytes(b"machine code")
    (folder() / "kernels").write_bytes(b"more")


def test_code_is_compiled_once() -> None:
    assert not is_ready()
    ensure(compile_all)
    assert is_ready()
    ensure(lambda: pytest.fail("compiled again"))


@pytest.mark.parametrize("damage", ["shorter", "other", "missing", "unreadable list", "empty list"])
def test_damaged_code_is_compiled_again(damage: str) -> None:
    ensure(compile_all)
    if damage == "missing":
        (folder() / "search").unlink()
    else:
        name = "search" if damage in ("shorter", "other") else machine_code.COMPLETE
        contents = {"shorter": b"machine", "other": b"machine c0de", "unreadable list": b"\xff", "empty list": b"{}"}
        (folder() / name).write_bytes(contents[damage])
    assert not is_ready()
    ensure(compile_all)
    assert is_ready() and (folder() / "search").read_bytes() == b"machine code"


def test_parts_of_an_interrupted_compilation_are_removed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine_code, "COMPILED_MODULES", "not imported")

    def interrupted() -> None:
        compile_all()
        (folder() / "part").touch()
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        ensure(interrupted)
    assert not is_ready()
    ensure(compile_all)
    assert is_ready() and not (folder() / "part").exists()


def test_another_processor_does_not_get_the_code(monkeypatch: pytest.MonkeyPatch) -> None:
    ensure(compile_all)
    for cached in (machine_code.processor, folder_name):
        cached.cache_clear()
    monkeypatch.setenv("NUMBA_CPU_NAME", "generic")
    assert not is_ready()
    monkeypatch.delenv("NUMBA_CPU_NAME")
    for cached in (machine_code.processor, folder_name):
        cached.cache_clear()
    assert is_ready()


def test_code_in_a_cache_that_cannot_be_written_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    ensure(compile_all)
    monkeypatch.setattr(machine_code, "cache_folder", lambda: Path("/nowhere"))  # root may write everywhere
    assert is_ready() and folder().name == folder_name() and folder().is_dir()


def test_without_a_cache_nothing_is_compiled_in_the_background(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert not is_kept()
    monkeypatch.setattr(subprocess, "Popen", lambda *_, **__: pytest.fail("started"))
    Compilation().start()
    ensure(compile_all)  # for this process, in a temporary folder
    assert (folder() / "search").exists() and not is_ready()


def program(text: str) -> list[str]:
    start = "import sys, time; from pathlib import Path; from nmtkit.jobs.machine_code import *\n"
    return [sys.executable, "-c", start + textwrap.dedent(text)]


SLOW = """
    def compile_all():
        print("compiling", flush=True)
        folder().mkdir(parents=True)
        (folder() / "search").write_bytes(b"machine ")
        time.sleep(float(sys.argv[1]))
        (folder() / "search").write_bytes(b"machine code")
    ensure(compile_all)
    assert (folder() / "search").read_bytes() == b"machine code"
"""


@pytest.mark.slow
def test_two_processes_compile_once() -> None:
    processes = [subprocess.Popen([*program(SLOW), "0.5"], stdout=subprocess.PIPE, text=True) for _ in range(2)]
    outputs = [process.communicate()[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0]
    assert "".join(outputs).count("compiling") == 1 and is_ready()


def test_a_killed_compilation_leaves_nothing_that_counts() -> None:
    process = subprocess.Popen([*program(SLOW), "60"], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stdout.readline() == "compiling\n"
    while not (folder() / "search").exists():
        time.sleep(0.01)
    second = Compilation()
    second.start()  # does nothing, because a process compiles
    assert second.process is None
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert not is_ready()
    ensure(compile_all)
    assert is_ready()


def test_the_process_in_the_background_has_the_lowest_priority_and_its_result_is_found(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    command = program("""
        def compile_all():
            end = time.monotonic() + 120
            while not Path(sys.argv[1]).exists() and time.monotonic() < end:
                time.sleep(0.01)
            folder().mkdir()
            (folder() / "search").touch()
        ensure(compile_all)
    """)
    start = subprocess.Popen
    commands: list[list[str]] = []

    def popen(arguments: list[str], **options: object) -> subprocess.Popen[bytes]:
        commands.append(arguments)
        return start([*command, str(tmp_path / "go")], **options)  # type: ignore[call-overload]

    monkeypatch.setattr(subprocess, "Popen", popen)
    compilation = Compilation()
    compilation.start()
    compilation.start()
    assert [each[-2:] for each in commands] == [["precompile", "--quiet"]]
    assert compilation.process is not None
    assert os.getpriority(os.PRIO_PROCESS, compilation.process.pid) == machine_code.LOWEST_PRIORITY
    assert not compilation.is_ready()
    (tmp_path / "go").touch()
    compilation.process.wait()
    compilation.checked_at = -1.0  # else the files are looked at once a second
    assert compilation.is_ready()


def test_a_failed_compilation_is_told_and_not_repeated(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    start = subprocess.Popen
    monkeypatch.setattr(subprocess, "Popen", lambda _, **options: start([sys.executable, "-c", "exit(3)"], **options))
    compilation = Compilation()
    compilation.start()
    assert compilation.process is not None
    compilation.process.wait()
    assert not compilation.is_ready()
    assert "nmtkit precompile" in caplog.text
    monkeypatch.setattr(subprocess, "Popen", lambda *_, **__: pytest.fail("started again"))
    compilation.start()
