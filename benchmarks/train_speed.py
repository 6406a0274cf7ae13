"""Training speed beside a padded implementation: the same data, shapes and optimizer, in one run.

    pip install 'transformers>=5'           # for the baseline only; nmtkit does not need it
    nmtkit preprocess … --vocab-size 10000 --destdir data-bin
    python benchmarks/train_speed.py data-bin --arch transformer_base --threads 2

The baseline is Hugging Face's MarianMTModel, which is the Transformer of the paper, with torch's F.cross_entropy on its
logits. An update is forward, backward and a step of fused AdamW. Every contestant runs in fp32 and under bf16 autocast,
and the figure to quote is the ratio within one precision.

Updates hold equally many real tokens, and each contestant gets the batches that suit it: nmtkit those of its sampler,
the padded baseline sentences sorted by both lengths, so that it carries next to no padding (its share is printed).
Contestants take turns, batch by batch; the median round counts. Prints target tokens per second by the clock and per
core-second, which a busy machine disturbs less, and writes train_speed.json.
"""

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from nmtkit import models
from nmtkit.architectures import ARCHITECTURES
from nmtkit.architectures.transformer_config import TransformerConfig
from nmtkit.config import derive
from nmtkit.data.batching import BatchSampler, split_by_tokens
from nmtkit.data.binarized import Dataset
from nmtkit.layers.losses import output_cross_entropy
from nmtkit.layers.packed import IGNORE_INDEX, Batch, Packed

# B sentences, L and M tokens of the longest target and source sentence, V vocabulary

SMOOTHING = 0.1
DTYPES: dict[str, torch.dtype | None] = {"fp32": None, "bf16": torch.bfloat16}  # of autocast


@dataclass
class Contestant:
    name: str
    model: nn.Module
    loss: Callable[[Batch], Tensor]  # summed over target tokens
    dtype: torch.dtype | None  # of autocast
    batches: Sequence[Batch] = ()
    rounds: list[tuple[float, float]] = field(default_factory=list)  # seconds and core-seconds of all batches

    def __post_init__(self) -> None:
        options: dict[str, Any] = {"lr": 1e-4, "betas": (0.9, 0.98), "eps": 1e-9, "weight_decay": 0.0, "fused": True}
        self.optimizer = torch.optim.AdamW(self.model.train().parameters(), **options)

    @property
    def precision(self) -> str:
        return "fp32" if self.dtype is None else "bf16"

    def update(self, batch: Batch) -> tuple[float, float]:
        """Returns the seconds and core-seconds of one update. Gradients are freed, as by a trainer."""
        batch = fresh(batch)
        start, cpu_start = time.perf_counter(), time.process_time()
        with torch.autocast("cpu", self.dtype, enabled=self.dtype is not None):
            loss = self.loss(batch) / batch.target_tokens
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return time.perf_counter() - start, time.process_time() - cpu_start

    def speeds(self) -> tuple[float, float]:
        """Returns target tokens per second and per core-second, of the median round."""
        tokens = sum(batch.target_tokens for batch in self.batches)
        return tokens / statistics.median(w for w, _ in self.rounds), tokens / statistics.median(
            c for _, c in self.rounds
        )


def fresh(batch: Batch) -> Batch:
    """Returns the batch with layouts that have computed nothing yet."""
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
    """Returns a model of the same shapes; its vocabulary has one more entry, for the padding."""
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
    """Returns `count` updates of an epoch, evenly spread over it in order of length."""
    train = dataset["train"]
    sampler = BatchSampler(train.source.lengths, train.target.lengths, batch_tokens, seed=1)
    updates = sorted(sampler.epoch(0), key=lambda pairs: float(train.target.lengths[pairs].mean()))
    return [train.batch(updates[index]) for index in spread(len(updates), count)]


def batches_for_padding(dataset: Dataset, batch_tokens: int, count: int) -> list[Batch]:
    """Returns the same for a padded model: updates of as many real tokens, of pairs sorted by both lengths."""
    train = dataset["train"]
    source, target = np.asarray(train.source.lengths[:]), np.asarray(train.target.lengths[:])
    order = np.lexsort((source, target))
    bounds = split_by_tokens(source[order], target[order], batch_tokens)
    return [train.batch(order[bounds[index] : bounds[index + 1]]) for index in spread(len(bounds) - 1, count)]


def spread(number: int, count: int) -> list[int]:
    """Returns `count` of the indices below `number`, evenly spread."""
    return [round((step + 0.5) / count * number - 0.5) for step in range(count)]


def padding_share(batches: Sequence[Batch]) -> float:
    """Returns the share of padding in the batches, padded on both sides."""
    layouts = [layout for batch in batches for layout in (batch.source.layout, batch.target_input.layout)]
    return 1 - sum(layout.tokens for layout in layouts) / sum(
        layout.sentences * layout.max_length for layout in layouts
    )


def product_gflops(dtype: torch.dtype) -> float:
    """Returns GFLOP/s of the machine in a square product, best of five."""
    x, best = torch.randn(2048, 2048).to(dtype), float("inf")
    for _ in range(5):
        start = time.perf_counter()
        x @ x
        best = min(best, time.perf_counter() - start)
    return 2 * 2048**3 / best / 1e9


def update_gflop(config: TransformerConfig, vocabulary: int, batches: Sequence[Batch]) -> float:
    """Returns GFLOP of the projections' products, forward and backward, over the batches, without attention scores."""
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
    parser.add_argument("--repeats", type=int, default=3, help="rounds, of which the median counts")
    parser.add_argument("--threads", type=int, default=2)
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
    makers: dict[str, Callable[[str], Contestant]] = {}
    for precision, dtype in DTYPES.items():
        makers[f"nmtkit {precision}"] = partial(
            nmtkit_contestant, arch=arguments.arch, dataset=dataset, dropout=arguments.dropout, dtype=dtype
        )
        makers[f"MarianMTModel {precision}"] = partial(
            marian_contestant, config=config, vocabulary=vocabulary, dtype=dtype
        )
    names = [name for name in makers if not arguments.only or name in arguments.only.split(",")]
    contestants = [makers[name](name) for name in names]
    packed = chosen_batches(dataset, arguments.batch_tokens, arguments.batches)
    sorted_by_both = batches_for_padding(dataset, arguments.batch_tokens, arguments.batches)
    for contestant in contestants:
        contestant.batches = packed if contestant.name.startswith("nmtkit") else sorted_by_both
        contestant.update(contestant.batches[0])  # the first update allocates
    for repeat in range(arguments.repeats):
        times: dict[str, list[tuple[float, float]]] = {contestant.name: [] for contestant in contestants}
        for number in range(arguments.batches):
            for contestant in contestants:
                times[contestant.name].append(contestant.update(contestant.batches[number]))
        for contestant in contestants:
            wall, cpu = zip(*times[contestant.name], strict=True)
            contestant.rounds.append((sum(wall), sum(cpu)))
        print(f"round {repeat + 1} of {arguments.repeats} done", flush=True)
    report(contestants, config, vocabulary, arguments)


def report(
    contestants: Sequence[Contestant], config: TransformerConfig, vocabulary: int, arguments: argparse.Namespace
) -> None:
    ceilings = {precision: product_gflops(dtype or torch.float32) for precision, dtype in DTYPES.items()}
    speeds = {contestant.name: contestant.speeds() for contestant in contestants}
    print(
        f"\n{arguments.arch}, {arguments.batches} updates of {arguments.batch_tokens} tokens a side at most, ", end=""
    )
    print(f"{arguments.threads} threads, torch {torch.__version__}")
    for precision in DTYPES:
        ours, theirs = (speeds.get(f"{name} {precision}") for name in ("nmtkit", "MarianMTModel"))
        if ours and theirs:
            clock, cores = (mine / other for mine, other in zip(ours, theirs, strict=True))
            print(
                f"{precision}: nmtkit is {clock:.2f} times as fast as MarianMTModel, per core-second {cores:.2f} times"
            )
    print(f"{'':20}{'parameters':>12}{'target tok/s':>14}{'a core-second':>15}{'padding':>9}{'of products':>13}")
    rows = []
    for contestant in contestants:
        wall, cores = speeds[contestant.name]
        tokens = sum(batch.target_tokens for batch in contestant.batches)
        share = update_gflop(config, vocabulary, contestant.batches) / (tokens / wall) / ceilings[contestant.precision]
        padding = 0.0 if contestant.name.startswith("nmtkit") else padding_share(contestant.batches)
        count = sum(p.numel() for p in contestant.model.parameters() if p.requires_grad)
        print(f"{contestant.name:20}{count / 1e6:>10.1f} M{wall:>14,.0f}{cores:>15,.0f}{padding:>9.1%}{share:>13.0%}")
        figures = {"tokens_per_second": wall, "tokens_per_core_second": cores, "padding": padding, "share": share}
        rows.append({"name": contestant.name, "parameters": count, **figures, "rounds": contestant.rounds})
    contents = {"machine": platform.processor(), "torch": torch.__version__, "rows": rows, "product_gflops": ceilings}
    contents["arguments"] = {name: str(value) for name, value in vars(arguments).items()}
    arguments.output.write_text(json.dumps(contents, indent=1))


if __name__ == "__main__":
    main()
