"""Runs nmtkit commands in forks of a process that has imported everything, in 50 ms each instead of 3 s.

A fork that takes too long ends with a signal, and a fork that allocates too much with a MemoryError. So a hang or an
absurd allocation fails one test, and the other tests run.
"""

import json
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

ROOT = Path(__file__).parents[2]
SERVER = """
import gc, json, os, resource, signal, sys, traceback
import torch, torch._dynamo  # a dry run imports torch._dynamo, which takes a second
torch.set_num_threads(1)
import importlib, pkgutil, sacrebleu
import nmtkit
from nmtkit.cli import main
for module in pkgutil.walk_packages(nmtkit.__path__, "nmtkit."):
    if not module.name.endswith("__main__"):
        try:
            importlib.import_module(module.name)
        except ModuleNotFoundError as error:
            if error.name.split(".")[0] not in ("starlette", "uvicorn"):  # of the extra `serve`
                raise
gc.freeze()  # or the garbage collector of each fork visits, and so copies, the objects of all imported modules
virtual = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
print("ready", flush=True)
for line in sys.stdin:
    arguments, files, seconds, memory = json.loads(line)
    child = os.fork()
    if not child:
        os.setsid()
        for number, path in enumerate(files):
            if path is None:
                os.close(number)
            else:
                os.dup2(os.open(path, os.O_RDONLY if number == 0 else os.O_WRONLY), number)
        errors = (None, None, "backslashreplace")
        sys.stdin, sys.stdout, sys.stderr = (
            None if path is None else open(number, "w" if number else "r", errors=errors[number], closefd=False)
            for number, path in enumerate(files)
        )
        from nmtkit.cli import command
        command.stderr.file = sys.stderr
        sys.argv[0] = "nmtkit"
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.setitimer(signal.ITIMER_PROF, seconds)
        signal.alarm(10 * seconds)
        resource.setrlimit(resource.RLIMIT_AS, (virtual + memory, virtual + memory))
        code = 1
        try:
            main(arguments)
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else 1 if end.code else 0
        except BaseException:
            traceback.print_exc()
        try:
            if sys.stdout is not None:
                sys.stdout.flush()
        except OSError:
            code = 120  # as the interpreter does when it cannot flush at its end
        os._exit(code)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    print(json.dumps(status), flush=True)
"""


@dataclass(frozen=True)
class Result:
    code: int  # negative: the signal that ended the process; -14 and -27 are time limits
    stdout: str
    stderr: str


class Forks:
    """The process that makes the forks. It is a context manager; `run` runs a command."""

    def __enter__(self) -> "Forks":
        command = [sys.executable, "-c", SERVER]
        self.folder = tempfile.TemporaryDirectory()
        paths = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
        self.server = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=self.folder.name,
            env=os.environ | {"PYTHONPATH": paths},
        )  # fmt: skip
        assert self.server.stdout is not None and self.server.stdout.readline() == "ready\n"
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self.server.stdin is not None
        self.server.stdin.close()
        self.server.wait()
        self.folder.cleanup()

    def run(
        self,
        *arguments: object,
        text: str = "",
        files: tuple[str | None, str | None, str | None] | None = None,
        seconds: int = 20,
        memory: int = 4 << 30,
    ) -> Result:
        """Runs `nmtkit ARGUMENTS` on `text`; `files` replace standard input, output and error, None closes them.

        The limits are `seconds` of CPU time, ten times as many seconds of wall time, and `memory` in bytes in addition
        to the memory of the imports.
        """
        paths = [Path(self.folder.name) / name for name in ("in", "out", "err")]
        for path in paths:
            path.write_text(text if path.name == "in" else "")
        assert self.server.stdin is not None and self.server.stdout is not None
        request = [list(map(str, arguments)), files or list(map(str, paths)), seconds, memory]
        self.server.stdin.write(json.dumps(request) + "\n")
        self.server.stdin.flush()
        code = json.loads(self.server.stdout.readline())
        return Result(code, paths[1].read_text(errors="replace"), paths[2].read_text(errors="replace"))
