"""Every command sets how OpenMP's threads wait before torch is loaded, unless the user has."""

import os
import subprocess
import sys

import pytest

NAMES = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME")

# prints the policy at the moment when torch would be loaded
CODE = """
import importlib.abc, os, sys

class Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name == "torch":
            print(os.environ.get("OMP_WAIT_POLICY"))
            os._exit(0)

sys.meta_path.insert(0, Finder())
from nmtkit.cli import main
main(["inspect", "nothing.pt"])
"""


@pytest.mark.parametrize(
    ("given", "policy"),
    [({}, "PASSIVE"), ({"OMP_WAIT_POLICY": "ACTIVE"}, "ACTIVE"), ({"GOMP_SPINCOUNT": "7"}, "None")],
)
def test_threads_sleep_while_they_wait_unless_told_otherwise(given: dict[str, str], policy: str) -> None:
    environment = {name: value for name, value in os.environ.items() if name not in NAMES} | given
    printed = subprocess.run(
        [sys.executable, "-c", CODE], env=environment, stdout=subprocess.PIPE, check=True, text=True
    )
    assert printed.stdout.strip() == policy
