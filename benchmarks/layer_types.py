"""Table 1 of "Attention Is All You Need", measured: four types of layer over sentence length n and width d.

    python benchmarks/layer_types.py                   # prints the tables, writes layer_types.png beside this file
    python benchmarks/layer_types.py --device cuda

For each type, the script measures the seconds of one layer, forward and backward, for one sentence (a call runs several
sentences with 4,096 tokens in all). It counts the floating-point operations of the matrix products, and fits growth
exponents of seconds and operations. In the autograd graph, it counts the sequential operations and the path length
between the first and the last token of a sentence.

The plot needs matplotlib: pip install 'nmtkit[plots]'.
"""

import math
import statistics
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from harness import Report, Row, parser
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from nmtkit.data.packed import Layout
from nmtkit.models.layers.attention import attention
from nmtkit.models.layers.attention_cpu import sliding_window_attention
from nmtkit.models.layers.attention_reference import AttentionSpec
from nmtkit.models.layers.convolution import PackedConvolution
from nmtkit.models.layers.recurrent import PackedLSTM, lstm_cell

# B sentences of n tokens each, T = B n, d width, r neighbourhood of restricted self-attention, k kernel size

TOKENS = 4096  # tokens of all sentences in a measurement
LENGTHS = (16, 32, 64, 128, 256, 512, 1024, 2048)  # at width 256
WIDTHS = (64, 128, 256, 512, 1024)  # at length 64
FIXED_WIDTH, FIXED_LENGTH = 256, 64
KERNEL, NEIGHBOURHOOD, HEAD = 3, 32, 64
COUNTED_LENGTHS = (14, 41, 122, 365)  # longest n that 3, 4, 5 and 6 convolutions with dilations 1, 3, 9, … connect

warnings.filterwarnings("ignore", "TF32 acceleration")  # the warning of torch when oneDNN is switched off for counting


class SelfAttention(nn.Module):
    """softmax(X X^T / sqrt(K)) X in heads of width 64. The paper does not count projections, so there are none."""

    def __init__(self, d: int) -> None:
        super().__init__()
        self.heads = max(1, d // HEAD)

    def forward(self, x: Tensor, layout: Layout) -> Tensor:
        heads = x.unflatten(1, (self.heads, -1))
        return self.attend(heads, layout).flatten(1)

    def attend(self, x: Tensor, layout: Layout) -> Tensor:
        return attention(x, x, x, layout, layout)


class RestrictedAttention(SelfAttention):
    """Sliding-window self-attention, with the code that `--window` uses on a CPU for long sentences."""

    def attend(self, x: Tensor, layout: Layout) -> Tensor:
        return sliding_window_attention(x, x, x, layout, layout, AttentionSpec(window=NEIGHBOURHOOD))


class Recurrent(nn.Module):
    def __init__(self, d: int) -> None:
        super().__init__()
        self.layer = PackedLSTM(d, d)

    def forward(self, x: Tensor, layout: Layout) -> Tensor:
        return self.layer(x, layout)


class Convolution(nn.Module):
    def __init__(self, d: int, dilation: int = 1) -> None:
        super().__init__()
        self.layer = PackedConvolution(nn.Linear(KERNEL * d, d), KERNEL, width=d, dilation=dilation, causal=False)

    def forward(self, x: Tensor, layout: Layout) -> Tensor:
        return self.layer(x, layout)


@dataclass(frozen=True)
class LayerType:
    name: str
    layer: Callable[[int], nn.Module]
    complexity: str  # this field and the next two are columns of Table 1
    sequential: str
    path: str


TYPES = (
    LayerType("self-attention", SelfAttention, "O(n^2 d)", "O(1)", "O(1)"),
    LayerType("recurrent (LSTM)", Recurrent, "O(n d^2)", "O(n)", "O(n)"),
    LayerType("convolutional (k=3)", Convolution, "O(k n d^2)", "O(1)", "O(log_k n)"),
    LayerType("restricted (r=32)", RestrictedAttention, "O(r n d)", "O(1)", "O(n/r)"),
)


# Time and operations


def uniform(sentences: int, length: int, device: str) -> Layout:
    return Layout(torch.full((sentences,), length, device=device), length, sentences * length)


@dataclass(frozen=True)
class Measurement:
    n: int
    d: int
    forward: float  # seconds for one sentence
    backward: float
    flop: float  # floating-point operations of matrix products, forward and backward, for one sentence


def measure(kind: LayerType, n: int, d: int, device: str, repeats: int) -> Measurement:
    torch.manual_seed(0)
    sentences = max(1, TOKENS // n)
    layout = uniform(sentences, n, device)
    layer = kind.layer(d).to(device)
    x = torch.randn(layout.tokens, d, device=device, requires_grad=True)
    gradient = torch.randn(layout.tokens, d, device=device)

    def clock() -> float:
        if device == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()

    forwards, backwards = [], []
    for _ in range(repeats + 1):
        begin = clock()
        y = layer(x, layout)
        middle = clock()
        y.backward(gradient)
        forwards.append(middle - begin)
        backwards.append(clock() - middle)
    # fused kernels are off, because the counter does not see the products inside them
    with (
        FlopCounterMode(display=False) as counter,
        torch.backends.mkldnn.flags(enabled=False),
        sdpa_kernel(SDPBackend.MATH),
    ):
        layer(x, layout).backward(gradient)
    best = [statistics.median(times[1:]) / sentences for times in (forwards, backwards)]
    return Measurement(n, d, *best, counter.get_total_flops() / sentences)


def exponent(sizes: Sequence[int], values: Sequence[float]) -> float:
    """Returns the slope of the least-squares line through log sizes and log values of the larger half of the sizes."""
    half = max(0, min(len(sizes) // 2, len(sizes) - 2))
    return statistics.linear_regression(
        [math.log(size) for size in sizes[half:]], [math.log(value) for value in values[half:]]
    ).slope


# Sequential operations and path lengths


def graph_depth(output: Tensor) -> int:
    """Returns the number of operations on the longest chain of the graph behind `output`."""
    depth: dict[Any, int] = {}
    stack = [output.grad_fn]
    while stack:
        node = stack[-1]
        parents = [parent for parent, _ in node.next_functions if parent is not None]
        waiting = [parent for parent in parents if parent not in depth]
        if waiting:
            stack.extend(waiting)
            continue
        depth[node] = 1 + max((depth[parent] for parent in parents), default=0)
        stack.pop()
    return depth[output.grad_fn]


def unrolled(lstm: nn.LSTM, x: Tensor) -> Tensor:
    """Runs an LSTM over one sentence [n, d] in single operations. torch's kernel would be one node of the graph."""
    h, c, outputs = x.new_zeros(1, lstm.hidden_size), x.new_zeros(1, lstm.hidden_size), []
    input_gates = F.linear(x, lstm.weight_ih_l0, lstm.bias_ih_l0)
    for gates in input_gates.split(1):
        h, c = lstm_cell(gates + F.linear(h, lstm.weight_hh_l0, lstm.bias_hh_l0), c)
        outputs.append(h)
    return torch.stack(outputs, 1)[0]


def sequential_operations(kind: LayerType, n: int) -> int:
    """Returns the length of the longest chain of dependent operations in one layer over n tokens."""
    layer = kind.layer(8)
    x = torch.randn(n, 8, requires_grad=True)
    if isinstance(layer, Recurrent):
        return graph_depth(unrolled(layer.layer.lstm, x))
    return graph_depth(layer(x, uniform(1, n, "cpu")))


def path_length(kind: LayerType, n: int) -> int:
    """Returns the number of layers, or of recurrent steps, after which the last output depends on the first input.

    Layer i of convolutions has the dilation k^i. Without dilation, the path length would be n / k (section 4).
    """
    layout, layers = uniform(1, n, "cpu"), 0
    if kind.layer is Recurrent:
        return n - 1
    x = torch.randn(n, 8, requires_grad=True)
    y = x
    while True:
        layer = Convolution(8, KERNEL**layers) if kind.layer is Convolution else kind.layer(8)
        y, layers = layer(y, layout), layers + 1
        (gradient,) = torch.autograd.grad(y[-1].sum(), x, retain_graph=True)
        if gradient[0].any():
            return layers


# Tables and plot

TIMES = {"flop": lambda row: row.flop, "forward": lambda row: row.forward, "backward": lambda row: row.backward,
         "total": lambda row: row.forward + row.backward}  # fmt: skip


def plot(over_n: dict[str, list[Measurement]], over_d: dict[str, list[Measurement]], title: str, path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(1, 2, figsize=(11, 4.6), sharey=True)
    labels = f"sentence length n (d = {FIXED_WIDTH})", f"width d (n = {FIXED_LENGTH})"
    for panel, label, axis, rows_of in zip(panels, labels, "nd", (over_n, over_d), strict=True):
        for kind, marker in zip(TYPES, "osD^", strict=True):
            rows = rows_of[kind.name]
            sizes, times = [getattr(row, axis) for row in rows], [1000 * (row.forward + row.backward) for row in rows]
            name = f"{kind.name}: {axis}^{exponent(sizes, times):.2f}, paper {kind.complexity}"
            panel.plot(sizes, times, marker=marker, label=name)
        panel.set(xscale="log", yscale="log", xlabel=label)
        panel.grid(alpha=0.3)
        panel.legend(fontsize=7)
    panels[0].set_ylabel("milliseconds per sentence, forward and backward")
    figure.suptitle(title, fontsize=10)
    figure.tight_layout()
    figure.savefig(path, dpi=150)


def main() -> None:
    flags = parser(__doc__, rounds=5, threads=1)
    flags.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    flags.add_argument("--plot", type=Path, default=Path(__file__).with_suffix(".png"))
    arguments = flags.parse_args()
    torch.set_num_threads(arguments.threads)
    report, quick, device = Report(arguments), arguments.quick, arguments.device
    lengths, widths = (LENGTHS[:3], WIDTHS[:2]) if quick else (LENGTHS, WIDTHS)
    counted = COUNTED_LENGTHS[:2] if quick else COUNTED_LENGTHS
    over_n, over_d, growth, counts = {}, {}, [], []
    for kind in TYPES:
        by_length = [measure(kind, n, FIXED_WIDTH, device, arguments.rounds) for n in lengths]
        by_width = [measure(kind, FIXED_LENGTH, d, device, arguments.rounds) for d in widths]
        over_n[kind.name], over_d[kind.name] = by_length, by_width
        row: Row = {"layer": kind.name, "paper": kind.complexity}
        for name, value in TIMES.items():
            exponents = (exponent(lengths, [*map(value, by_length)]), exponent(widths, [*map(value, by_width)]))
            row[name] = f"n^{exponents[0]:.2f} d^{exponents[1]:.2f}"
        row |= {f"ms, n = {measured.n}": 1000 * TIMES["total"](measured) for measured in by_length}
        growth.append(row)
        sequential = ", ".join(str(sequential_operations(kind, n)) for n in counted)
        path = ", ".join(str(path_length(kind, n)) for n in counted)
        counts.append({"layer": kind.name, "paper": kind.sequential, "sequential operations": sequential})
        counts[-1] |= {"paper, path": kind.path, "longest path": path}
    report.table("growth of FLOP and seconds of one layer", growth)
    report.table(f"counted for n = {', '.join(map(str, counted))}", counts)
    if not quick:
        plot(over_n, over_d, f"One layer of each type, fp32, {device}", arguments.plot)


if __name__ == "__main__":
    main()
