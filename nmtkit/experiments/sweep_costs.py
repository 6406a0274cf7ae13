"""The expected cost of the rows of a sweep, before anything is trained."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass

from nmtkit.experiments import tables
from nmtkit.experiments.comparison import row_name
from nmtkit.experiments.estimate import NAMED_GPU, NAMED_GPU_FLOPS, TYPICAL_SHARE
from nmtkit.experiments.sweep import Sweep, SweepRun

GPUS = 8  # number of GPUs of a usual machine


@dataclass(frozen=True, kw_only=True)
class RowCost:
    """The expected cost of a row: `runs` runs that differ only in the seed. `flop` is the cost of one run."""

    row: str
    runs: int
    parameters: int
    updates: int
    flop: float

    @property
    def gpu_hours(self) -> float:
        """Hours of one GPU for all runs, at the speed that large models reach in training."""
        return self.runs * self.flop / (NAMED_GPU_FLOPS * TYPICAL_SHARE) / 3600


def row_costs(sweep: Sweep, runs: Sequence[SweepRun]) -> list[RowCost]:
    """Returns the cost of each row of `runs`. Raises OSError, or ValueError if the number of updates is unknown."""
    by_row: dict[str, list[SweepRun]] = {}
    for run in runs:
        by_row.setdefault(row_name(run.name), []).append(run)
    costs = []
    for name, group in by_row.items():
        expected = sweep.cost(group[0])
        if expected.updates is None:
            raise ValueError(
                f"{sweep.file}, run {group[0].name}: the number of updates is unknown; give max_update in [run], or "
                "max_epoch and a dataset"
            )
        parameters, flop = sum(expected.parameters.values()), expected.updates * expected.flops
        costs.append(RowCost(row=name, runs=len(group), parameters=parameters, updates=expected.updates, flop=flop))
    return costs


def formatted(costs: Sequence[RowCost], format: str) -> str:
    """Returns the costs as text, TSV, CSV, LaTeX, Markdown or JSON. Text, LaTeX and Markdown end with the sum."""
    plain = [asdict(cost) | {"gpu": NAMED_GPU, "gpu_hours": cost.gpu_hours} for cost in costs]
    header = ["row", "runs", "M parameters", "updates", "FLOP of a run", "GPU-hours", f"hours on {GPUS} GPUs"]
    lines = [
        [cost.row, str(cost.runs), _millions(cost.parameters), f"{cost.updates:,}", f"{cost.flop:.2e}",
         _hours(cost.gpu_hours), _hours(cost.gpu_hours / GPUS)]
        for cost in costs
    ]  # fmt: skip
    runs, total = sum(cost.runs for cost in costs), sum(cost.gpu_hours for cost in costs)
    lines.append(["all rows", f"{runs:,}", "", "", "", _hours(total), _hours(total / GPUS)])
    note = (
        f"GPU-hours of all runs of a row on an {NAMED_GPU}, at a third of its {NAMED_GPU_FLOPS / 1e12:.0f} TFLOP/s in "
        "bf16. Small models, and few tokens per GPU, reach a lower speed; validations are not counted."
    )
    unrounded = [[*plain[0]], *([*row.values()] for row in plain)]
    return tables.formatted(format, header, lines, plain=plain, unrounded=lambda: unrounded, notes=[note])


def _hours(value: float) -> str:
    return f"{value:,.1f}" if value >= 0.95 else f"{value:.1g}"


def _millions(count: int) -> str:
    return f"{count / 1e6:.{1 if count >= 10_000_000 else 2}f}"
