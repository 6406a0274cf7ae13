#!/usr/bin/env python3
"""Trains any rows of Table 3, scores them on the valid set (newstest2013) and prints them beside the paper's.

    python table3.py base A_heads_1 --data data-bin/en-de --runs runs/table3
    python table3.py                # all rows, in the order of the table
    python table3.py base --seeds 1 2 3

A row that is done is not trained again, an interrupted one resumes, and --print-only prints the table of the rows that
are done. Flags after `--` are passed to `nmtkit train`: -- --max-tokens 12800, say. --configs FOLDER names another set
of rows, such as a small one for other data; a row is a TOML file in it.
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path

# Vaswani et al. 2017, Table 3: perplexity and BLEU on newstest2013, millions of parameters where the paper gives them.
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
SEEDS_FOR_A_FINDING = 3  # of the base; with fewer, a difference may be noise
NMTKIT = [sys.executable, "-m", "nmtkit"]


def main() -> None:
    here = Path(__file__).parent
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rows", nargs="*", help="names of TOML files in --configs; all when there is none")
    parser.add_argument("--data", type=Path, default=Path("data-bin/en-de"), help="dataset made by prepare.sh")
    parser.add_argument("--runs", type=Path, default=Path("runs/table3"), help="folder for the rows' runs")
    parser.add_argument("--configs", type=Path, default=here / "table3", help="folder of the rows' TOML files")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1])
    parser.add_argument("--print-only", action="store_true")
    own, extra = split_at_dashes(sys.argv[1:])
    arguments = parser.parse_args(own)
    rows = arguments.rows or in_order(path.stem for path in arguments.configs.glob("*.toml"))
    missing = [row for row in rows if not (arguments.configs / f"{row}.toml").is_file()]
    if missing:
        parser.error(f"no row {missing[0]} in {arguments.configs}")
    if not arguments.print_only:
        for row in rows:
            for seed in arguments.seeds:
                make(row, seed, arguments.configs, arguments.data, arguments.runs, extra)
    print_table(arguments.runs, PAPER if arguments.configs == here / "table3" else {})


def split_at_dashes(arguments: list[str]) -> tuple[list[str], list[str]]:
    at = arguments.index("--") if "--" in arguments else len(arguments)
    return arguments[:at], arguments[at + 1 :]


def in_order(rows) -> list[str]:
    known = list(PAPER)
    return sorted(rows, key=lambda row: (known.index(row) if row in known else len(known), row))


def run(*command: str, capture: bool = False) -> str:
    """Runs an nmtkit command. Ends this script when the command fails or was asked to stop."""
    done = subprocess.run([*NMTKIT, *command], stdout=subprocess.PIPE if capture else None, text=True)
    if done.returncode:
        sys.exit(done.returncode)
    return done.stdout or ""


def make(row: str, seed: int, configs: Path, data: Path, runs: Path, extra: list[str]) -> None:
    """Trains and scores one row, or resumes it; writes result.json into its folder."""
    folder = runs / f"{row}-seed{seed}"
    result = folder / "result.json"
    if result.is_file():
        return
    folder.mkdir(parents=True, exist_ok=True)
    print(f"--- {row}, seed {seed}", file=sys.stderr, flush=True)
    train = ["--config", str(configs / f"{row}.toml"), "--save-dir", str(folder / "run"), "--seed", str(seed), *extra]
    run("train", str(data), *train)
    last = folder / "run" / "last.pt"
    log = [json.loads(line) for line in (folder / "run" / "log.jsonl").read_text().splitlines()]
    records = [record for record in log if record["kind"] == "valid"]
    updates = last.resolve().stem.removeprefix("update_").lstrip("0")
    started = next(record["config"] for record in log if record["kind"] in ("start", "resume"))
    if updates != str(started["run"]["max_update"]):
        sys.exit(f"{row} stopped after {updates} updates; run this again to resume")
    search = ["--gen-subset", "valid", "--path", str(last), "--beam", "4", "--lenpen", "0.6"]
    translations = folder / "valid.txt"
    translations.write_text(run("generate", str(data), *search, capture=True))
    scoring = ["--data", str(data), "--gen-subset", "valid", "--sys", str(translations), "--metric", "bleu"]
    scores = json.loads(run("score", *scoring, "--format", "json", capture=True))
    summary = {
        "row": row,
        "seed": seed,
        "updates": int(updates),
        "parameters": parameters(last),
        "ppl": records[-1]["ppl"],
        "bleu": scores[0]["score"],
        "signature": scores[0]["signature"],
    }
    result.write_text(json.dumps(summary, indent=2))


def parameters(checkpoint: Path) -> int:
    from nmtkit.architectures.interface import parameter_count
    from nmtkit.models import from_checkpoint

    return parameter_count(from_checkpoint(checkpoint)[0])


def print_table(runs: Path, paper: dict) -> None:
    """Prints a line for each row: several seeds as mean and half range, and a star beyond the range of the base."""
    results = [json.loads(path.read_text()) for path in runs.glob("*/result.json")]
    if not results:
        print(f"nothing is done in {runs}")
        return
    base = [result for result in results if result["row"] == "base"]
    print(f"{'row':<20} {'updates':>8} {'M param.':>8} {'paper':>6} {'ppl':>14} {'paper':>6} {'BLEU':>14} {'paper':>6}")
    for row in in_order({result["row"] for result in results}):
        of_row = [result for result in results if result["row"] == row]
        ppl, bleu, size = paper.get(row, (None, None, None))
        print(
            f"{row:<20} {of_row[0]['updates']:>8,} {of_row[0]['parameters'] / 1e6:>8.1f} {shown(size):>6}"
            f" {spread(of_row, 'ppl', 2) + mark(of_row, base, 'ppl'):>14} {shown(ppl):>6}"
            f" {spread(of_row, 'bleu', 1) + mark(of_row, base, 'bleu'):>14} {shown(bleu):>6}"
        )
    if len(base) >= SEEDS_FOR_A_FINDING:
        print(f"* is farther from the mean of the base than its {len(base)} seeds are from each other.")
    print(f"BLEU: {results[0]['signature']}; perplexity is per piece.")


def mark(of_row: list[dict], base: list[dict], name: str) -> str:
    """Returns a star for a mean beyond the range of the base's seeds, and nothing while these are too few to tell."""
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
