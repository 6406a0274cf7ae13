"""The files of nmtkit through which a line goes, from standard input to standard output."""

import subprocess
import sys
from pathlib import Path

import pytest
from builders import save_ending_transformer

# `nmtkit generate` with one line on standard input. Prints the files whose functions are called, return or yield
# between the read of the line and the write of its translation.
TRACED = """
import io, sys, threading
from pathlib import Path
import nmtkit
from nmtkit.cli import main

root, files, returns = Path(nmtkit.__file__).parent, [], 0
tracing = False

def observe(frame, event, argument):
    name = frame.f_code.co_filename
    if tracing and event in ("call", "return") and name.startswith(str(root)):
        files.append(str(Path(name).relative_to(root)))

class Input(io.BytesIO):
    def read1(self, size=-1):
        global tracing
        data = super().read1(size)
        tracing = tracing or bool(data)
        return data

class Output(io.BytesIO):
    def write(self, data):
        global tracing
        tracing = False
        return super().write(data)

out = Output()
sys.stdin, sys.stdout = io.TextIOWrapper(Input(b"All human beings are born free.\\n")), io.TextIOWrapper(out)
threading.setprofile(observe)
sys.setprofile(observe)
flags = ["--device", "cpu", "--threads", "1", "--quiet"]
main(["generate", "--path", sys.argv[1], "--engine", sys.argv[2], *flags], standalone_mode=False)
sys.setprofile(None)
assert out.getvalue().count(b"\\n") == 1
changes = sum(a != b for a, b in zip(files, files[1:]))
print(*sorted(set(files)), file=sys.stderr)
print(changes, file=sys.stderr)
"""
# The compiled search is the default of a CPU. The search of PyTorch also goes through nine files of models and layers.
MOST_FILES = {"numba": 20, "torch": 26}
SEARCH = {"numba": "translation/engines/lockstep.py", "torch": "translation/search/beam_search.py"}


@pytest.mark.parametrize("engine", ["torch", pytest.param("numba", marks=pytest.mark.slow)])
def test_a_line_goes_through_few_files(engine: str, tmp_path: Path) -> None:
    path = save_ending_transformer(tmp_path / "model.pt")
    command = [sys.executable, "-c", TRACED, str(path), engine]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    files = set(done.stderr.splitlines()[-2].split()) - {
        "jobs/openmp.py"
    }  # a thread that looks at the load now and then
    assert SEARCH[engine] in files and "cli/generate_run.py" in files
    assert len(files) <= MOST_FILES[engine], " ".join(sorted(files))
