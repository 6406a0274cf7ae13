"""The translations of a finished run, which are compared with the translations of other runs.

A sweep with [sweep.generate] writes translations and a record into the folder of each run. For other runs, the
translations of the last validation are used.
"""

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nmtkit.config import setting_text
from nmtkit.config.files import checkpoint_of, parse_json, sha256_of, write_atomically
from nmtkit.experiments.comparison import RunSummary
from nmtkit.scoring import metrics
from nmtkit.scoring.report import plain
from nmtkit.scoring.texts import read_lines, read_texts
from nmtkit.training.report import translations_file

AVERAGED, TRANSLATIONS, RECORD = "averaged.pt", "translations.txt", "translations.json"
METRICS = ("bleu", "chrf")
OF_MACHINE = ("threads", "workers")  # flags of `nmtkit generate` that can differ between runs that are compared


@dataclass(frozen=True, kw_only=True)
class RunTranslations:
    """Translations of a run with their references. `made_by` describes the model and the search."""

    lines: list[str]
    references: list[str]
    sources: list[str]
    target_lang: str | None
    made_by: str = ""
    flop: float | None = None  # estimated cost of the training, if a sweep has recorded it
    by_sweep: bool = False  # whether a sweep has made the translations; if not, the last validation has made them


def settings_of(average: int | None, generate: Mapping[str, Any], command: Sequence[str]) -> dict[str, Any]:
    """Returns the settings that can change the translations, in plain types, for the record.

    The setting `files` is a digest of the contents of all files whose paths are in `command`, such as a glossary.
    """
    settings = {"average": average} | {name: value for name, value in generate.items() if name not in OF_MACHINE}
    paths = (checkpoint_of(Path(word)) for word in command if os.path.exists(word))
    files = [path for path in paths if path.is_file()]
    return settings | ({"files": sha256_of(*files)[:12]} if files else {})


def is_current(run: RunSummary, settings: Mapping[str, Any]) -> bool:
    """Returns whether the folder has translations of the finished model with these settings."""
    record = _record(Path(run.name))
    return record is not None and record["settings"] == settings and record["trained"] == _trained(run)


def write_record(run: RunSummary, data: Path, settings: Mapping[str, Any], flop: float | None) -> None:
    """Writes the record of the translations of a run: settings, cost, scores. Raises OSError or ValueError."""
    texts = _texts(Path(run.name) / TRANSLATIONS, data, settings["gen_subset"])
    chosen = metrics.MetricSettings(target_lang=texts.target_lang)
    scores = metrics.score(texts.lines, [texts.references], METRICS, chosen)
    record = {"settings": settings, "trained": _trained(run), "data": str(data.absolute()), "flop": flop}
    scored = record | {"scores": list(map(plain, scores))}
    write_atomically(Path(run.name) / RECORD, json.dumps(scored, indent=1, ensure_ascii=False))


def read(run: RunSummary) -> RunTranslations | None:
    """Returns the translations of a finished run, or None if the run has no translations of its last model.

    Raises OSError or ValueError for a dataset that is missing or has several directions (language pairs), and for a
    wrong number of translations.
    """
    folder = Path(run.name)
    record = _record(folder)
    if record is not None:
        if record["trained"] != _trained(run):
            return None
        settings = {name: value for name, value in record["settings"].items() if value is not None}
        made_by = ", ".join(f"{name} {setting_text(value)}" for name, value in settings.items())
        facts = {"made_by": made_by, "flop": record["flop"], "by_sweep": True}
        return _texts(folder / TRANSLATIONS, Path(record["data"]), record["settings"]["gen_subset"], **facts)
    validations = [record for record in run.records if record["kind"] == "valid"]
    path = translations_file(folder, validations[-1]["update"]) if validations else folder
    if not path.is_file():
        return None
    subset, *_ = run.settings["valid_subset"]
    made_by = f"gen_subset {subset}, last validation, beam {run.settings['valid_beam']}"
    sentences = run.settings.get("valid_sentences")
    return _texts(path, Path(run.settings["data"]), subset, sentences, made_by=made_by)


def _texts(path: Path, data: Path, subset: str, sentences: int | None = None, **facts: Any) -> RunTranslations:
    """Reads translations of the first `sentences` pairs of a subset (None: all pairs) and the references.

    `facts` are other fields of the result.
    """
    texts = read_texts(data=data, subset=subset)
    if texts.directions:
        raise ValueError(f"{data} has many directions, but scores of runs can be compared for one direction only")
    references = texts.references[0][:sentences]
    lines = read_lines(path)
    if len(lines) != len(references):
        raise ValueError(f"{path} has {len(lines)} lines, and {subset} of {data} has {len(references)} references")
    assert texts.sources is not None
    sources = texts.sources[:sentences]
    return RunTranslations(lines=lines, references=references, sources=sources, target_lang=texts.target_lang, **facts)


def _record(folder: Path) -> dict[str, Any] | None:
    """Returns the record in the folder of a run, or None if the translations are missing or incomplete."""
    if not (folder / RECORD).is_file() or not (folder / TRANSLATIONS).is_file():
        return None
    record: dict[str, Any] = parse_json((folder / RECORD).read_text(encoding="utf-8"))
    return record


def _trained(run: RunSummary) -> list[int]:
    """Returns the last update in the log, and the time of its record. Further training changes both."""
    last: dict[str, Any] = next((record for record in reversed(run.records) if record["kind"] == "train"), {})
    return [last.get("update", 0), last.get("time", 0)]
