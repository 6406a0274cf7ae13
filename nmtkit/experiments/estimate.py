"""The cost of a run before it starts: parameters, FLOP and memory of a fake model, and the time of some updates."""

import math
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException, FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

from nmtkit.config.files import checkpoint_of
from nmtkit.config.plugins import is_own
from nmtkit.data.dataset.binarized import Dataset
from nmtkit.data.packed import Layout, Packed
from nmtkit.jobs.progress import duration
from nmtkit.models import building
from nmtkit.models.architectures import ARCHITECTURES, Architecture, Vocabulary
from nmtkit.models.architectures.contract import check_forward
from nmtkit.models.layers.experts import Experts
from nmtkit.training import precision as precisions
from nmtkit.training.config import Component, JobConfig, architecture_of
from nmtkit.training.criterions import CRITERIONS, Criterion
from nmtkit.training.loader import Position
from nmtkit.training.memory import fit_max_tokens
from nmtkit.training.optimizers import state_bytes
from nmtkit.training.parallel import trainable_parameters
from nmtkit.training.parameters import choose_trained, embedding_names, parameter_groups
from nmtkit.training.plan import RunPlan, expected_world_size, resolve
from nmtkit.training.run_config import RunConfig
from nmtkit.training.setup import build_loader, build_trainer

# Training reaches this share of the speed of large matrix products. NVIDIA published 82,059 tokens/s for Transformer
# big on an A100, which is 105 TFLOP/s, a third of the peak in bf16.
TYPICAL_SHARE = 1 / 3
NAMED_GPU, NAMED_GPU_FLOPS = "NVIDIA A100", 312e12  # peak FLOP/s in bf16
SENTENCE_TOKENS = 32  # tokens of an average sentence, assumed if there is no dataset
SENTENCES = 16  # sentences of the fake batch
WARM_UP = 2  # updates before the clock starts


# --- FLOP and memory, counted with a fake model -----------------------------------------------------------------------


def fake_model(architecture: Component, vocabulary: Vocabulary, run: RunConfig) -> Architecture:
    """Returns a model with fake parameters, which have shapes but use no memory."""
    with FakeTensorMode(allow_non_fake_inputs=True):
        model = building.build(architecture.name, architecture.config, vocabulary)
        choose_trained(model, run)
    for module in model.modules():
        if isinstance(module, Experts):
            _route_in_turn(module)
    return model


def _route_in_turn(layer: Experts) -> None:
    """Assigns tokens to experts in turn, because fake logits have no values. Computes the gate, to count its FLOP."""
    groups, active = layer.config.expert_groups, layer.config.active_experts
    active = active**2 if groups else active

    def gates(x: Tensor) -> tuple[Tensor, Tensor]:
        layer.logits(x, layer.gate, layer.noise)
        if groups:
            layer.logits(x, layer.group_gate, layer.group_noise)
        indices = torch.arange(len(x) * active).view(len(x), active) % layer.gate.shape[1]
        return x.new_ones(len(x), active), indices

    layer.gates = gates  # type: ignore[method-assign]


def parameters_by_part(model: nn.Module) -> Counter[str]:
    """Returns the number of parameters of each part of the model. Shared parameters count once.

    A part is the first component of parameter names, such as "encoder".
    """
    parts = Counter[str]()
    for name, parameter in model.named_parameters():
        parts[name.split(".")[0]] += parameter.numel()
    return parts


def _linear_flops(x: Sequence[int], weight: Sequence[int], *_: object, out_shape: object = None) -> int:
    return 2 * math.prod(x) * weight[0]


FUSED_PRODUCTS = {torch.ops.mkldnn._linear_pointwise: _linear_flops}  # products that FlopCounterMode does not count


def cost_of_token(
    model: Architecture, sentence_tokens: int, precision: str, encoder_only: bool = False
) -> tuple[float, float]:
    """Returns the FLOP of the forward pass and the bytes saved for the backward pass, for one token on each side.

    With `encoder_only`, both numbers are without the decoder and the output projection. `model` must come from
    `fake_model`. Each sentence has `sentence_tokens` tokens. The FLOP include all matrix products, also in attention.
    The bytes include all tensors that autograd saves, except parameters and logits. Logits are left out because the
    loss computes them in blocks. Raises ValueError if the forward pass depends on values, because fake tensors have no
    values.
    """
    layout = Layout.of(torch.full((SENTENCES,), sentence_tokens))
    batch = Packed(torch.zeros(layout.tokens, dtype=torch.int64), layout)
    parameters = {parameter.untyped_storage()._cdata for parameter in model.parameters()}
    saved: dict[int, int] = {}

    def note(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in parameters:
            saved[storage._cdata] = storage.nbytes()
        alive.append(tensor)  # keeps storages alive, because the address of a freed storage could occur again
        return tensor

    alive: list[Tensor] = []
    model.train()
    try:
        with (
            FlopCounterMode(display=False, custom_mapping=FUSED_PRODUCTS) as counter,
            precisions.autocast(precision, torch.device("cpu")),
        ):
            with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
                output = model.encode(batch) if encoder_only else model(batch, batch)
            if not encoder_only:
                model.output_projection(output)
    except (DataDependentOutputException, DynamicOutputShapeException) as error:
        raise ValueError(
            f"the cost of {type(model).__name__} cannot be estimated: its forward pass depends on values of tensors"
        ) from error
    return counter.get_total_flops() / layout.tokens, sum(saved.values()) / layout.tokens


# --- the estimate -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """The cost of one update, and of the run if its length is known."""

    parameters: dict[str, int]  # number of parameters of each part of the model
    tokens: int  # tokens of each side of an update
    flops: float  # FLOP of an update, over all processes, with all passes of the criterion and of --teacher
    state_bytes: int  # weights, gradients, optimizer state and averages of one process, and the weights of --teacher
    activation_bytes: float  # activations of one micro-batch
    updates: int | None
    by_epochs: bool  # whether `updates` is estimated from --max-epoch
    updates_per_epoch: int | None
    world_size: int


def check_plugin(job: JobConfig, vocabulary: Vocabulary) -> list[str]:
    """Checks the forward pass if the architecture is from a plug-in. Returns a line about the check, or no lines.

    Raises ContractError if, for example, the forward pass reads later target words.
    """
    architecture = job.components["architecture"]
    if is_own(ARCHITECTURES[architecture.name].factory):
        return []
    check_forward(building.build(architecture.name, architecture.config, vocabulary), vocabulary)
    return [
        f"{'forward pass':<26}{'checked':>10}: shapes are right; no later target words and no other sentences are read"
    ]


def estimate(
    plan: RunPlan, vocabulary: Vocabulary, updates_per_epoch: int | None = None, sentence_tokens: int = SENTENCE_TOKENS
) -> Estimate:
    """Returns the cost of a planned run. The function allocates no memory for the parameters of the model."""
    model = fake_model(plan.job.components["architecture"], vocabulary, plan.job.run)
    criterion = plan.job.components["criterion"]
    paths = getattr(criterion.config, "teacher", ())
    teachers = [fake_model(architecture_of(checkpoint_of(path)), vocabulary, RunConfig()) for path in paths]
    parameters = parameters_by_part(model)
    flops, activation_bytes = cost_of_token(model, sentence_tokens, plan.precision)
    trained = trainable_parameters(model)
    optimizer = plan.job.components["optimizer"]
    groups = parameter_groups(trained, (), embedding_names(model))
    optimizer_bytes = state_bytes(optimizer.name, optimizer.config, groups)
    gradient_bytes = 4 * sum(parameter.numel() for parameter in trained.values())
    average_bytes = gradient_bytes if plan.job.run.ema_decay else 0
    shares = plan.world_size if plan.job.run.parallel == "fsdp" else 1
    updates, by_epochs = plan.updates(updates_per_epoch)
    factory = CRITERIONS[criterion.name].factory
    passes = getattr(factory, "passes", 1.0)
    # the backward pass has two products for each forward product; teachers have no backward pass
    flops_of_token = 3 * passes * flops + sum(cost_of_token(it, sentence_tokens, plan.precision)[0] for it in teachers)
    saved_bytes = passes * activation_bytes
    if candidates := getattr(factory, "searched_candidates", Criterion.searched_candidates)(criterion.config):
        encoder_flops, encoder_bytes = cost_of_token(model, sentence_tokens, plan.precision, encoder_only=True)
        # search: encoder once, decoder once for each candidate; training: 3 passes of the decoder for each candidate
        flops_of_token += encoder_flops + candidates * (1 + 3) * (flops - encoder_flops)
        saved_bytes += candidates * (activation_bytes - encoder_bytes)
    teacher_bytes = 4 * sum(parameters_by_part(teacher).total() for teacher in teachers)
    return Estimate(
        parameters=parameters,
        tokens=plan.batch_tokens,
        flops=flops_of_token * plan.batch_tokens,
        state_bytes=(4 * parameters.total() + gradient_bytes + average_bytes + optimizer_bytes) // shares
        + teacher_bytes,
        activation_bytes=saved_bytes * plan.max_tokens,
        updates=updates,
        by_epochs=by_epochs,
        updates_per_epoch=updates_per_epoch,
        world_size=plan.world_size,
    )


def report(expected: Estimate) -> list[str]:
    total = sum(expected.parameters.values())
    memory = expected.state_bytes + expected.activation_bytes
    lines = [f"{'parameters':<26}{total / 1e6:>10,.1f} M"]
    lines += [f"  {part:<24}{count / 1e6:>10,.1f} M" for part, count in expected.parameters.items()]
    lines += [
        f"{'processes':<26}{expected.world_size:>10,}",
        f"{'tokens of an update':<26}{expected.tokens:>10,} of each side",
        f"{'FLOP of an update':<26}{expected.flops / 1e12:>10,.2f} TFLOP of products, forward and backward",
        f"{'memory':<26}{memory / 1e9:>10,.2f} GB per process, roughly",
        f"  {'weights and their state':<24}{expected.state_bytes / 1e9:>10,.2f} GB",
        f"  {'activations':<24}{expected.activation_bytes / 1e9:>10,.2f} GB of a micro-batch",
    ]
    if expected.updates_per_epoch is not None:
        lines.append(f"{'updates of an epoch':<26}{expected.updates_per_epoch:>10,} about")
    if expected.updates is not None:
        lines += [
            f"{'updates':<26}{expected.updates:>10,}{' about' if expected.by_epochs else ''}",
            f"{'FLOP of the run':<26}{expected.updates * expected.flops:>10.2e}",
        ]
    return lines


def times(expected: Estimate, plan: RunPlan) -> list[str]:
    """Returns lines with the expected time of the run on the device of this machine, and on a common GPU.

    Returns no lines if the number of updates is unknown.
    """

    def time_on(name: str, flops: float) -> list[str]:
        if expected.updates is None:
            return []
        time_text = duration(expected.updates * expected.flops / (flops * TYPICAL_SHARE))
        return [f"{f'time on {name}':<26}{time_text:>10} about, at a third of {flops / 1e12:,.3g} TFLOP/s"]

    lines = time_on(f"one {NAMED_GPU}", NAMED_GPU_FLOPS)
    if lines and (plan.device.type == "cpu" or torch.cuda.is_available()):
        plan.configure_torch()
        name = torch.cuda.get_device_name(plan.device) if plan.device.type == "cuda" else "this CPU"
        here = time_on(name, product_ceiling(plan.device, plan.precision, seconds=0.2))
        lines = [*here, "  measure this time with --dry-run-updates 20", *lines]
    return lines


# --- the dry run ------------------------------------------------------------------------------------------------------


def dry_run(job: JobConfig, data: Path | None, vocabulary_size: int | None, updates: int) -> list[str]:
    """Returns the estimated cost of `job` as lines of text. Also makes and times `updates` updates (0: none).

    Without `data`, the estimate assumes a joint vocabulary of `vocabulary_size`, and no update can be timed. Raises
    ValueError if `data` and `vocabulary_size` are both missing.
    """
    plan = resolve(job, expected_world_size(job.run), estimate=not updates)
    if data is None and vocabulary_size is None:
        raise ValueError("--dry-run needs a dataset, or --vocab-size")
    if data is None and updates:
        raise ValueError("--dry-run-updates makes real updates and needs a dataset")
    dataset = None if data is None else Dataset.open(data)
    vocabulary, expected = _estimated(plan, dataset, vocabulary_size)
    lines = report(expected) + check_plugin(job, vocabulary)
    if dataset is None or not updates:
        return lines + times(expected, plan)
    return lines + _timed(plan, dataset, updates, expected)


def cost_of(job: JobConfig, data: Path | None, vocabulary_size: int | None) -> Estimate:
    """Returns the cost of a job on the dataset `data`, or else with a joint vocabulary of `vocabulary_size`."""
    plan = resolve(job, expected_world_size(job.run), estimate=True)
    return _estimated(plan, None if data is None else Dataset.open(data), vocabulary_size)[1]


def _estimated(plan: RunPlan, dataset: Dataset | None, vocabulary_size: int | None) -> tuple[Vocabulary, Estimate]:
    """Returns the vocabulary and the cost of a planned run on a dataset.

    The estimate assumes that each sentence has the mean number of tokens of the first training pairs, on the side where
    this mean is larger. Without a dataset, the vocabulary is joint and has `vocabulary_size` pieces.
    """
    if dataset is None:
        assert vocabulary_size is not None
        vocabulary = Vocabulary(source=vocabulary_size, target=vocabulary_size, joint=True)
        return vocabulary, estimate(plan, vocabulary)
    vocabulary, split = building.vocabulary_of(dataset.tokenizer), dataset["train"]
    sides = (split.source.lengths[:100_000], split.target.lengths[:100_000])
    tokens = max(1, *(round(float(np.mean(side))) for side in sides if len(side)))
    return vocabulary, estimate(plan, vocabulary, plan.sampler(split).updates_per_epoch, tokens)


def _timed(plan: RunPlan, dataset: Dataset, updates: int, expected: Estimate) -> list[str]:
    """Makes updates in this process and returns lines about their speed and the peak speed of the device."""
    plan.configure_torch()
    device = plan.device
    trainer = build_trainer(plan.job, dataset.tokenizer, device, updates=expected.updates)
    loader = build_loader(plan, dataset, 0, 1)
    if plan.fits_max_tokens:
        fit_max_tokens(trainer, loader)
    source = target = 0
    started = time.monotonic()
    for number, update in enumerate(loader.updates(Position(0, 0))):
        if number == WARM_UP:
            _synchronize(device)
            started, source, target = time.monotonic(), 0, 0
        if number == WARM_UP + updates:
            break
        trainer.step(update)
        source, target = source + update.source_tokens, target + update.target_tokens
    _synchronize(device)
    seconds = time.monotonic() - started
    loader.close()
    rate = expected.flops / expected.tokens * (source + target) / 2 / seconds
    ceiling = product_ceiling(device, plan.precision)
    lines = [
        f"{f'timed over {updates} updates':<26}{target / seconds:>10,.0f} target tokens/s of one process",
        f"{'speed':<26}{rate / 1e12:>10,.3f} TFLOP/s",
        f"{'speed of large products':<26}{ceiling / 1e12:>10,.3f} TFLOP/s in {plan.precision}",
        f"{'share of this speed':<26}{rate / ceiling:>10.0%}",
    ]
    if device.type == "cuda":
        lines.append(f"{'peak memory':<26}{torch.cuda.max_memory_allocated(device) / 1e9:>10,.2f} GB")
    if expected.updates is not None:
        whole = expected.updates * seconds / updates
        ranks = expected.world_size
        shared = f"; {duration(whole / ranks)} on {ranks} devices, without communication" if ranks > 1 else ""
        lines += [
            f"{'time to finish':<26}{duration(whole):>10} on one device: {whole / 3600:,.1f} device hours{shared}",
            f"{'FLOP at full speed':<26}{whole * ceiling:>10.2e} time x speed of products, as in Vaswani et al. 2017",
        ]
    return lines


def product_ceiling(device: torch.device, precision: str, seconds: float = 1.0) -> float:
    """Measures the FLOP/s of large matrix products on a device for `seconds` seconds."""
    size = 8192 if device.type == "cuda" else 1024
    dtype = precisions.DTYPES[precision]
    left, right = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    left @ right
    _synchronize(device)
    products, started = 0, time.monotonic()
    while time.monotonic() - started < seconds:
        left @ right
        _synchronize(device)
        products += 1
    return products * 2 * size**3 / (time.monotonic() - started)


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
