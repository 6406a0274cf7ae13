"""Writes settings as TOML that `--config` reads."""

import re
from collections.abc import Mapping
from typing import Any


def to_toml(tables: Mapping[str, Mapping[str, Any]]) -> str:
    """Returns the tables as TOML text that `--config` reads. None becomes the text "none".

    The title `metrics.bleu` names the table `bleu` inside the table `metrics`.
    """
    return "\n".join(
        f"[{_toml_title(title)}]\n" + "".join(f"{key} = {_toml_value(value)}\n" for key, value in table.items())
        for title, table in tables.items()
    )


def _toml_title(title: str) -> str:
    parts = title.split(".", 1)
    return ".".join(part if re.fullmatch(r"[A-Za-z0-9_-]+", part) else _toml_value(part) for part in parts)


def _toml_value(value: Any) -> str:
    if value is None:
        return '"none"'
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int | float):
        return repr(value)
    if isinstance(value, list | tuple):
        return "[" + ", ".join(_toml_value(item) for item in value) + "]"
    escaped = str(value).replace("\\", "\\\\").replace('"', '\\"')
    escaped = "".join(c if c >= " " and c != "\x7f" else f"\\u{ord(c):04x}" for c in escaped)
    return f'"{escaped}"'
