"""Steps on a fake GPU: functions with plain arguments, which the tests call in a separate process."""

from typing import Any
from unittest import mock

import numpy as np
import torch
from builders import TINY_CONFIGS, tiny_model, tiny_tokenizer
from fake_gpu import StepRules, fake_gpu, on_host
from torch.utils._python_dispatch import TorchDispatchMode

from nmtkit.data.packed import Batch, Layout, Packed
from nmtkit.models.architectures import Architecture
from nmtkit.models.layers import logsumexp_gpu, residual_gpu
from nmtkit.models.layers.static_kv_cache import CacheLengths
from nmtkit.training import precision as precisions
from nmtkit.training.config import REGISTRIES, JobConfig
from nmtkit.training.criterions import CRITERIONS, Criterion
from nmtkit.training.loader import Position, Update
from nmtkit.training.setup import build_trainer
from nmtkit.training.trainer import Trainer
from nmtkit.translation.search.gpu_beam_search import GraphBeamSearch
from nmtkit.translation.search.options import SearchOptions
from nmtkit.translation.translator import Translator

DEVICE = torch.device("cuda", 0)
VOCABULARY = 200
SENTENCES, LONGEST, SOURCE, TARGET = 3, 4, 9, 10  # of a micro-batch; the last two in tokens


def ids(*shape: int) -> torch.Tensor:
    return torch.empty(shape, dtype=torch.int64, device=DEVICE)


def packed(tokens: int) -> Packed:
    layout = Layout(ids(SENTENCES), LONGEST, tokens)
    # the lengths that a batch of the loader knows on the host
    layout.derived("host_lengths", lambda: [LONGEST, LONGEST - 1, tokens - 2 * LONGEST + 1])
    return Packed(ids(tokens), layout)


def micro_batch() -> Batch:
    return Batch(packed(SOURCE), packed(TARGET), ids(TARGET), TARGET, torch.empty(SENTENCES, dtype=torch.int64))


def model_on_gpu(architecture: str, dtype: str = "float32", **config: Any) -> Architecture:
    return tiny_model(architecture, VOCABULARY, **config).to(DEVICE, getattr(torch, dtype))


def criterion_of(name: str) -> Criterion:
    entry = CRITERIONS[name]
    return entry.factory(entry.preset, on_host(tiny_tokenizer)())


def forward_and_backward(architecture: str, precision: str, config: dict[str, Any]) -> None:
    with fake_gpu():
        model, batch = model_on_gpu(architecture, **config).train(), micro_batch()
        criterion = criterion_of("label_smoothed_cross_entropy")
        with StepRules():
            with precisions.autocast(precision, DEVICE):
                loss = criterion(model, batch)
            loss.sum.backward()
        for name, parameter in model.named_parameters():
            assert parameter.grad is not None and parameter.grad.is_cuda, name


def validation(architecture: str, criterion: str, precision: str) -> None:
    with fake_gpu():
        model, batch = model_on_gpu(architecture).eval(), micro_batch()
        loss_of = criterion_of(criterion).eval()
        with StepRules(), torch.no_grad(), precisions.autocast(precision, DEVICE):
            loss = loss_of(model, batch)
        assert not loss.sum.requires_grad and loss.counts["nll"].is_cuda


def trainer(architecture: str, settings: dict[str, Any]) -> Trainer:
    names = {table: settings[table] for table in REGISTRIES if table in settings}
    flags = {"batch_tokens": 400, "device": "cuda"} | TINY_CONFIGS[architecture] | settings
    settings = {name: value for name, value in flags.items() if name not in names}
    job = JobConfig.read(names={"architecture": architecture} | names, settings=settings)
    trainer = build_trainer(job, on_host(tiny_tokenizer)(), DEVICE)
    trainer.model.begin_update = on_host(trainer.model.begin_update)  # type: ignore[method-assign]  # a CPU generator
    return trainer


def updates(architecture: str, settings: dict[str, Any], count: int = 2) -> None:
    """Makes updates of two micro-batches each. The second update uses the optimizer state of the first update."""
    with fake_gpu():
        of_run = trainer(architecture, settings)
        tokens = 2 * TARGET
        for index in range(count):
            batches = [(number, micro_batch()) for number in range(2)]
            update = Update(Position(0, index), np.arange(2 * SENTENCES), tokens, tokens, batches, False)
            with StepRules():
                metrics = of_run.step(update)
        assert of_run.done == count
        assert metrics.norm.is_cuda and metrics.finite.is_cuda and metrics.sums["loss"].is_cuda


def static_step(architecture: str, dtype: str, config: dict[str, Any]) -> None:
    with fake_gpu(), torch.inference_mode():
        model = model_on_gpu(architecture, dtype, **config)
        state, lengths = model.static_start(4, 2, 32, 32), CacheLengths(16, 16)
        source = packed(SOURCE)
        slots, tokens, positions, rows = ids(SENTENCES), ids(8), ids(4), ids(4, 2)
        with StepRules():
            state.insert(slots, model.encode(source))
            logits = model.static_step(tokens, positions, state, lengths)
            state.reorder(rows, lengths)
        assert (logits.dtype, tuple(logits.shape)) == (torch.float32, (8, VOCABULARY))


class Arguments(TorchDispatchMode):
    """Records the names and arguments of all operations."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[str, list[torch.Tensor]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls.append((func.overloadpacket.__name__, [x for x in args if isinstance(x, torch.Tensor)]))
        return func(*args, **(kwargs or {}))


class Halving(torch.nn.Module):
    """An output projection without a weight."""

    def __init__(self, projection: torch.nn.Linear) -> None:
        super().__init__()
        self.inner = projection

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x) / 2


def static_logits(projection: str) -> tuple[list[str], str]:
    """Returns the operations that read the output bias in a static step in bf16, and the dtype of the logits.

    `projection` is "linear", "hook" (a forward hook replaces the logits by their erf) or "module".
    """
    with fake_gpu(), torch.inference_mode():
        model = model_on_gpu("transformer_tiny", "bfloat16", output_bias=True)
        bias = model.output_projection.bias
        if projection == "hook":
            model.output_projection.register_forward_hook(lambda module, inputs, output: torch.erf(output))
        elif projection == "module":
            model.output_projection = Halving(model.output_projection)
        state = model.static_start(4, 2, 32, 32)
        state.insert(ids(SENTENCES), model.encode(packed(SOURCE)))
        with StepRules(), Arguments() as recorded:
            logits = model.static_step(ids(8), ids(4), state, CacheLengths(16, 16))
        names = [name for name, arguments in recorded.calls if any(x is bias for x in arguments)]
        return names + [name for name, _ in recorded.calls if name in ("div", "erf")], str(logits.dtype)


def graph_search(architecture: str, dtype: str, models: int, options: dict[str, Any], precision: str) -> None:
    """Checks the operations that a CUDA graph records, and those between two of its runs."""
    with fake_gpu(), precisions.autocast(precision, DEVICE):
        ensemble = [model_on_gpu(architecture, dtype) for _ in range(models)]
        search = GraphBeamSearch(ensemble, SearchOptions(**options), 4, 32, 32, DEVICE)
        source, slots, lengths = packed(SOURCE), ids(SENTENCES), ids(SENTENCES)
        with StepRules(), torch.inference_mode():
            search.insert(slots, [model.encode(source) for model in ensemble], lengths)
            search.step(CacheLengths(16, 16))
            search.step(CacheLengths(24, 16))
            results = search.results(slots, 16)
        assert all(result.is_cuda for result in results)


class Wide(TorchDispatchMode):
    """Records the operations that make a new tensor of `columns` columns."""

    def __init__(self, columns: int) -> None:
        super().__init__()
        self.columns, self.names = columns, []  # type: tuple[int, list[str]]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        made = isinstance(result, torch.Tensor) and all(result is not given for given in args)  # not in place
        if made and result.shape[1:] == (self.columns,) and not result._is_view():
            self.names.append(func.overloadpacket.__name__)
        return result


def logits_of_a_step() -> list[str]:
    """Returns the operations of a search step that write a number for each entry of the vocabulary."""
    with fake_gpu(), torch.no_grad():
        search = GraphBeamSearch([model_on_gpu("transformer_tiny")], SearchOptions(min_len=2), 4, 32, 32, DEVICE)
        with Wide(VOCABULARY) as wide:
            search.step(CacheLengths(16, 16))
    return wide.names


def calls_of_kernels() -> tuple[int, int]:
    """Returns the calls of the fused residual connection in a forward pass, and of the log-sum-exp in a search step."""

    def residual(x: Any, change: Any, weight: Any, bias: Any, eps: float, p: float) -> torch.Tensor:
        return torch.nn.functional.layer_norm(x.to(change.dtype) + change, weight.shape, weight, bias, eps)

    def logsumexp(logits: torch.Tensor, block: int) -> tuple[torch.Tensor, torch.Tensor]:
        return logits.logsumexp(1), logits.new_empty(len(logits), logits.shape[1] // block)

    with fake_gpu(), mock.patch.object(residual_gpu, "is_usable", lambda _: True):
        model, fused = model_on_gpu("transformer_tiny").train(), mock.Mock(side_effect=residual)
        with mock.patch.object(residual_gpu.FusedAddAndNorm, "apply", fused), precisions.autocast("bf16", DEVICE):
            criterion_of("cross_entropy")(model, micro_batch())
    kernel = mock.Mock(side_effect=logsumexp)
    with fake_gpu(), mock.patch.object(logsumexp_gpu, "is_usable", lambda _: True):
        search = GraphBeamSearch([model_on_gpu("transformer_tiny")], SearchOptions(), 4, 32, 32, DEVICE)
        with mock.patch.object(logsumexp_gpu, "fused_logsumexp", kernel):
            search.step(CacheLengths(16, 16))
    return fused.call_count, kernel.call_count


def encodes_in_background() -> bool:
    with fake_gpu():
        model = model_on_gpu("transformer_tiny")
    return Translator([model], on_host(tiny_tokenizer)()).background


def forbidden(deed: str) -> None:
    """Runs an operation that is forbidden in a step, and therefore raises."""
    with fake_gpu():
        x, index = torch.empty(4, 4, device=DEVICE), ids(2)
        half, made_on_cpu = torch.empty(2, 4, device=DEVICE, dtype=torch.bfloat16), torch.empty(4, 4)
        deeds = {
            "item": lambda: x.sum().item(),
            "bool": lambda: bool((x > 0).all()),
            "boolean index": lambda: x[x > 0],
            "nonzero": lambda: x.nonzero(),
            "bincount": lambda: index.bincount(minlength=4),
            "copy to the host": lambda: x.cpu(),
            "tensor from the host": lambda: torch.tensor([1.0, 2.0]).to(DEVICE),
            "number from the host": lambda: torch.tensor(3.0).to(DEVICE),
            "two devices": lambda: x + made_on_cpu,
            "two types in a product": lambda: half @ x,
            "two types in place": lambda: x.index_copy_(0, index, half),
        }
        with StepRules():
            deeds[deed]()
