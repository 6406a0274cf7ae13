"""Every example of docs/plugins.md is a file of examples/plugin and keeps its contract."""

import re
from pathlib import Path

import pytest
from click.testing import CliRunner

from nmtkit.cli import main
from nmtkit.plugins import load_plugin

ROOT = Path(__file__).parent.parent
FILES = sorted((ROOT / "examples/plugin").glob("*.py"))
PAGE = (ROOT / "docs/plugins.md").read_text(encoding="utf-8")
SHOWN = [block for block in re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL) if ".register(" in block]


def test_the_page_shows_the_files() -> None:
    files = {path.read_text(encoding="utf-8") for path in FILES if "optuna" not in path.name}
    assert set(SHOWN) == files and len(SHOWN) == 7
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


def test_the_example_architecture_trains_and_translates(mirror_data: Path, tmp_path: Path) -> None:
    plugin = ["--plugin", str(ROOT / "examples/plugin/gru.py")]
    flags = "--arch gru --width 16 --lr 0.01 --max-update 3 --batch-tokens 200 --metrics none --threads 1"
    trained = CliRunner().invoke(
        main, ["train", str(mirror_data), *plugin, *flags.split(), "--save-dir", str(tmp_path / "run")]
    )
    assert trained.exit_code == 0, trained.output
    checkpoint = str(tmp_path / "run" / "last.pt")
    search = ["--path", checkpoint, "--max-len-a", "0", "--max-len-b", "4", "--beam", "2", "--threads", "1"]
    translated = CliRunner().invoke(main, ["generate", str(mirror_data), *search, *plugin])
    assert translated.exit_code == 0, translated.output
    assert translated.stdout.count("\n") == 20
