"""examples/pipeline runs the steps whose inputs have changed."""

import importlib.util
import json
from pathlib import Path
from types import ModuleType

import pytest

from nmtkit.cli import main

FOLDER = Path(__file__).parents[2] / "examples/pipeline"
NAMES = ["clean", "preprocess", "train", "average-checkpoints", "generate", "score", "export"]


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Returns the script with stand-ins for the commands, which write their outputs and are listed in `ran`."""
    spec = importlib.util.spec_from_file_location("pipeline", FOLDER / "pipeline.py")
    assert spec is not None and spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(__import__("sys").modules, "pipeline", script)
    spec.loader.exec_module(script)
    script.ran = []  # type: ignore[attr-defined]

    def execute(step) -> None:
        script.ran.append(step.name)
        for path in step.outputs:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(step.name)

    monkeypatch.setattr(script, "execute", execute)
    monkeypatch.setattr(script.Pipeline, "page", lambda pipeline: "page")
    return script


def made(module: ModuleType, folder: Path, text: str) -> list[str]:
    """Runs the pipeline of `text`. Returns the names of the steps that ran."""
    (folder / "run.toml").write_text(text)
    module.ran.clear()
    module.Pipeline(folder / "run.toml").run()
    return list(module.ran)


def test_finished_steps_are_skipped_and_later_steps_follow_a_repeated_step(module: ModuleType, tmp_path: Path) -> None:
    text = (FOLDER / "demo.toml").read_text()
    assert made(module, tmp_path, text) == NAMES
    assert made(module, tmp_path, text) == []
    (tmp_path / "demo/averaged.pt").unlink()
    assert made(module, tmp_path, text) == NAMES[3:]
    (tmp_path / "demo/scores.json").unlink()
    assert made(module, tmp_path, text) == NAMES[5:]
    assert list(json.loads((tmp_path / "demo/steps.json").read_text())) == NAMES


def test_changed_settings_stop_with_the_results_to_remove(module: ModuleType, tmp_path: Path) -> None:
    text = (FOLDER / "demo.toml").read_text()
    made(module, tmp_path, text)
    changed = text.replace("max-update = 700", "max-update = 800")
    with pytest.raises(SystemExit, match="settings of train") as stop:
        made(module, tmp_path, changed)
    assert "demo/run" in str(stop.value) and "demo/exported" in str(stop.value) and "data-bin" not in str(stop.value)
    with pytest.raises(SystemExit, match=r"unknown: \['trian'\]"):
        made(module, tmp_path, text + "\n[trian]\n")


def test_the_commands_of_the_demo_have_flags_that_exist(module: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text((FOLDER / "demo.toml").read_text())
    for step in module.Pipeline(tmp_path / "run.toml").steps():
        command = main.get_command(None, step.name)  # type: ignore[arg-type]
        assert command is not None
        command.make_context(step.name, list(step.words))


def test_the_list_of_commands_downloads_nothing(
    module: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    text = 'source = "en"\ntarget = "de"\nwork = "out"\n[corpora]\ntrain = "http://127.0.0.1:9/a.tsv"\n'
    (tmp_path / "run.toml").write_text(text + 'valid = "valid"\ntest = "test"\n')
    monkeypatch.setattr("sys.argv", ["pipeline.py", str(tmp_path / "run.toml"), "--list"])
    module.main()
    assert f"{tmp_path / 'out/corpora/a.tsv'}" in capsys.readouterr().out
    with pytest.raises(OSError):
        module.Pipeline(tmp_path / "run.toml").run()
