"""Training speed beside a plain padded implementation: the same data, shapes, batches and optimizer, in one run.

    pip install 'transformers<5'            # for the baseline only; nmtkit does not need it
    nmtkit preprocess … --vocab-size 10000 --destdir data-bin
    python benchmarks/train_speed.py data-bin --arch transformer_base --threads 2

The baseline is Hugging Face's MarianMTModel, which is the Transformer of the paper, in fp32 and, where the CPU has it,
under bf16 autocast, with torch's F.cross_entropy on its logits. An update is forward, backward and a step of fused
AdamW. Updates of the plan, spread over an epoch's lengths, are timed in turn by every contestant, several times; as
other work on a machine only ever makes things slower, the best time of each update counts. On a machine that others
use, `--threads 1 --clock cpu` counts the seconds that the process itself computes. Prints target tokens/s and writes
train_speed.json.
"""

import argparse
import json
import platform
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from nmtkit import models
from nmtkit.architectures import ARCHITECTURES
from nmtkit.architectures.transformer import TransformerConfig
from nmtkit.data.batching import BatchSampler
from nmtkit.data.binarized import Dataset
from nmtkit.layers.losses import output_cross_entropy
from nmtkit.packed import IGNORE_INDEX, Batch, Packed
from nmtkit.registry import derive

# B sentences, L and M tokens of the longest target and source sentence, V vocabulary

SMOOTHING = 0.1
CLOCKS: dict[str, Callable[[], float]] = {"wall": time.perf_counter, "cpu": time.process_time}


@dataclass
class Contestant:
    name: str
    model: nn.Module
    loss: Callable[[Batch], Tensor]  # summed over target tokens
    dtype: torch.dtype | None  # of autocast
    clock: Callable[[], float] = time.perf_counter
    seconds: dict[int, list[float]] = field(default_factory=dict)  # by number of the batch

    def __post_init__(self) -> None:
        options: dict[str, Any] = {"lr": 1e-4, "betas": (0.9, 0.98), "eps": 1e-9, "weight_decay": 0.0, "fused": True}
        self.optimizer = torch.optim.AdamW(self.model.train().parameters(), **options)

    def update(self, batch: Batch) -> float:
        """Seconds of one update. The optimizer writes the gradients' memory off, as a trainer would."""
        batch = fresh(batch)
        start = self.clock()
        with torch.autocast("cpu", self.dtype, enabled=self.dtype is not None):
            loss = self.loss(batch) / batch.target_tokens
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return self.clock() - start

    def speed(self, batches: Sequence[Batch]) -> float:
        """Target tokens a second, from the best time of each batch."""
        return sum(batch.target_tokens for batch in batches) / sum(min(times) for times in self.seconds.values())


def fresh(batch: Batch) -> Batch:
    """The batch with layouts that have computed nothing yet."""
    return batch.to("cpu")


def nmtkit_contestant(name: str, arch: str, dataset: Dataset, dropout: float, dtype: torch.dtype | None) -> Contestant:
    torch.manual_seed(0)
    entry = ARCHITECTURES[arch]
    config = derive(entry.preset, {"dropout": dropout}, arch)
    model = models.build(arch, config, models.vocabulary_of(dataset.tokenizer))

    def loss(batch: Batch) -> Tensor:
        features = model(batch.source, batch.target_input)
        return output_cross_entropy(model.output_projection, features, batch.target_output, SMOOTHING)[0]

    return Contestant(name, model, loss, dtype)


def marian_contestant(name: str, config: TransformerConfig, vocabulary: int, dtype: torch.dtype | None) -> Contestant:
    """The same shapes; one more entry in its vocabulary, for the padding."""
    from transformers import MarianConfig, MarianMTModel

    torch.manual_seed(0)
    model = MarianMTModel(
        MarianConfig(
            vocab_size=vocabulary + 1,
            d_model=config.d_model,
            encoder_layers=config.encoder_layers,
            decoder_layers=config.decoder_layers,
            encoder_ffn_dim=config.d_ff,
            decoder_ffn_dim=config.d_ff,
            encoder_attention_heads=config.heads,
            decoder_attention_heads=config.heads,
            dropout=config.dropout,
            attention_dropout=0.0,
            activation_dropout=0.0,
            activation_function="relu",
            scale_embedding=True,
            share_encoder_decoder_embeddings=True,
            pad_token_id=vocabulary,
            bos_token_id=1,
            eos_token_id=2,
            decoder_start_token_id=1,
            forced_eos_token_id=None,
            use_cache=False,
        )
    )

    def loss(batch: Batch) -> Tensor:
        logits = model(
            input_ids=padded(batch.source, vocabulary),
            attention_mask=batch.source.layout.mask.long(),
            decoder_input_ids=padded(batch.target_input, vocabulary),
        ).logits
        target = padded(batch.target_input.with_values(batch.target_output), IGNORE_INDEX)
        options: dict[str, Any] = {"label_smoothing": SMOOTHING, "ignore_index": IGNORE_INDEX, "reduction": "sum"}
        return F.cross_entropy(logits.flatten(0, 1).float(), target.flatten(), **options)

    return Contestant(name, model, loss, dtype)


def padded(packed: Packed, fill: int) -> Tensor:
    """B L, int64, `fill` beyond a sentence's end."""
    return packed.to_padded(fill).long()


def chosen_batches(dataset: Dataset, batch_tokens: int, count: int) -> list[Batch]:
    """`count` updates of an epoch's plan, evenly spread over it in order of length."""
    train = dataset["train"]
    plan = BatchSampler(train.source.lengths, train.target.lengths, batch_tokens, seed=1)
    updates = sorted(plan.epoch(0), key=lambda pairs: float(train.target.lengths[pairs].mean()))
    places = [round((number + 0.5) / count * len(updates) - 0.5) for number in range(count)]
    return [train.batch(updates[place]) for place in places]


def product_gflops(dtype: torch.dtype, clock: Callable[[], float]) -> float:
    """GFLOP/s of the machine in a square product, best of five."""
    x, best = torch.randn(2048, 2048).to(dtype), float("inf")
    for _ in range(5):
        start = clock()
        x @ x
        best = min(best, clock() - start)
    return 2 * 2048**3 / best / 1e9


def update_gflop(config: TransformerConfig, vocabulary: int, batches: Sequence[Batch]) -> float:
    """GFLOP of the projections' products, forward and backward, over the batches; attention scores are left out."""
    wide = config.heads * (2 * config.key_width + 2 * config.value_width) * config.d_model
    forward = 2 * config.d_model * config.d_ff
    source = config.encoder_layers * (wide + forward) + config.decoder_layers * wide // 2
    target = config.decoder_layers * (wide + wide // 2 + forward) + config.d_model * vocabulary
    tokens = [(batch.source.layout.tokens, batch.target_tokens) for batch in batches]
    return 3 * 2 * sum(s * source + t * target for s, t in tokens) / 1e9


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path, help="a dataset that nmtkit preprocess wrote")
    parser.add_argument("--arch", default="transformer_base", help="any preset of the Transformer")
    parser.add_argument("--batch-tokens", type=int, default=4096)
    parser.add_argument("--batches", type=int, default=3, help="updates to time")
    parser.add_argument("--repeats", type=int, default=3, help="times each is timed")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--clock", choices=CLOCKS, default="wall")
    parser.add_argument("--dropout", type=float, default=0.1)
    parser.add_argument("--only", default="", help="comma-separated names of contestants")
    parser.add_argument("--output", type=Path, default=Path("train_speed.json"))
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    dataset = Dataset.open(arguments.data)
    preset = ARCHITECTURES[arguments.arch].preset
    assert isinstance(preset, TransformerConfig), "the baseline is a Transformer"
    config = derive(preset, {"dropout": arguments.dropout}, "--dropout")
    vocabulary = dataset.tokenizer.target_size
    batches = chosen_batches(dataset, arguments.batch_tokens, arguments.batches)
    makers: dict[str, Callable[[str], Contestant]] = {
        "nmtkit bf16": lambda name: nmtkit_contestant(name, arguments.arch, dataset, arguments.dropout, torch.bfloat16),
        "nmtkit fp32": lambda name: nmtkit_contestant(name, arguments.arch, dataset, arguments.dropout, None),
        "MarianMTModel fp32": lambda name: marian_contestant(name, config, vocabulary, None),
        "MarianMTModel bf16": lambda name: marian_contestant(name, config, vocabulary, torch.bfloat16),
    }
    names = [name for name in makers if not arguments.only or name in arguments.only.split(",")]
    contestants = [makers[name](name) for name in names]
    for contestant in contestants:
        contestant.clock = CLOCKS[arguments.clock]
        contestant.update(batches[0])  # the first update allocates and plans
    for repeat in range(arguments.repeats):
        for number, batch in enumerate(batches):
            for contestant in contestants:
                contestant.seconds.setdefault(number, []).append(contestant.update(batch))
        print(f"round {repeat + 1} of {arguments.repeats} done", flush=True)
    ceilings = {dtype: product_gflops(dtype, CLOCKS[arguments.clock]) for dtype in (torch.float32, torch.bfloat16)}
    report(contestants, batches, update_gflop(config, vocabulary, batches), ceilings, arguments)


def report(
    contestants: Sequence[Contestant],
    batches: Sequence[Batch],
    gflop: float,
    ceilings: dict[torch.dtype, float],
    arguments: argparse.Namespace,
) -> None:
    tokens = sum(batch.target_tokens for batch in batches)
    reference = next((c.speed(batches) for c in contestants if c.name == "MarianMTModel fp32"), None)
    print(f"\n{arguments.arch}, {len(batches)} updates of {tokens / len(batches):.0f} target tokens, ", end="")
    print(f"{arguments.threads} threads, {arguments.clock} clock, torch {torch.__version__}")
    print(f"{'':20}{'parameters':>12}{'target tok/s':>14}{'against fp32':>14}{'of products':>13}")
    rows = []
    for contestant in contestants:
        speed = contestant.speed(batches)
        share = gflop / (tokens / speed) / ceilings[contestant.dtype or torch.float32]
        count = sum(p.numel() for p in contestant.model.parameters() if p.requires_grad)
        ratio = f"{speed / reference:.2f} x" if reference else "-"
        print(f"{contestant.name:20}{count / 1e6:>10.1f} M{speed:>14.0f}{ratio:>14}{share:>13.0%}")
        rows.append({"name": contestant.name, "parameters": count, "tokens_per_second": speed, "share": share})
        rows[-1]["seconds"] = contestant.seconds
    figures = {"machine": platform.processor(), "torch": torch.__version__, "rows": rows}
    figures["product_gflops"] = {str(dtype): speed for dtype, speed in ceilings.items()}
    figures["arguments"] = {name: str(value) for name, value in vars(arguments).items()}
    arguments.output.write_text(json.dumps(figures, indent=1))


if __name__ == "__main__":
    main()
