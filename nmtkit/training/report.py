"""Writes the HTML page of a run: state, facts, curves, validations, translations over time, and settings.

The page loads nothing from the network. While the run lasts, the browser reads the page again every `REFRESH` seconds.
"""

import logging
import math
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nmtkit.config import flag_name, setting_text, to_dict, to_toml
from nmtkit.config.files import parse_json, write_atomically
from nmtkit.jobs.progress import duration
from nmtkit.pages.charts import Point, line_chart
from nmtkit.pages.document import Html, render
from nmtkit.training.metrics import RatedTranslation
from nmtkit.training.run_config import RunConfig
from nmtkit.training.run_log import numbers_of, shown_scores

if TYPE_CHECKING:
    from nmtkit.training.due import RunProgress
    from nmtkit.training.validation import Validator

log = logging.getLogger("nmtkit")

REFRESH = 30  # seconds between two versions of the page while the run lasts

CURVES = {
    # title -> (field, kind of record) of each curve
    "loss": (("loss", "train"), ("loss", "valid")),
    "perplexity": (("ppl", "train"), ("ppl", "valid")),
    "BLEU": (("bleu", "valid"),),
    "chrF": (("chrf", "valid"),),
    "learning rate": (("lr", "train"),),
    "target tokens per second": (("tokens_per_second", "train"),),
    "gradient norm": (("norm", "train"),),
}
KINDS = ("train", "valid")
TITLES = {"bleu": "BLEU", "chrf": "chrF"}
UNITS = {
    "loss": "nats per token",
    "BLEU": "points",
    "chrF": "points",
    "learning rate": "step size",
    "gradient norm": "L2 norm",
}
LARGEST_POINT = 1e100  # a curve leaves out larger numbers, such as the perplexity of a run that diverged
SHOWN = 300  # maximum number of characters of a translation on the page
LOGARITHMIC = ("perplexity",)  # titles of charts with a logarithmic axis

# numbers of a record that have no curve
UNDRAWN = ("update", "updates", "epoch", "seconds", "seconds_left", "time", "cpu_seconds", "nll", "skipped")


def read_lines(log: Path) -> list[dict[str, Any]]:
    """Returns the records of the newest run in a log, in order. Skips incomplete lines, for example of a killed run.

    The log has records of an earlier run if the user has deleted its checkpoints and trained again. Such records are
    left out.
    """
    records: list[dict[str, Any]] = []
    for line in log.read_text(encoding="utf-8", errors="replace").split("\n"):  # splitlines would also split at U+2028
        try:
            record = parse_json(line)
        except ValueError:
            continue
        if isinstance(record, dict) and "kind" in record:
            if record["kind"] == "start":
                records.clear()
            records.append(record)
    return records


def latest_records(records: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns the last record of each kind and update, without updates that were lost.

    When a run resumes, all updates after its checkpoint are lost, even if the resumed run never reaches these updates.
    """
    latest: dict[tuple[str, int], dict[str, Any]] = {}
    for record in records:
        update = record.get("update", 0)
        if record["kind"] == "resume":
            latest = {key: kept for key, kept in latest.items() if key[1] <= update}
        latest[record["kind"], update] = record
    return list(latest.values())


def elapsed(records: Iterable[Mapping[str, Any]], clock: str) -> float:
    """Returns the training time of a run in seconds, without pauses between a stop and a resume.

    `clock` is the field of the log records to read: "time" for wall-clock time, "cpu_seconds" for CPU time.
    """
    total, first, last = 0.0, math.inf, -math.inf
    for record in records:
        if record["kind"] in ("start", "resume"):
            total += max(0.0, last - first)
            first, last = record.get(clock, math.inf), -math.inf
        last = record.get(clock, last)
    return total + max(0.0, last - first)


class RunPage:
    """The page report.html of a run. If the page cannot be written, a warning is logged."""

    def __init__(self, folder: Path, progress: "RunProgress") -> None:
        self.folder, self.progress = folder, progress
        self.rated: tuple[Sequence[RatedTranslation], Sequence[RatedTranslation]] = ((), ())
        self.written = -math.inf

    def write(self, validator: "Validator | None" = None) -> None:
        """Writes the page. If a `validator` has made a validation, also writes its translations to a file."""
        self.written = time.monotonic()
        try:
            if validator is not None:
                self.rated = validator.rated()
                if validator.translates:
                    path = translations_file(self.folder, self.progress.updates)
                    path.parent.mkdir(exist_ok=True)
                    write_atomically(path, "".join(f"{line}\n" for line in validator.hypotheses))
            best, worst = self.rated
            write(self.folder, best=best, worst=worst)
        except OSError as error:
            log.warning("report not written: %s", error)

    def keep_current(self) -> None:
        """Writes the page if it is older than `REFRESH` seconds."""
        if time.monotonic() - self.written >= REFRESH:
            self.write()


def write(folder: Path, *, best: Sequence[RatedTranslation] = (), worst: Sequence[RatedTranslation] = ()) -> None:
    """Writes `folder/report.html` from `folder/log.jsonl` and from rated translations. Raises OSError if this fails."""
    lines = read_lines(folder / "log.jsonl")
    records = latest_records(lines)
    charts = []
    for title, curves in curves_of(records).items():
        drawn: dict[str, list[Point]] = {kind: [] for kind in KINDS}
        drawn |= {kind: points(records, kind, field) for field, kind in curves}
        if max(map(len, drawn.values())) > 1:
            charts.append(Html(line_chart(title, drawn, title in LOGARITHMIC, unit=UNITS.get(title, ""))))
    values = state_of(lines) | sections(records, best=best, worst=worst)
    write_atomically(folder / "report.html", render("report.html", title=folder.resolve().name, body=charts, **values))


def translations_file(folder: Path, update: int) -> Path:
    """Returns the file with the translations of a validation: a line for each sentence of the valid set, in order."""
    return folder / "validation" / f"update_{update:08d}.txt"


def curves_of(records: Iterable[dict[str, Any]]) -> dict[str, tuple[tuple[str, str], ...]]:
    """Returns `CURVES`, and one more chart for each other metric or count of the criterion in the records."""
    drawn = {field for lines in CURVES.values() for field, _ in lines}
    more: dict[str, dict[str, None]] = {}
    for record in records:
        for field in numbers_of(record, {*drawn, *UNDRAWN}) if record["kind"] in KINDS else ():
            more.setdefault(field, {})[record["kind"]] = None
    return CURVES | {field: tuple((field, kind) for kind in kinds) for field, kinds in more.items()}


def points(records: Iterable[dict[str, Any]], kind: str, field: str) -> list[Point]:
    return sorted(
        (float(record["update"]), float(record[field]))
        for record in records
        if record["kind"] == kind and record.get(field) is not None and record[field] < LARGEST_POINT
    )


# --- state and facts --------------------------------------------------------------------------------------------------


def state_of(lines: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Returns state, scores, facts and settings for the template. `lines` are all records of a log, oldest first."""
    records = latest_records(lines)
    start, last = _newest(lines, "start", "resume"), _newest(lines, "start", "resume", "end")
    trained = _newest(records, "train")
    running = last.get("kind") in ("start", "resume")
    times = [record["time"] for record in lines if "time" in record]
    tables = start.get("config", {})
    return {
        "state": "running" if running else last.get("state", ""),
        "reason": _unbroken(last.get("reason", "")),
        "progress": _progress(trained, running, max((record.get("update", 0) for record in records), default=0)),
        "refresh": REFRESH if running else None,
        "written": times[-1] if times else None,
        "scores": _scores([record for record in records if record["kind"] == "valid"]),
        "facts": _facts(start, elapsed(lines, "time")),
        "settings": changed_settings(tables),
        "config": to_toml(tables),
    }


def _newest(records: Sequence[dict[str, Any]], *kinds: str) -> dict[str, Any]:
    """Returns the last record of one of the `kinds`, or an empty dict."""
    return next((record for record in reversed(records) if record["kind"] in kinds), {})


def _progress(trained: Mapping[str, Any], running: bool, update: int) -> str:
    """Returns the progress as text. `trained` is the last record of updates, or empty before the first record."""
    total = trained.get("updates")
    text = f"update {update:,}" + (f" of {'about ' * bool(trained.get('estimated'))}{total:,}" if total else "")
    left = trained.get("seconds_left")
    return f"{text}, {duration(left)} left" if running and left is not None else text


def _scores(valid: Sequence[Mapping[str, Any]]) -> list[tuple[str, str]]:
    """Returns the scores of the best and of the last validation, with their updates."""
    best = next((record for record in reversed(valid) if record.get("best")), None)
    rows = [("best validation", best)] if best else []
    rows += [("last validation", valid[-1])] if valid and valid[-1] is not best else []
    return [(title, f"{', '.join(shown_scores(record))}, after update {record['update']:,}") for title, record in rows]


def _facts(start: Mapping[str, Any], seconds: float) -> list[tuple[str, str]]:
    """Returns facts about the run as pairs of a name and a text. Facts that are not known are left out."""
    languages = [" to ".join(start["languages"])] if start.get("languages") else []
    languages += ["-".join(pair) for pair in start.get("directions", ())]
    pairs = [f"{start['pairs']:,} pairs"] if "pairs" in start else []
    data = [start["data"], f"dataset {start['dataset']}"] if "data" in start else []
    on = [start[name] for name in ("device", "precision") if name in start]
    on += [f"{start['processes']} processes"] if start.get("processes", 1) > 1 else []
    versions = [f"{name} {start[name]}" for name in ("nmtkit", "torch", "python") if name in start]
    named = {
        "command": _unbroken(start.get("command", "")),
        "data": ", ".join([*data, *languages, *pairs]),
        "parameters": f"{start['parameters']:,}" if "parameters" in start else "",
        "device": ", ".join(on),
        "versions": ", ".join(versions),
        "time": duration(seconds) if seconds else "",
    }
    return [(name, text) for name, text in named.items() if text]


def _unbroken(text: str) -> Html:
    """Returns a command or a sentence as HTML without line breaks at hyphens inside words, for example inside flags."""
    whole = Html('<span class="unbroken">{}</span>')
    return Html(" ").join(whole.format(word) if "-" in word else word for word in text.split())


def changed_settings(tables: Mapping[str, Mapping[str, Any]]) -> list[tuple[str, str, str]]:
    """Returns the settings of a job that differ from the defaults: the flag, the value, and the default."""
    from nmtkit.training.config import DEFAULTS, REGISTRIES, kind_of

    changed = []
    for table, settings in tables.items():
        kind = kind_of(table)
        if kind == "run":
            defaults = to_dict(RunConfig()) | {each: list(names) for each, names in DEFAULTS.items()}
        else:
            name = settings.get("name", table.partition(".")[2])
            entry = REGISTRIES[kind].entries.get(name) if kind in REGISTRIES else None
            defaults = {} if entry is None else to_dict(entry.preset)
            if "name" in settings and (name,) != DEFAULTS[kind]:
                changed.append((REGISTRIES[kind].flag, name, DEFAULTS[kind][0]))
        for name, value in settings.items():
            if name in ("data", "save_dir", "plugin", "name"):
                continue
            if name not in defaults or defaults[name] != value:
                default = setting_text(defaults[name]) if name in defaults else ""
                changed.append((flag_name(name), setting_text(value), default))
    return changed


# --- validations ------------------------------------------------------------------------------------------------------


def sections(
    records: Sequence[Mapping[str, Any]], *, best: Sequence[RatedTranslation], worst: Sequence[RatedTranslation]
) -> dict[str, Any]:
    """Returns the values of the template `report.html` about validations. `records` are log records, oldest first."""
    valid = sorted((record for record in records if record["kind"] == "valid"), key=lambda record: record["update"])
    examples = [
        (title, [(round(chrf), source, _cut(translation), reference) for source, translation, reference, chrf in rows])
        for title, rows in (("Best", best), ("Worst", worst))
    ]
    latest = valid[-1] if valid else {}
    return {
        "matrices": _matrices(latest),
        "by_length": _by_length(latest) if latest.get("by_length") else None,
        "followed": _followed(valid) if latest.get("followed") else [],
        "examples": examples,
    }


def _cut(translation: str) -> str:
    """Returns a translation. A translation of more than `SHOWN` characters is cut, with … at its end."""
    return translation if len(translation) <= SHOWN else translation[:SHOWN].rstrip() + " …"


def _matrices(record: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Returns a matrix of source and target languages for each score of a run of many directions.

    A cell has the score as text, its share of the largest score, and whether the direction was trained. The cell of a
    direction without a validation set is None.
    """
    rows = record.get("directions") or []
    sources, targets = (list(dict.fromkeys(row[side] for row in rows)) for side in ("source", "target"))
    matrices = []
    for name in dict.fromkeys(name for row in rows for name in numbers_of(row, ("sentences", "nll", "ppl"))):
        cells = {(row["source"], row["target"]): (row[name], row.get("trained", True)) for row in rows}
        largest = max((value for value, _ in cells.values() if value), default=0) or 1
        shown = {
            key: None if value is None else (_score(name, value), max(0, value / largest), trained)
            for key, (value, trained) in cells.items()
        }
        matrices.append(
            {
                "title": TITLES.get(name, name),
                "update": record["update"],
                "targets": targets,
                "rows": [(source, [shown.get((source, target)) for target in targets]) for source in sources],
                "untrained": not all(trained for _, trained in cells.values()),
            }
        )
    return matrices


def _score(name: str, value: float) -> str:
    return f"{value:,.3f}" if name == "loss" else f"{value:,.1f}"


def _by_length(record: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the scores of each range of lengths, as bars: (score / largest score, score as text)."""
    rows = record["by_length"]
    scores = [name for name in ("loss", "bleu") if all(row.get(name) is not None for row in rows)]
    largest = {name: max(row[name] for row in rows) or 1 for name in scores}
    return {
        "update": record["update"],
        "scores": [TITLES.get(name, name) for name in scores],
        "rows": [
            {
                "tokens": row["tokens"].replace("-", " to "),
                "sentences": row["sentences"],
                "bars": [(row[name] / largest[name], _score(name, row[name])) for name in scores],
            }
            for row in rows
        ],
    }


def _followed(valid: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Returns source, reference and translations of each followed sentence.

    A translation is a tuple (update, text). Translations that are equal to the previous translation are left out.
    """
    sentences = []
    for index, sentence in enumerate(valid[-1]["followed"]):
        rows: list[tuple[int, str]] = []
        before = ""
        for record in valid:
            translations = record.get("followed") or []
            text = translations[index]["translation"] if index < len(translations) else before
            if text != before:
                rows.append((record["update"], _cut(text)))
            before = text
        fixed = {name: sentence.get(name) for name in ("direction", "source", "reference")}
        sentences.append({**fixed, "translations": rows})
    return sentences
