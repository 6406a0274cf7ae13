#!/usr/bin/env python3
"""Prints our finished rows of Table 3 (means over seeds of the last validation, newstest2013) and the paper's rows.

nmtkit sweep table3.sweep.toml                 # trains all rows with three seeds
nmtkit sweep table3.sweep.toml --only 'base*'  # trains some rows
python table3.py                               # prints the runs in runs/table3
"""

import argparse
from pathlib import Path

from nmtkit.experiments.comparison import RunSummary, summarize
from nmtkit.experiments.inspection import parameters
from nmtkit.models.checkpoint import load

# Vaswani et al. 2017, Table 3: perplexity and BLEU on newstest2013, and millions of parameters if the paper has them.
PAPER = {
    "base": (4.92, 25.8, 65),
    "A_heads_1": (5.29, 24.9, None),
    "A_heads_4": (5.00, 25.5, None),
    "A_heads_16": (4.91, 25.8, None),
    "A_heads_32": (5.01, 25.4, None),
    "B_key_16": (5.16, 25.1, 58),
    "B_key_32": (5.01, 25.4, 60),
    "C_layers_2": (6.11, 23.7, 36),
    "C_layers_4": (5.19, 25.3, 50),
    "C_layers_8": (4.88, 25.5, 80),
    "C_width_256": (5.75, 24.5, 28),
    "C_width_1024": (4.66, 26.0, 168),
    "C_inner_1024": (5.12, 25.4, 53),
    "C_inner_4096": (4.75, 26.2, 90),
    "D_dropout_0.0": (5.77, 24.6, None),
    "D_dropout_0.2": (4.95, 25.5, None),
    "D_smoothing_0.0": (4.67, 25.3, None),
    "D_smoothing_0.2": (5.47, 25.7, None),
    "E_learned_positions": (4.92, 25.7, None),
    "big": (4.33, 26.4, 213),
}
SEEDS_FOR_A_FINDING = 3  # with fewer seeds of the base, a difference may be noise


def main() -> None:
    here = Path(__file__).parent
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="?", type=Path, default=here / "runs/table3", help="folder of the sweep")
    parser.add_argument("--no-paper", action="store_true", help="do not print the figures of the paper")
    arguments = parser.parse_args()
    print_table(arguments.runs, {} if arguments.no_paper else PAPER)


def in_order(rows) -> list[str]:
    known = list(PAPER)
    return sorted(rows, key=lambda row: (known.index(row) if row in known else len(known), row))


def print_table(folder: Path, paper: dict) -> None:
    """Prints each row: mean and half range over seeds, and a star if the mean is outside the range of the base."""
    found = [summarize(log.parent) for log in sorted(folder.glob("*/log.jsonl"))]
    results = [result_of(run) for run in found if run.state == "finished"]
    if not results:
        print(f"{folder} has no finished run")
        return
    base = [result for result in results if result["row"] == "base"]
    print(f"{'row':<20} {'updates':>8} {'M param.':>8} {'paper':>6} {'ppl':>14} {'paper':>6} {'BLEU':>14} {'paper':>6}")
    for row in in_order({result["row"] for result in results}):
        of_row = [result for result in results if result["row"] == row]
        ppl, bleu, size = paper.get(row, (None, None, None))
        print(
            f"{row:<20} {of_row[0]['updates']:>8,} {of_row[0]['parameters']:>8} {shown(size):>6}"
            f" {spread(of_row, 'ppl', 2) + mark(of_row, base, 'ppl'):>14} {shown(ppl):>6}"
            f" {spread(of_row, 'bleu', 1) + mark(of_row, base, 'bleu'):>14} {shown(bleu):>6}"
        )
    if len(base) >= SEEDS_FOR_A_FINDING:
        print(f"* the mean differs from the base by more than the {len(base)} seeds of the base from each other.")
    print("BLEU: sacreBLEU, beam 4, length penalty 0.6. Perplexity: per subword piece.")


def result_of(run: RunSummary) -> dict:
    last = Path(run.name) / "last.pt"
    size = f"{parameters(load(last, mmap=True)['model'])['all'] / 1e6:.1f}" if last.exists() else ""
    scores = {name: run.last[name].value for name in ("ppl", "bleu")}
    return {"row": Path(run.name).name.partition(",")[0], "updates": run.update, "parameters": size, **scores}


def mark(of_row: list[dict], base: list[dict], name: str) -> str:
    """Returns a star for a mean outside the range of the base. Returns an empty text if the base has too few seeds."""
    values = [result[name] for result in base]
    if len(values) < SEEDS_FOR_A_FINDING:
        return ""
    difference = abs(sum(result[name] for result in of_row) / len(of_row) - sum(values) / len(values))
    return " *" if difference > max(values) - min(values) else "  "


def spread(results: list[dict], name: str, digits: int) -> str:
    values = [result[name] for result in results]
    mean = f"{sum(values) / len(values):.{digits}f}"
    return mean if len(values) == 1 else f"{mean} ± {(max(values) - min(values)) / 2:.{digits}f}"


def shown(value: float | None) -> str:
    return "" if value is None else str(value)


if __name__ == "__main__":
    main()
