"""Differences between the settings of two runs, or of a run before and after a resume."""

from collections.abc import Mapping, Sequence
from typing import Any

from nmtkit.training.config import Tables, kind_of

Row = tuple[str, Any, Any]  # name of the setting, value before, value now

# settings that are not reported as changes after a resume, because other records of the log contain them
EXPECTED_CHANGES = (
    *("max_update", "max_epoch", "save_dir", "data", "device", "threads", "nproc_per_node", "callbacks"),
    *("reset_optimizer", "reset_lr_scheduler", "stop_time_hours"),
)


def flat(tables: Tables) -> dict[str, Any]:
    """Returns all settings by name. The name of a component gets the title of its table as key, such as "optimizer".

    Settings of different tables never have the same name.
    """
    return {
        table if name == "name" else name: value
        for table, settings in tables.items()
        for name, value in settings.items()
    }


def changes(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[Row]:
    """Returns the entries of `now` that are missing or different in `before`."""
    return [(name, before.get(name), value) for name, value in now.items() if before.get(name) != value]


def changed_settings(before: Tables, now: Tables) -> list[Row]:
    """Returns the settings that a resumed run changes, without `EXPECTED_CHANGES`.

    Settings of added components are left out, because the list of component names shows the addition.
    """
    shared = {table: after for table, after in now.items() if table in before and kind_of(table) != "callbacks"}
    return [row for row in changes(flat(before), flat(shared)) if row[0] not in EXPECTED_CHANGES]


def shown(value: Any) -> str:
    """Returns the text of a setting's value, in the form that its flag accepts."""
    if value is None or isinstance(value, bool):
        return {None: "none", True: "on", False: "off"}[value]
    if isinstance(value, list | tuple):
        return ",".join(shown(item) for item in value) or "none"
    return f"{value:g}" if isinstance(value, float) else str(value)


def table(rows: Sequence[Row]) -> str:
    """Returns a text table of three columns with headings."""
    cells = [
        ("setting", "before", "now"),
        *((name, shown(old), shown(new)) for name, old, new in rows),
    ]
    widths = [max(len(row[column]) for row in cells) for column in range(2)]
    return "\n".join(f"  {row[0]:{widths[0]}}  {row[1]:{widths[1]}}  {row[2]}" for row in cells)
