"""Tells users of other toolkits the nmtkit names of commands and flags. `other_toolkits.toml` lists the names."""

import difflib
import re
import tomllib
from collections.abc import Collection
from pathlib import Path

Rows = dict[str, dict[str, str]]  # toolkit -> name of a command or flag in this toolkit -> rest of the message

_TABLES = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
COMMANDS: Rows = _TABLES["commands"]
FLAGS: dict[str, Rows] = _TABLES["flags"]  # command -> rows


def about_flag(command: str, flag: str) -> str | None:
    """Returns a sentence about a flag of another toolkit, or None if `command` has no row for the flag."""
    return _answer(FLAGS.get(command, {}), flag)


def about_command(name: str, known: Collection[str]) -> str | None:
    """Returns advice about the name of an unknown command, or None if there is no advice.

    The name can be misspelled, or be a command of another toolkit.
    """
    name = re.sub("^(fairseq|onmt|sockeye|marian)-", "", name.replace("_", "-"))
    if name in known:
        return f"the command of nmtkit is nmtkit {name}"
    nearest = difflib.get_close_matches(name, known, 1)
    return _answer(COMMANDS, name) or (f"did you mean {nearest[0]!r}?" if nearest else None)


def _answer(rows: Rows, name: str) -> str | None:
    name = name.replace("_", "-")
    for toolkit, names in rows.items():
        if name in names:
            return f"{toolkit}'s {name} {names[name]}"
    return None
