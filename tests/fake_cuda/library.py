"""The device guard that lets autograd run on fake CUDA tensors: built once, loaded before torch is imported."""

import ctypes
import importlib.util
import shutil
import subprocess
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

SOURCE = Path(__file__).parent / "guard.cpp"


def torch_folder() -> Path:
    spec = importlib.util.find_spec("torch")  # does not import it
    assert spec is not None and spec.origin is not None
    return Path(spec.origin).parent


def compiler() -> str | None:
    return shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")


def build(folder: Path) -> Path:
    """Compiles guard.cpp into `folder`. A failure raises RuntimeError with the messages of the compiler."""
    program, torch, library = compiler(), torch_folder(), folder / "libguard.so"
    assert program is not None
    flags = ["-shared", "-fPIC", "-O0", "-std=c++20", f"-I{torch / 'include'}", f"-L{torch / 'lib'}"]
    done = subprocess.run(
        [program, *flags, str(SOURCE), "-ltorch_cpu", "-lc10", "-o", str(library)], capture_output=True, text=True
    )
    if done.returncode:
        raise RuntimeError(done.stderr)
    return library


def load(library: Path | None) -> None:
    """Loads the guard before torch is imported, because torch looks for a guard only during its import."""
    if library is not None:
        ctypes.CDLL(str(torch_folder() / "lib" / "libtorch_cpu.so"), ctypes.RTLD_GLOBAL)
        ctypes.CDLL(str(library))


class StepError(AssertionError):
    """An exception of another process: the name of its class, and its traceback."""

    def __init__(self, kind: str, text: str) -> None:
        super().__init__(kind, text)
        self.kind, self.text = kind, text

    def __str__(self) -> str:
        return self.text


def attempt(function: Callable[..., Any], *arguments: Any) -> Any:
    """Calls the function. Raises StepError for whatever it raises, as torch's exceptions cannot be pickled."""
    try:
        return function(*arguments)
    except Exception as error:
        raise StepError(type(error).__name__, traceback.format_exc()) from None
