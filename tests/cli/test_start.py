"""A command starts without the garbage collector's work, which goes on as usual afterwards."""

import subprocess
import sys


def test_what_a_command_imports_is_out_of_the_collectors_sight() -> None:
    code = (
        "import gc, sys\n"
        "from nmtkit.cli import imports\n"
        "with imports():\n"
        "    assert not gc.isenabled()\n"
        "    import torch\n"
        "assert gc.isenabled() and gc.get_freeze_count() > 100_000\n"
        "frozen = gc.get_freeze_count()\n"
        "with imports():\n"
        "    assert gc.isenabled()\n"
        "    objects = [[] for _ in range(1000)]\n"
        "assert gc.get_freeze_count() == frozen\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
