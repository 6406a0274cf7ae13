"""Prints a Markdown table of the runs of run.sh: scores on both valid sets, and the number of trained parameters.

python table.py runs
"""

import itertools
import json
import sys
from pathlib import Path
from typing import Any

from nmtkit.data import checkpoint_file
from nmtkit.models import checkpoint

WAYS = {
    "general": "the general model",
    "full": "all weights",
    "frozen": "embeddings frozen",
    "adapters": "adapters of rank 8",
    "mixed": "all weights, general text mixed in",
}


def records(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "log.jsonl").read_text(encoding="utf-8").split("\n") if line]


def trained(folder: Path, name: str) -> int:
    """Returns the number of parameters that a run trained: all parameters of its checkpoint but frozen embeddings."""
    model = checkpoint_file.read(folder / "last.pt")["model"]
    own = [key for key, first in checkpoint.tied_to(model).items() if key == first]
    return sum(model[key].numel() for key in own if not (name == "frozen" and "_embedding." in key))


def minutes_of(log: list[dict[str, Any]]) -> float:
    """Returns the minutes of a run, without the time between a stop and the resume that follows."""
    pauses = [after["time"] - it["time"] for it, after in itertools.pairwise(log) if after["kind"] == "resume"]
    return (log[-1]["time"] - log[0]["time"] - sum(pauses)) / 60


def main(runs: Path) -> None:
    print("| | domain BLEU | domain loss | general BLEU | general loss | parameters trained | minutes |")
    print("|---|--:|--:|--:|--:|--:|--:|")
    before: dict[str, float] = {}
    for name, title in WAYS.items():
        log = records(runs / name)
        last = [record for record in log if record["kind"] == "valid"][-1]
        scores = {key: last[key] for key in ("bleu", "loss", "bleu@valid1", "loss@valid1")}
        before = before or scores
        cells = []
        for key, value in scores.items():
            digits = 1 if key.startswith("bleu") else 2
            change = "" if name == "general" else f" ({value - before[key]:+.{digits}f})"
            cells.append(f"{value:.{digits}f}{change}")
        print(f"| {title} | {' | '.join(cells)} | {trained(runs / name, name):,} | {minutes_of(log):.1f} |")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
