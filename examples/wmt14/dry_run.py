#!/usr/bin/env python3
"""Prints the cost of each config of Tables 2 and 3 beside the paper's figures. Trains nothing and needs no data.

    python dry_run.py                      # all of configs/ and table3/
    python dry_run.py table3/A_heads_1.toml

Vocabularies are 37,000 pieces, for English-French 32,000. `nmtkit train --config FILE --dry-run` says more of one.
"""

import argparse
from pathlib import Path

from table3 import PAPER, in_order

from nmtkit.architectures import Vocabulary
from nmtkit.training.config import JobTemplate
from nmtkit.training.estimate import Estimate, estimate
from nmtkit.training.plan import resolve

HERE = Path(__file__).parent
# Table 2, training cost: time x GPUs x 9.5 TFLOP/s. The matrix products alone, which we count, take less.
PAPER_FLOP = {"base": 3.3e18, "big": 2.3e19}
PAPER_PARAMETERS = {"base": 65, "big": 213}  # millions, at 37,000 pieces


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("configs", nargs="*", type=Path)
    paths = parser.parse_args().configs or all_configs()
    print(f"{'':<28} {'M parameters':>16} {'':>9} {'tokens a side':>18} {'FLOP of products':>18} {'FLOP by time':>12}")
    print(
        f"{'config':<28} {'here':>8} {'paper':>7} {'updates':>9} {'an update':>9} {'run':>8} "
        f"{'an update':>9} {'run':>8} {'paper':>12}"
    )
    for path in paths:
        print(row(path))


def all_configs() -> list[Path]:
    table3 = {path.stem: path for path in (HERE / "table3").glob("*.toml")}
    return sorted((HERE / "configs").glob("*.toml")) + [table3[name] for name in in_order(table3)]


def row(path: Path) -> str:
    expected = estimate_of(path)
    assert expected.updates is not None
    name = path.stem
    size = name.rsplit("-", 1)[-1]  # en-de-base to base
    parameters = PAPER[name][2] if name in PAPER else None if "-fr-" in name else PAPER_PARAMETERS.get(size)
    by_time = PAPER_FLOP.get(size)
    return (
        f"{path.parent.name + '/' + name:<28} {sum(expected.parameters.values()) / 1e6:>8.1f} {parameters or '':>7}"
        f" {expected.updates:>9,} {expected.tokens:>9,} {expected.tokens * expected.updates:>8.1e}"
        f" {expected.flops:>9.2e} {expected.flops * expected.updates:>8.1e}"
        f" {'' if by_time is None else f'{by_time:.1e}':>12}"
    )


def estimate_of(path: Path) -> Estimate:
    plan = resolve(JobTemplate.read(path).job({}), world_size=1)
    pieces = 32_000 if "-fr-" in path.stem else 37_000
    vocabulary = Vocabulary(source=pieces, target=pieces, joint=True)
    return estimate(plan, vocabulary)


if __name__ == "__main__":
    main()
