"""Answers commands and flags of other toolkits with their names here, which `other_toolkits.toml` lists."""

import difflib
import re
import tomllib
from collections.abc import Collection
from pathlib import Path

Rows = dict[str, dict[str, str]]  # toolkit -> name there -> the rest of the sentence

_TABLES = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
COMMANDS: Rows = _TABLES["commands"]
FLAGS: dict[str, Rows] = _TABLES["flags"]  # command -> rows


def about_flag(command: str, flag: str) -> str | None:
    """Returns a sentence about a flag of another toolkit, or None if the flag is in no row of `command`."""
    return _answer(FLAGS.get(command, {}), flag)


def about_command(name: str, known: Collection[str]) -> str | None:
    """Returns the command to type instead of an unknown one: for another toolkit's command, or for a misspelt name."""
    name = re.sub("^(fairseq|onmt|sockeye|marian)-", "", name.replace("_", "-"))
    if name in known:
        return f"it is nmtkit {name} here"
    nearest = difflib.get_close_matches(name, known, 1)
    return _answer(COMMANDS, name) or (f"did you mean {nearest[0]!r}?" if nearest else None)


def _answer(rows: Rows, name: str) -> str | None:
    name = name.replace("_", "-")
    for toolkit, names in rows.items():
        if name in names:
            return f"{toolkit}'s {name} {names[name]}"
    return None
