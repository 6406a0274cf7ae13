"""Every example of docs/plugins.md is a file of examples/plugin, and keeps to its contract."""

import re
from pathlib import Path

import pytest

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
