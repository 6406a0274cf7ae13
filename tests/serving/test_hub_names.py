"""`serve` with models of the Hugging Face Hub: downloaded once, then served offline. A failure leaves no file."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("starlette")
pytest.importorskip("uvicorn")
pytest.importorskip("safetensors")

from builders import REAL_LINES, save_transformer
from hub_server import Fault, HubServer
from serving_process import serving

from nmtkit.config.files import user_cache
from nmtkit.translation.translator import Translator

pytestmark = pytest.mark.slow  # starts the service
NAME = "hf:org/ours@v1"


@pytest.fixture
def model(hub: HubServer, tmp_path: Path) -> Path:
    path = save_transformer(tmp_path / "ours.pt")
    hub.add("org/ours", {"model.pt": path.read_bytes(), "README.md": b"x"}, revision="v1")
    return path


def models_of(folder: Path, flag: str) -> list[str]:
    """Returns the flags that serve the model of the Hub."""
    if flag == "--path":
        return [flag, f"en-de={NAME}"]
    (folder / "models.txt").write_text(f"en-de={NAME}\n")
    return [flag, str(folder / "models.txt")]


def files(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file() and path.suffix != ".lock"]


def test_a_model_of_the_hub_is_served_and_later_without_the_hub(
    model: Path, hub: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flags = ["--workers", "1", "--max-len-b", "5"]
    expected = [line.text for line in Translator.load(model).translate(REAL_LINES[:2], max_len_b=5)]
    with serving(tmp_path, *models_of(tmp_path, "--path"), *flags) as server:
        assert server.translate(REAL_LINES[:2]) == expected
        assert server.stop() == 0
        commit = hub.repository("org/ours").refs["v1"]
        assert NAME in server.log.read_text() and commit[:12] in server.log.read_text()
    shutil.rmtree(hub.cache)  # the imported checkpoint is enough
    hub.requests.clear()
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with serving(tmp_path, *models_of(tmp_path, "--models"), *flags) as server:
        assert server.translate(REAL_LINES[:2]) == expected
        assert server.stop() == 0
    assert not hub.requests


@pytest.mark.parametrize(
    ("fault", "variables", "facts"),
    [
        (Fault("GET /lfs", corrupt=True), {}, ["hf:org/ours@", "model.pt", "hash"]),
        (None, {"HF_HUB_OFFLINE": "1"}, ["hf:org/ours", "HF_HUB_OFFLINE"]),
    ],
)
def test_a_failure_ends_with_one_line_and_leaves_no_file(
    fault: Fault | None, variables: dict[str, str], facts: list[str], model: Path, hub: HubServer, tmp_path: Path
) -> None:
    hub.faults = [fault] if fault else []
    command = [sys.executable, "-m", "nmtkit", "serve", "--port", "0", *models_of(tmp_path, "--path")]
    result = subprocess.run(command, env={**os.environ, **variables}, capture_output=True, text=True, timeout=1200)
    errors = [line for line in result.stderr.splitlines() if "error:" in line]
    assert result.returncode != 0 and len(errors) == 1 and "Traceback" not in result.stderr, result.stderr
    assert all(fact in errors[0] for fact in facts), result.stderr
    assert not files(user_cache()) and not [path for path in files(hub.cache) if path.stat().st_size > 1000]
