"""A dataset that is small enough to train on in a test: sentences of made-up words and their mirror images.

Fixtures import torch themselves, because the process that starts the workers of pytest-xdist reads this file, too.
"""

import gc
import logging
import os
import sys

# Before torch is imported: with pytest-xdist each core runs one process, so one thread is enough.
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_NUM_THREADS", "1")

from collections.abc import Iterator
from pathlib import Path

import pytest
from hub_server import HubServer, running_hub

gc.disable()  # until the tests are collected

# Triton reads this when it is imported and runs kernels in its interpreter. torch.compile imports Triton too.
os.environ.setdefault("TRITON_INTERPRET", "1")


def pytest_collection_finish() -> None:
    """Hides the modules and the tests from the garbage collector, which would visit them in 0.4 s again and again."""
    gc.freeze()
    gc.enable()


def pytest_unconfigure() -> None:
    gc.unfreeze()  # or libraries complain about objects that are left at the end


@pytest.fixture(scope="session", autouse=True)
def shared_folder(tmp_path_factory: pytest.TempPathFactory, pytestconfig: pytest.Config) -> None:
    """Shares the files of `builders.built_once` between workers, as the documentation of pytest-xdist describes."""
    import builders

    base = tmp_path_factory.getbasetemp()
    # A test may run pytest in a child process, which inherits the variables of pytest-xdist, but is no worker.
    builders.shared_folder = (base.parent if hasattr(pytestconfig, "workerinput") else base) / "built-once"


@pytest.fixture(scope="session", autouse=True)
def quick_seeds() -> Iterator[None]:
    """Makes torch.manual_seed quicker on a machine without GPU, where each call stores a stack trace for later."""
    import torch

    with pytest.MonkeyPatch.context() as patch:
        for device in (torch.cuda, torch.xpu):
            if not device.is_available():
                patch.setattr(device, "manual_seed_all", lambda seed: None)
        yield


@pytest.fixture(autouse=True)
def heard() -> None:
    """Undoes the effects of earlier tests on this process.

    Log records go to caplog, programs start anew, spawned processes do not load the plug-ins of earlier tests, whose
    files may be gone, and random numbers do not depend on the tests that ran before.
    """
    logger = logging.getLogger("nmtkit")
    logger.propagate, logger.handlers = True, []
    logger.setLevel(logging.NOTSET)
    os.environ.pop("NMTKIT_PROGRAM", None)
    if plugins := sys.modules.get("nmtkit.config.plugins"):
        plugins._names.clear()
    if torch := sys.modules.get("torch"):
        torch.default_generator.manual_seed(1)


@pytest.fixture(autouse=True)
def pytorch_translates(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without `--engine`, fast tests use PyTorch, whether the search is compiled on this machine or not."""
    if request.node.get_closest_marker("slow") is None:
        monkeypatch.setattr("nmtkit.translation.engines.engine.COMPILED", "torch")


@pytest.fixture(scope="session")
def mirror_data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns the folder of a binarized dataset of 200 training, 20 valid and 20 test pairs."""
    from builders import write_corpus

    from nmtkit.cli import main

    folder = tmp_path_factory.mktemp("mirror")
    for seed, (name, pairs) in enumerate([("train", 200), ("valid", 20), ("test", 20)]):
        write_corpus(folder / name, pairs, seed)
    flags = ["-s", "xx", "-t", "yy", "--destdir", str(folder / "data-bin"), "--vocab-size", "320"]
    for name in ("train", "valid", "test"):
        flags += [f"--{name}pref", str(folder / name)]
    main(["preprocess", *flags], standalone_mode=False)
    return folder / "data-bin"


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[HubServer]:
    """Returns a Hugging Face Hub on this machine, which the client asks instead of the real Hub, with empty caches."""
    monkeypatch.setenv("NMTKIT_CACHE", str(tmp_path / "nmtkit-cache"))
    with running_hub(tmp_path / "hub-cache", monkeypatch) as server:
        yield server
