"""Gain of each of the CPU's fast paths in a whole update: each is switched off in turn, with the others on.

    nmtkit preprocess … --vocab-size 10000 --destdir data-bin
    python benchmarks/train_ablation.py data-bin --arch transformer_base

An update is forward, backward, clipping and a step of fused Adam, on one thread; the same updates are timed in turn by
every variant, in CPU seconds, and the best time of each counts. Prints the seconds, and their ratio to an update with
all fast paths.
"""

import argparse
import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from train_speed import SMOOTHING, chosen_batches, fresh

from nmtkit import models
from nmtkit.architectures import ARCHITECTURES
from nmtkit.config import derive
from nmtkit.data.binarized import Dataset
from nmtkit.layers.dropout import dropout
from nmtkit.layers.losses import output_cross_entropy
from nmtkit.layers.packed import Batch

Loss = Callable[[nn.Module, Tensor, Tensor], Tensor]


def fused_loss(output: nn.Module, features: Tensor, target: Tensor) -> Tensor:
    return output_cross_entropy(output, features, target, SMOOTHING)[0]


def torch_loss(output: nn.Module, features: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output(features).float(), target, label_smoothing=SMOOTHING, reduction="sum")


@dataclass
class Variant:
    name: str
    patches: dict[str, Any] = field(default_factory=dict)
    loss: Loss = fused_loss
    dtype: torch.dtype | None = torch.bfloat16
    seconds: dict[int, list[float]] = field(default_factory=dict)  # by number of the batch

    @contextlib.contextmanager
    def patched(self) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            for name, value in self.patches.items():
                stack.enter_context(patch(name, value))
            yield


def never(*_: object) -> bool:
    return False


def sdpa(*_: object, **__: object) -> str:
    return "sdpa"


def separate_nodes(x: Tensor, change: Tensor, norm: nn.LayerNorm, p: float) -> Tensor:
    return norm(x + dropout(change, p))


RESIDUAL, DROPOUT = "nmtkit.architectures.transformer.add_and_norm", "nmtkit.layers.dropout.takes_noise"
VARIANTS = (
    Variant("all fast paths"),
    Variant("sum, dropout and norm as torch's own nodes", {RESIDUAL: separate_nodes}),
    Variant("these, and dropout by F.dropout", {DROPOUT: never}),
    Variant("loss by F.cross_entropy on all logits", loss=torch_loss),
    Variant("attention by padding and SDPA", {"nmtkit.layers.attention.backend": sdpa}),
    Variant("fp32", dtype=None),
)


class Model:
    """A model and its optimizer."""

    def __init__(self, arch: str, dataset: Dataset, dropout: float) -> None:
        torch.manual_seed(0)
        config = derive(ARCHITECTURES[arch].preset, {"dropout": dropout}, arch)
        self.model = models.build(arch, config, models.vocabulary_of(dataset.tokenizer)).train()
        options: dict[str, Any] = {"lr": 1e-4, "betas": (0.9, 0.98), "eps": 1e-9, "fused": True}
        self.optimizer = torch.optim.Adam(self.model.parameters(), **options)

    def update(self, batch: Batch, variant: Variant) -> float:
        """Returns the CPU seconds of one update."""
        batch = fresh(batch)
        start = time.process_time()
        with torch.autocast("cpu", variant.dtype, enabled=variant.dtype is not None):
            features = self.model(batch.source, batch.target_input)
            loss = variant.loss(self.model.output_projection, features, batch.target_output)
        (loss / batch.target_tokens).backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return time.process_time() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path, help="a dataset that nmtkit preprocess wrote")
    parser.add_argument("--arch", default="transformer_base", help="any preset of the Transformer")
    parser.add_argument("--batch-tokens", type=int, default=4096)
    parser.add_argument("--batches", type=int, default=1, help="updates to time")
    parser.add_argument("--repeats", type=int, default=3, help="times each is timed")
    parser.add_argument("--dropout", type=float, default=0.1)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    dataset = Dataset.open(arguments.data)
    batches = chosen_batches(dataset, arguments.batch_tokens, arguments.batches)
    model = Model(arguments.arch, dataset, arguments.dropout)
    model.update(batches[0], VARIANTS[0])  # the first update allocates and plans
    for repeat in range(arguments.repeats):
        for number, batch in enumerate(batches):
            for variant in VARIANTS if repeat % 2 else VARIANTS[::-1]:
                with variant.patched():
                    variant.seconds.setdefault(number, []).append(model.update(batch, variant))
    report(arguments, batches)


def report(arguments: argparse.Namespace, batches: list[Batch]) -> None:
    tokens = sum(batch.target_tokens for batch in batches)
    print(f"{arguments.arch}, {len(batches)} updates, {tokens} target tokens, one thread, torch {torch.__version__}")
    best = {variant.name: sum(min(times) for times in variant.seconds.values()) for variant in VARIANTS}
    for name, seconds in best.items():
        print(f"{name:45}{seconds / len(batches):>8.3f} CPU s an update{seconds / best[VARIANTS[0].name]:>8.2f} x")


if __name__ == "__main__":
    main()
