"""The cost of an update and a decoding step of the Transformer on a GPU, by arithmetic: nothing here is measured.

    python benchmarks/gpu_estimate.py [--max-tokens 4096 25000]

The update runs on CUDA tensors without contents (tests/fake_cuda, which needs a C++ compiler), and every operation that
it dispatches is written down: its floating-point operations, and the bytes of its inputs and outputs. An operation then
takes the longer of the two at the card's rates, and no less than a kernel's least time; the host takes its time for
each. So one learns what bounds an update, and what a fused kernel would save; not how good a kernel really is.
"""

import argparse
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests"), str(ROOT / "tests" / "fake_cuda")]
import library  # noqa: E402

with tempfile.TemporaryDirectory() as folder:  # before torch is imported
    library.load(library.build(Path(folder)))

import torch  # noqa: E402
from fake_gpu import fake_gpu, on_host, tensors_of  # noqa: E402
from gpu import SCALES  # noqa: E402
from gpu_training import MEAN_LENGTH, trainer_of, update_flop, update_of  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402

HOST_SECONDS = 10e-6  # of an eager operation, autocast and autograd included: an estimate
KERNEL_SECONDS = 2.5e-6  # of the smallest kernel: an estimate
TILE = 128  # rows and columns that flash attention computes at least for a sentence and a head

VIEWS = {"view", "_unsafe_view", "t", "transpose", "expand", "unsqueeze", "squeeze", "select", "slice", "split",
         "split_with_sizes", "unbind", "permute", "alias", "as_strided", "detach", "lift_fresh", "device", "empty",
         "empty_like", "empty_strided", "new_empty", "new_empty_strided"}  # fmt: skip


@dataclass(frozen=True)
class Card:
    """Rates that large kernels sustain: products in bf16, short attention tiles, memory."""

    name: str
    flops: float
    attention_flops: float
    bytes: float


CARDS = [Card("H100", 650e12, 200e12, 2.8e12), Card("H200", 720e12, 200e12, 4.0e12)]


class Ledger(TorchDispatchMode):
    """Writes down each operation: its kind, floating-point operations and bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[tuple[str, float, float]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        if name in VIEWS:
            return result
        given, made = tensors_of((args, kwargs)), tensors_of(result)
        moved = float(sum(x.nbytes for x in {id(x): x for x in (*given, *made)}.values()))
        flop, kind = 0.0, "element by element"
        if name in ("mm", "addmm"):
            left, right = [x for x in given if x.dim() == 2][-2:]
            flop, kind = 2.0 * left.shape[0] * left.shape[1] * right.shape[1], "products"
        elif "varlen" in name:
            heads, width = given[0].shape[1:]
            sentences = next(x.shape[0] - 1 for x in given if x.dtype == torch.int32)
            flop = sentences * heads * width * TILE * TILE * (10.0 if "backward" in name else 4.0)
            kind = "attention"
        elif name in ("index", "index_select", "gather", "embedding", "index_put", "index_put_", "scatter", "scatter_",
                      "embedding_dense_backward", "repeat_interleave"):  # fmt: skip
            moved = 2.0 * sum(x.nbytes for x in made)  # the table is not read whole
            kind = "gathers"
        elif "foreach" in name or "fused" in name:
            kind = "optimizer"
        self.rows.append((kind, flop, moved))
        return result


def update_rows(model: str, max_tokens: int) -> tuple[list[tuple[str, float, float]], float, int]:
    """Returns the operations of one update, the model's own floating-point operations, and its target tokens."""
    scale = SCALES["cuda"]
    update = on_host(update_of)(0, max_tokens, scale, "cpu")
    config_flop = 0.0
    with fake_gpu():
        trainer = trainer_of(model, scale, precision="bf16")
        trainer.model.begin_update = on_host(trainer.model.begin_update)  # type: ignore[method-assign]
        config_flop = on_host(update_flop)(trainer.model.config, scale.vocabulary, update)
        for batch in (update, update):  # the second finds the optimizer's state there
            placed = type(batch)(
                batch.position, batch.pairs, batch.target_tokens, batch.source_tokens,
                [(index, fake(part)) for index, part in batch.micro_batches], False,
            )  # fmt: skip
            with Ledger() as ledger:
                trainer.step(placed)
    return ledger.rows, config_flop, update.target_tokens


def fake(batch: Any) -> Any:
    """The batch with the same shapes on the fake GPU."""
    from nmtkit.layers.packed import Batch, Layout, Packed

    def like(shape: tuple[int, ...]) -> torch.Tensor:
        return torch.empty(shape, dtype=torch.int64, device="cuda")

    def side(packed: Packed) -> Packed:
        layout = packed.layout
        return Packed(like((layout.tokens,)), Layout(like((layout.sentences,)), layout.max_length, layout.tokens))

    pairs = torch.empty(batch.source.layout.sentences, dtype=torch.int64)
    return Batch(side(batch.source), side(batch.target_input), like((batch.target_tokens,)), batch.target_tokens, pairs)


def report(model: str, max_tokens: int) -> Iterator[str]:
    rows, flop, tokens = update_rows(model, max_tokens)
    yield f"{model}, {tokens:,} target tokens an update, micro-batches of {max_tokens:,}: {flop / 1e12:.2f} TFLOP, "
    yield f"{len(rows):,} operations, {len(rows) * HOST_SECONDS * 1e3:.1f} ms of the host\n"
    for card in CARDS:
        seconds: Counter[str] = Counter()
        for kind, flops, moved in rows:
            rate = card.attention_flops if kind == "attention" else card.flops
            seconds[kind] += max(flops / rate, moved / card.bytes, KERNEL_SECONDS)
        total = seconds.total()
        slowest = max(total, len(rows) * HOST_SECONDS)
        parts = ", ".join(f"{kind} {part * 1e3:.1f}" for kind, part in seconds.most_common())
        yield f"  {card.name}: {total * 1e3:.1f} ms of kernels ({parts}); {tokens / slowest / 1e3:,.0f}k target tok/s\n"
    moved: Counter[str] = Counter()
    count: Counter[str] = Counter()
    for kind, _, size in rows:
        moved[kind] += size
        count[kind] += 1
    yield "  GB moved: " + ", ".join(f"{kind} {size / 1e9:.1f} in {count[kind]}" for kind, size in moved.most_common())
    yield "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--max-tokens", nargs="+", type=int, default=[4096, 25000])
    parser.add_argument("--models", nargs="+", default=["base", "big"])
    arguments = parser.parse_args()
    print(f"sentences of {MEAN_LENGTH} tokens at the mean, V = {SCALES['cuda'].vocabulary:,}, bf16; all estimates")
    for model in arguments.models:
        for max_tokens in arguments.max_tokens:
            print(*report(model, max_tokens), sep="", flush=True)


if __name__ == "__main__":
    main()
