"""What a run will take, before it starts: parameters, arithmetic, memory, and from a few real updates the time."""

import time
from dataclasses import dataclass

import torch
from torch import nn

from nmtkit.architectures import ARCHITECTURES, Architecture, Vocabulary
from nmtkit.training.config import JobConfig

# What the paper takes a P100 to sustain, in its estimate of training cost (section 5 and table 2): 9.5 TFLOP/s
P100_FLOPS = 9.5e12
STATE_BYTES = {"adam": 8, "adamw": 8, "sgd": 4, "adafactor": 0}  # of optimizer state per parameter


def unallocated(job: JobConfig, vocabulary: Vocabulary) -> Architecture:
    """The model without memory for its parameters."""
    chosen = job.components["architecture"]
    with torch.device("meta"):
        return ARCHITECTURES[chosen.name].factory(chosen.config, vocabulary)


def parameters_by_part(model: nn.Module) -> dict[str, int]:
    """Parameters by the first part of their name, each counted where it comes first."""
    parts: dict[str, int] = {}
    for name, parameter in model.named_parameters():  # shared ones once
        part = name.split(".")[0]
        parts[part] = parts.get(part, 0) + parameter.numel()
    return parts


def meets_source(module_name: str) -> bool:
    """Whether a module sees source tokens: those of the encoder, and what a decoder layer makes of the memory."""
    parts = module_name.split(".")
    return parts[0].startswith(("encoder", "source")) or parts[-1] == "memory"


def forward_flops(model: nn.Module, source_tokens: int, target_tokens: int) -> int:
    """Multiplications and additions of the products with weights, by the tokens each weight meets; attention's own
    products, which depend on the lengths of sentences, are left out, as are look-ups in embeddings.

    For the Transformer: 2 (S (Ne (4 d^2 + 2 d f) + 2 Nd d^2) + T (Nd (6 d^2 + 2 d f) + d V)).
    """
    total = 0
    for name, module in model.named_modules():
        if not isinstance(module, nn.Embedding):
            weights = sum(weight.numel() for weight in module.parameters(recurse=False) if weight.dim() > 1)
            total += 2 * weights * (source_tokens if meets_source(name) else target_tokens)
    return total


def activation_bytes(model: nn.Module, tokens: int, bytes_each: int) -> int:
    """A rough guess: the inputs and outputs of every product of weights, the projection to the vocabulary left out."""
    numbers = 0
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and name != "output":
            numbers += module.in_features + module.out_features
    return numbers * tokens * bytes_each


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """Of one update, and of the run where its length is known."""

    parameters: dict[str, int]  # by part
    tokens: int  # of each side of an update
    flops: int  # of an update, forward and backward
    state_bytes: int  # weights, gradients, optimizer, of one process
    activation_bytes: int  # of one slice
    updates: int | None
    by_epochs: bool  # whether `updates` follows from those of an epoch, which differ a little
    updates_per_epoch: int | None

    def p100_hours(self) -> float | None:
        """Hours of one P100 by the paper's accounting, time x devices x sustained FLOP/s, solved for the time."""
        return None if self.updates is None else self.updates * self.flops / P100_FLOPS / 3600


def estimate(
    job: JobConfig,
    vocabulary: Vocabulary,
    batch_tokens: int,
    bytes_each: int,
    updates_per_epoch: int | None,
    processes: int = 1,
) -> Estimate:
    """`bytes_each`: of a number in an activation, 2 in bf16. The model is never allocated."""
    model = unallocated(job, vocabulary)
    parameters = parameters_by_part(model)
    count = sum(parameters.values())
    state = STATE_BYTES.get(job.components["optimizer"].name, 8)
    updates, by_epochs = job.run.max_update, False
    if updates_per_epoch and job.run.max_epoch:
        of_epochs = updates_per_epoch * job.run.max_epoch
        by_epochs = updates is None or of_epochs < updates
        updates = of_epochs if by_epochs else updates
    return Estimate(
        parameters=parameters,
        tokens=batch_tokens,
        flops=3 * forward_flops(model, batch_tokens, batch_tokens),
        state_bytes=count * (4 + 4 + state) // (processes if job.run.parallel == "fsdp" else 1),
        activation_bytes=activation_bytes(model, min(batch_tokens, job.run.max_tokens), bytes_each),
        updates=updates,
        by_epochs=by_epochs,
        updates_per_epoch=updates_per_epoch,
    )


def product_ceiling(device: torch.device, precision: str, seconds: float = 1.0) -> float:
    """FLOP/s that large matrix products reach on this device."""
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[precision]
    size = 8192 if device.type == "cuda" else 1024
    one, other = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    done, started = 0, 0.0
    one @ other
    while started == 0.0 or time.monotonic() - started < seconds:
        if started == 0.0:
            _finish(device)
            started = time.monotonic()
        one @ other
        done += 1
        _finish(device)
    return done * 2 * size**3 / (time.monotonic() - started)


def _finish(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def report(it: Estimate) -> list[str]:
    """Lines for people."""
    total = sum(it.parameters.values())
    lines = [f"{'parameters':<26}{total / 1e6:>10,.1f} M"]
    lines += [f"  {part:<24}{count / 1e6:>10,.1f} M" for part, count in it.parameters.items()]
    lines += [
        f"{'tokens of an update':<26}{it.tokens:>10,} of each side",
        f"{'FLOP of an update':<26}{it.flops / 1e12:>10,.2f} TFLOP (weights x tokens x 6)",
        f"{'memory':<26}{(it.state_bytes + it.activation_bytes) / 1e9:>10,.2f} GB a process, roughly",
        f"  {'weights and their state':<24}{it.state_bytes / 1e9:>10,.2f} GB",
        f"  {'activations of a slice':<24}{it.activation_bytes / 1e9:>10,.2f} GB",
    ]
    if it.updates_per_epoch is not None:
        lines.append(f"{'updates of an epoch':<26}{it.updates_per_epoch:>10,} about")
    hours = it.p100_hours()
    if it.updates is not None and hours is not None:
        lines += [
            f"{'updates':<26}{it.updates:>10,}{' about' if it.by_epochs else ''}",
            f"{'FLOP of the run':<26}{it.updates * it.flops:>10.2e}",
            f"{'by the paper’s accounting':<26}{hours:>10,.1f} hours of a P100 at 9.5 TFLOP/s",
        ]
    return lines
