#!/usr/bin/env python3
"""Prints the cost of each config of Tables 2 and 3 and the figures of the paper, without training and without data.

    python dry_run.py                      # all configs, and all rows of table3.sweep.toml
    python dry_run.py configs/en-de-base.toml

Vocabularies have 37,000 pieces, or 32,000 for English-French. `nmtkit train --config FILE --dry-run` says more about
one config.
"""

import argparse
from pathlib import Path

from table3 import PAPER

from nmtkit.experiments.estimate import Estimate, estimate
from nmtkit.experiments.sweep import read
from nmtkit.models.architectures import Vocabulary
from nmtkit.training.config import JobConfig
from nmtkit.training.plan import resolve

HERE = Path(__file__).parent
# Table 2, training cost: time x GPUs x 9.5 TFLOP/s. Matrix products alone, which this script counts, need fewer FLOP.
PAPER_FLOP = {"base": 3.3e18, "big": 2.3e19}
PAPER_PARAMETERS = {"base": 65, "big": 213}  # millions, at 37,000 pieces


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("configs", nargs="*", type=Path)
    paths = parser.parse_args().configs
    jobs = {f"{path.parent.name}/{path.stem}": JobConfig.read(path) for path in paths} or all_jobs()
    print(f"{'':<28} {'M parameters':>16} {'':>9} {'tokens a side':>18} {'FLOP of products':>18} {'FLOP by time':>12}")
    print(
        f"{'config':<28} {'here':>8} {'paper':>7} {'updates':>9} {'an update':>9} {'run':>8} "
        f"{'an update':>9} {'run':>8} {'paper':>12}"
    )
    for name, job in jobs.items():
        print(row(name, job))


def all_jobs() -> dict[str, JobConfig]:
    configs = {f"configs/{path.stem}": JobConfig.read(path) for path in sorted((HERE / "configs").iterdir())}
    sweep = read(HERE / "table3.sweep.toml")
    return configs | {f"table3/{name}": sweep.job(sweep.run({}, name)) for name in sweep.named}


def row(title: str, job: JobConfig) -> str:
    expected = estimate_of(title, job)
    assert expected.updates is not None
    name = title.rpartition("/")[2]
    size = name.rsplit("-", 1)[-1]  # en-de-base to base
    parameters = PAPER[name][2] if name in PAPER else None if "-fr-" in name else PAPER_PARAMETERS.get(size)
    by_time = PAPER_FLOP.get(size)
    return (
        f"{title:<28} {sum(expected.parameters.values()) / 1e6:>8.1f} {parameters or '':>7}"
        f" {expected.updates:>9,} {expected.tokens:>9,} {expected.tokens * expected.updates:>8.1e}"
        f" {expected.flops:>9.2e} {expected.flops * expected.updates:>8.1e}"
        f" {'' if by_time is None else f'{by_time:.1e}':>12}"
    )


def estimate_of(title: str, job: JobConfig) -> Estimate:
    plan = resolve(job, world_size=1)
    pieces = 32_000 if "-fr-" in title else 37_000
    vocabulary = Vocabulary(source=pieces, target=pieces, joint=True)
    return estimate(plan, vocabulary)


if __name__ == "__main__":
    main()
