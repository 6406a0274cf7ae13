"""Every example of docs/plugins.md is a file of examples/plugin, keeps to its contract, and takes part in a run."""

import re
from pathlib import Path

import pytest
from click.testing import CliRunner

from nmtkit import checkpoint
from nmtkit.cli import main
from nmtkit.plugins import load_plugin

ROOT = Path(__file__).parent.parent
FILES = sorted((ROOT / "examples/plugin").glob("*.py"))
PAGE = (ROOT / "docs/plugins.md").read_text(encoding="utf-8")
SHOWN = [block for block in re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL) if ".register(" in block]


def test_the_page_shows_the_files() -> None:
    files = {path.read_text(encoding="utf-8") for path in FILES if "optuna" not in path.name}
    assert set(SHOWN) == files and len(SHOWN) == 6
    assert all(20 <= block.count("\n") <= 40 for block in SHOWN)


@pytest.fixture(autouse=True)
def loaded() -> None:
    for path in FILES:
        if "optuna" not in path.name:
            load_plugin(str(path))


def test_the_examples_keep_to_their_contracts() -> None:
    (block,) = [block for block in re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL) if "nmtkit.testing" in block]
    namespace: dict[str, object] = {}
    exec(block, namespace)
    namespace["test_my_components"]()  # type: ignore[operator]


def test_the_examples_make_a_run_together(mirror_data: Path, tmp_path: Path) -> None:
    plugins = [word for path in FILES if "optuna" not in path.name for word in ("--plugin", str(path))]
    components = (
        "--arch gru --criterion focal_loss --optimizer lion --lr-scheduler warmup_stable_decay --transforms switchout"
    )
    components += " --metrics length_ratio --best-checkpoint-metric length_ratio"
    settings = "--width 12 --lr 0.01 --warmup-updates 2 --switchout 0.2 --focal-gamma 1"
    run = "--batch-tokens 200 --validate-interval-updates 2 --max-update 2 --threads 1 --valid-beam 1"
    arguments = ["train", str(mirror_data), *plugins, *f"{components} {settings} {run}".split()]
    arguments += ["--save-dir", str(tmp_path / "run")]
    result = CliRunner().invoke(main, arguments)
    assert result.exit_code == 0, result.output
    contents = checkpoint.load(tmp_path / "run/last.pt")
    assert contents["update"] == 2
    assert contents["scores"]["length_ratio"] > 0
