"""Fixtures for tests of sweeps."""

import io
from collections.abc import Callable, Sequence

import pytest
from click.testing import CliRunner

from nmtkit.cli import main
from nmtkit.experiments.sweep_runner import Runner


@pytest.fixture
def within_this_process(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """Makes the runs in this process, without starting Python. Returns their commands."""
    made: list[list[str]] = []

    def run(self: Runner, command: Sequence[str], watch: Callable[[], bool] = lambda: True) -> int:
        made.append(list(command))
        result = CliRunner().invoke(main, list(command)[1:])
        self.errors = []
        self._copy(io.StringIO(result.stderr))
        return result.exit_code

    monkeypatch.setattr(Runner, "run", run)
    return made
