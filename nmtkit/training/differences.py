"""Settings that differ: of a run and the one it resumes, or between several runs."""

from collections.abc import Mapping, Sequence
from typing import Any

from nmtkit.training.config import Tables, kind_of

Row = tuple[str, Any, Any]  # setting, before, now

# what a run may do otherwise each time it is resumed, and says in its own way or by its paths
EXPECTED_CHANGES = (
    *("max_update", "max_epoch", "save_dir", "data", "device", "threads", "nproc_per_node", "callbacks"),
    *("reset_optimizer", "reset_lr_scheduler", "stop_time_hours"),
)


def flat(tables: Tables) -> dict[str, Any]:
    """Returns all settings by name, which no two tables share; the name of a component has that of its table."""
    return {
        table if name == "name" else name: value
        for table, settings in tables.items()
        for name, value in settings.items()
    }


def changes(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[Row]:
    """Returns which of the values `now` were others, or none, `before`."""
    return [(name, before.get(name), value) for name, value in now.items() if before.get(name) != value]


def changed_settings(before: Tables, now: Tables) -> list[Row]:
    """Returns what a resumed run sets otherwise, without settings that are expected to change.

    Of components that were not there before, the list of names says so.
    """
    shared = {table: own for table, own in now.items() if table in before and kind_of(table) != "callbacks"}
    return [row for row in changes(flat(before), flat(shared)) if row[0] not in EXPECTED_CHANGES]


def shown(value: Any) -> str:
    """Returns a setting's value as a flag has it."""
    if value is None or isinstance(value, bool):
        return {None: "none", True: "on", False: "off"}[value]
    if isinstance(value, list | tuple):
        return ",".join(shown(item) for item in value) or "none"
    return f"{value:g}" if isinstance(value, float) else str(value)


def table(rows: Sequence[Row]) -> str:
    """Returns lines in three columns, under headings."""
    cells = [
        ("setting", "before", "now"),
        *((name, shown(old), shown(new)) for name, old, new in rows),
    ]
    widths = [max(len(row[column]) for row in cells) for column in range(2)]
    return "\n".join(f"  {row[0]:{widths[0]}}  {row[1]:{widths[1]}}  {row[2]}" for row in cells)
