"""The log of a run: records in a JSON Lines file, and text lines on stderr, with a live line in a terminal."""

import json
import logging
import math
import time
from collections.abc import Callable, Container, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.cells import cell_len, chop_cells
from rich.console import Console
from rich.live import Live
from rich.text import Text

from nmtkit.jobs.progress import duration

log = logging.getLogger("nmtkit")

Record = dict[str, Any]


class Lines:
    """Shows a run as lines of text. The line of an update has at most `width` columns (None: no limit)."""

    def __init__(self, width: int | None = None) -> None:
        self.width = width

    def tick(self, record: Record) -> None:
        """Called after every update."""

    def note(self, text: str) -> None:
        """Called with a text when the run starts work that is not an update."""

    def record(self, record: Record) -> None:
        """Called with every record of the log file."""
        for line in lines_of(record, self.width):
            log.info("%s", line)

    def close(self) -> None:
        """Called at the end of the run."""


class LiveLine(Lines):
    """Shows a live line below the lines of the log: progress, speed and time left after every update."""

    def __init__(self, console: Console) -> None:
        super().__init__(console.width)
        self.live = Live(Text("starting …", style="dim"), console=console, refresh_per_second=4, transient=True)
        self.live.start()
        self.last: Record = {}

    def tick(self, record: Record) -> None:
        self.last.update(record)
        shown = "  ".join(fields(self.last, LIVE, self.live.console.width))
        self.live.update(Text(shown, no_wrap=True, overflow="ellipsis", style="dim"))

    def note(self, text: str) -> None:
        self.live.update(Text(text, style="dim", no_wrap=True, overflow="ellipsis"))

    def record(self, record: Record) -> None:
        self.width = self.live.console.width
        super().record(record)
        if record["kind"] == "train":
            self.last = {}  # removes fields that the new record does not have, such as "skipped"
            self.tick(record)

    def close(self) -> None:
        self.live.stop()


class RunLog:
    """Appends records to `folder/log.jsonl` and shows them on `display`.

    A record also has the Unix time and the CPU time of this process, in seconds. If the file cannot be written, a
    single warning is logged.
    """

    def __init__(self, folder: Path, display: Lines) -> None:
        self.path = folder / "log.jsonl"
        self.display = display
        self._warned = False

    def write(self, kind: str, **values: Any) -> None:
        record = {"kind": kind, **values, "time": int(time.time()), "cpu_seconds": int(time.process_time())}
        self.display.record(record)
        # settings stay exact, because later commands compare them
        finite = {name: value if name == "config" else _plain(value) for name, value in record.items()}
        try:
            with self.path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(finite, ensure_ascii=False) + "\n")
        except OSError as error:
            if not self._warned:
                log.warning("cannot write %s (%s); training continues without the log", self.path, error.strerror)
            self._warned = True


def _plain(value: Any) -> Any:
    """Rounds floats to six significant digits, and replaces NaN and infinity by None, because JSON supports neither."""
    if isinstance(value, list):
        return [_plain(item) for item in value]
    if isinstance(value, dict):
        return {name: _plain(item) for name, item in value.items()}
    if not isinstance(value, float):
        return value
    return float(f"{value:.6g}") if math.isfinite(value) else None


def numbers_of(record: Mapping[str, Any], left_out: Container[str] = ()) -> dict[str, float]:
    """Returns the numbers of a record by name, except the names in `left_out`."""
    return {
        name: value
        for name, value in record.items()
        if isinstance(value, int | float) and not isinstance(value, bool) and name not in left_out
    }


def lines_of(record: Mapping[str, Any], width: int | None = None) -> list[str]:
    """Returns the text lines of a record, or no lines for a record that is only in the file.

    Each line of an update or a validation has at most `width` columns, except the lines of directions. Long
    translations are cut to this width.
    """
    if record["kind"] == "train":
        return ["  ".join(fields(record, width=width))]
    if record["kind"] == "valid":
        directions = _directions(record.get("directions", ()))
        scores = "  ".join(fields(record, width=None if width is None else width - len("valid  ")))
        return [f"valid  {scores}", *directions, *_translations(record.get("followed", ()), width)]
    return [str(record["message"])] if record.get("message") else []


def _directions(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Returns a line with the scores of each direction, or no line if the directions are too many for a terminal."""
    if len(rows) > SHOWN_DIRECTIONS:
        return []
    return [
        f"  {row['source']}-{row['target']}  " + "  ".join([*shown_scores(row), *UNTRAINED[row.get("trained", True)]])
        for row in rows
    ]


def _translations(rows: Sequence[Mapping[str, str]], width: int | None) -> list[str]:
    """Returns the lines of each sentence: direction (only with several directions), source, translation, reference."""
    names = ("direction", "source", "translation", "reference")
    lines = [f"  {name:<12} {row[name]}" for row in rows for name in names if name in row]
    return lines if width is None else [_cut(line, width) for line in lines]


def _cut(line: str, width: int) -> str:
    """Returns the start of a line, with … at its end if the line has more than `width` columns."""
    return line if cell_len(line) <= width else chop_cells(line, width - 1)[0] + "…"


def fields(record: Mapping[str, Any], order: Sequence[str] = (), width: int | None = None) -> list[str]:
    """Returns the fields of a record as texts: the update, the fields of `order`, then other fields by importance.

    With `width`, leaves out fields until the line, with two spaces between fields, has at most `width` columns. Fields
    of `LEFT_OUT` that are not in `order` are left out first. Then the other fields are left out, beginning with the
    least important field. The remaining time, the epoch and the loss are left out last, in this order. The update
    always stays.
    """
    shown = {}
    if "update" in record:
        of = f"/{'~' if record.get('estimated') else ''}{record['updates']:,}" if record.get("updates") else ""
        shown["update"] = f"update {record['update']:,}{of}"
    others = (key for key, value in record.items() if isinstance(value, float) and key not in (*HIDDEN, *FORMS))
    for name in dict.fromkeys((*order, *FIRST, *others, *FORMS)):
        value = record.get(name)
        if value is not None and value is not False:
            shown[name] = FORMS[name](value) if name in FORMS else f"{name} {value:.4g}"
    if width is not None:
        optional = [name for name in shown if name not in KEPT]
        first = [name for name in LEFT_OUT if name not in order]
        for name in [*first, *reversed(optional), *reversed(KEPT[1:])]:
            if len("  ".join(shown.values())) > width:
                shown.pop(name, None)
    return list(shown.values())


def shown_scores(record: Mapping[str, Any]) -> list[str]:
    """Returns the scores of a validation as texts, without perplexity."""
    scores = {name: value for name, value in record.items() if isinstance(value, float) and name not in NO_SCORES}
    return fields(scores)


SHOWN_DIRECTIONS = 30  # largest number of directions whose scores are shown in the terminal
UNTRAINED = {True: (), False: ("(not trained)",)}
LIVE = ("epoch", "loss", "tokens_per_second", "seconds_left")  # first fields of the live line
FIRST = ("loss", "ppl", "lr", "norm", "bleu")
LEFT_OUT = ("seconds", "norm", "tokens_per_second", "ppl", "lr")  # fields that a narrow line leaves out first
KEPT = ("update", "loss", "epoch", "seconds_left")  # fields that a narrow line leaves out last
HIDDEN = ("nll",)  # numbers that are not shown, because ppl = exp(nll) is shown
NO_SCORES = (*HIDDEN, "ppl", "seconds")
FORMS: dict[str, Callable[[Any], str]] = {
    "loss": lambda value: f"loss {value:,.3f}",
    "ppl": lambda value: (
        f"ppl {value:,.2f}" if value < 1000 else f"ppl {value:,.0f}" if value < 1e7 else f"ppl {value:.3g}"
    ),
    "lr": lambda value: f"lr {value:.3g}",
    "norm": lambda value: f"norm {value:.2f}",
    "bleu": lambda value: f"BLEU {value:.2f}",
    "chrf": lambda value: f"chrF {value:.2f}",
    "comet": lambda value: f"COMET {value:.2f}",
    "cometkiwi": lambda value: f"CometKiwi {value:.2f}",
    "tokens_per_second": lambda value: f"{value / 1000:,.1f}k tok/s" if value >= 10_000 else f"{value:,.0f} tok/s",
    "epoch": lambda value: f"epoch {value}",
    "seconds_left": lambda value: f"{duration(value)} left",
    "best": lambda value: "best so far",
    "skipped": lambda value: f"{value} skipped",
    "seconds": lambda value: f"in {duration(value)}",
}
