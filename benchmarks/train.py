"""Training: how fast is nmtkit, compared with other toolkits, with the same precision, data, shapes and optimizer?

    python benchmarks/train.py --text m30k --arch transformer_base              # needs transformers 5
    python benchmarks/train.py --text m30k --parts commands --marian /tmp/marian/bin/pymarian --eole /tmp/eole/bin/eole

updates   Updates (forward, backward, a step of fused AdamW) in turns with Hugging Face's MarianMTModel, the Transformer
          of the paper, in fp32 and under bf16 autocast. The updates of both systems have about as many real tokens.
          Each system gets batches that suit it: nmtkit the batches of its sampler, and MarianMTModel sentences that
          are sorted by both lengths and so need little padding (the table has the share of padding).
commands  Whole commands in turns. The speed is the median of the second half of each program's log. Marian and eole
          come from separate environments (`pip install pymarian`, `pip install eole`) and compute in fp32. All systems
          have the shape of transformer_tiny and one matrix for all embeddings. Marian and eole use the same
          SentencePiece model. nmtkit trains a separate model, because the ids of its special tokens are different.
          `2 ranks` are gloo processes of one thread. Memory is the largest resident memory of one process.
"""

import argparse
import re
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import sentencepiece
import torch
from harness import Report, Row, Workspace, busy_cores, chosen, command, in_turns, parser, speeds
from torch import Tensor, nn
from torch.nn import functional as F

from nmtkit.config import derive
from nmtkit.data.dataset.batching import BatchSampler, split_by_tokens
from nmtkit.data.dataset.binarized import Dataset
from nmtkit.data.packed import IGNORE_INDEX, Batch
from nmtkit.models import building
from nmtkit.models.architectures import ARCHITECTURES
from nmtkit.models.architectures.transformer_config import TransformerConfig
from nmtkit.models.layers.losses import output_cross_entropy

SMOOTHING = DROPOUT = 0.1
DTYPES: dict[str, torch.dtype | None] = {"fp32": None, "bf16": torch.bfloat16}  # dtypes of autocast
Loss = Callable[[nn.Module, Batch], Tensor]  # returns the sum over target tokens

# --- updates in turns -------------------------------------------------------------------------------------------------


def own_model(arch: str, config: TransformerConfig, dataset: Dataset) -> nn.Module:
    torch.manual_seed(0)
    return building.build(arch, config, building.vocabulary_of(dataset.tokenizer))


def own_loss(model: Any, batch: Batch) -> Tensor:
    features = model(batch.source, batch.target_input)
    return output_cross_entropy(model.output_projection, features, batch.target_output, SMOOTHING)[0]


def padded_model(config: TransformerConfig, vocabulary: int) -> nn.Module:
    """Returns a MarianMTModel of the same shape. Its vocabulary has one more entry, for padding."""
    from transformers import MarianConfig, MarianMTModel

    torch.manual_seed(0)
    sides = ("encoder", "decoder")
    shape: dict[str, Any] = {f"{side}_layers": getattr(config, f"{side}_layers") for side in sides}
    shape |= {f"{side}_ffn_dim": config.d_ff for side in sides}
    shape |= {f"{side}_attention_heads": config.heads for side in sides}
    return MarianMTModel(MarianConfig(
        vocab_size=vocabulary + 1, d_model=config.d_model, dropout=config.dropout, attention_dropout=0.0,
        activation_dropout=0.0, activation_function="relu", scale_embedding=True, pad_token_id=vocabulary,
        share_encoder_decoder_embeddings=True, bos_token_id=1, eos_token_id=2, decoder_start_token_id=1,
        forced_eos_token_id=None, use_cache=False, **shape,
    ))  # fmt: skip


def padded_loss(model: Any, batch: Batch) -> Tensor:
    padding = model.config.pad_token_id
    logits = model(
        input_ids=batch.source.to_padded(padding).long(),
        attention_mask=batch.source.layout.mask.long(),
        decoder_input_ids=batch.target_input.to_padded(padding).long(),
    ).logits
    target = batch.target_input.with_values(batch.target_output).to_padded(IGNORE_INDEX).long()
    return F.cross_entropy(
        logits.flatten(0, 1).float(), target.flatten(), label_smoothing=SMOOTHING, ignore_index=IGNORE_INDEX,
        reduction="sum",
    )  # fmt: skip


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(
        model.train().parameters(), lr=1e-4, betas=(0.9, 0.98), eps=1e-9, weight_decay=0, fused=True
    )


def make_updates(
    model: nn.Module, optimizer: torch.optim.Optimizer, loss: Loss, dtype: torch.dtype | None, batches: Sequence[Batch]
) -> None:
    for batch in batches:
        fresh = batch.to("cpu")  # a copy whose layouts have no cached values
        with torch.autocast("cpu", dtype, enabled=dtype is not None):
            total = loss(model, fresh) / batch.target_tokens
        total.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)


def spread(number: int, count: int) -> list[int]:
    """Returns `count` of the indices below `number`, evenly spread."""
    return [round((step + 0.5) / count * number - 0.5) for step in range(count)]


def sampled_batches(dataset: Dataset, batch_tokens: int, count: int) -> list[Batch]:
    """Returns `count` updates of an epoch, evenly spread over all updates in order of length."""
    train = dataset["train"]
    sampler = BatchSampler(train.source.lengths, train.target.lengths, batch_tokens, seed=1)
    updates = sorted(sampler.epoch(0), key=lambda pairs: float(train.target.lengths[pairs].mean()))
    return [train.batch(updates[index]) for index in spread(len(updates), count)]


def batches_for_padding(dataset: Dataset, batch_tokens: int, count: int) -> list[Batch]:
    """Returns `count` updates of at most `batch_tokens` real tokens, which consist of pairs sorted by both lengths."""
    train = dataset["train"]
    source, target = np.asarray(train.source.lengths[:]), np.asarray(train.target.lengths[:])
    order = np.lexsort((source, target))
    bounds = split_by_tokens(source[order], target[order], batch_tokens)
    return [train.batch(order[bounds[index] : bounds[index + 1]]) for index in spread(len(bounds) - 1, count)]


def padding_share(batches: Sequence[Batch]) -> float:
    layouts = [layout for batch in batches for layout in (batch.source.layout, batch.target_input.layout)]
    padded = sum(layout.sentences * layout.max_length for layout in layouts)
    return 1 - sum(layout.tokens for layout in layouts) / padded


def product_gflops(dtype: torch.dtype) -> float:
    """Returns the GFLOP/s of the machine in a product of square matrices, the best of five measurements."""
    x = torch.randn(1024, 1024).to(dtype)
    return 2 * 1024**3 / min(in_turns({"product": lambda: x @ x}, 5)["product"].seconds) / 1e9


def update_flop(config: TransformerConfig, vocabulary: int, batches: Sequence[Batch]) -> float:
    """Returns the FLOP of the products with weights, forward and backward, over the batches."""
    attention = config.heads * (2 * config.key_width + 2 * config.value_width) * config.d_model  # four projections
    layer = attention + 2 * config.d_model * config.d_ff
    source = config.encoder_layers * layer + config.decoder_layers * attention // 2
    target = config.decoder_layers * (layer + attention // 2) + config.d_model * vocabulary
    return 6.0 * sum(batch.source.layout.tokens * source + batch.target_tokens * target for batch in batches)


def updates(arguments: argparse.Namespace, workspace: Workspace, report: Report) -> None:
    torch.set_num_threads(arguments.threads)
    dataset = Dataset.open(workspace.data)
    config = derive(ARCHITECTURES[arguments.arch].preset, {"dropout": DROPOUT}, arguments.arch)
    assert isinstance(config, TransformerConfig), "the baseline is a Transformer"
    vocabulary, count = dataset.tokenizer.target_size, 1 if arguments.quick else arguments.batches
    batches = {
        "nmtkit": sampled_batches(dataset, arguments.batch_tokens, count),
        "MarianMTModel": batches_for_padding(dataset, arguments.batch_tokens, count),
    }

    def system(name: str) -> Callable[[], None]:
        kind, precision = name.split()
        own = kind == "nmtkit"
        model = own_model(arguments.arch, config, dataset) if own else padded_model(config, vocabulary)
        loss = own_loss if own else padded_loss
        return partial(make_updates, model, adamw(model), loss, DTYPES[precision], batches[kind])

    names = {f"{kind} {precision}": None for precision in DTYPES for kind in batches}
    running = {name: system(name) for name in chosen(names, arguments.only)}
    timings = in_turns(running, arguments.rounds)
    tokens = {name: sum(batch.target_tokens for batch in group) for name, group in batches.items()}
    rows = speeds(timings, tokens["nmtkit"])
    ceilings = {precision: product_gflops(dtype or torch.float32) for precision, dtype in DTYPES.items()}
    for row in rows:
        name, precision = row["system"].split()
        scale = tokens[name] / tokens["nmtkit"]  # the groups differ by some tokens
        row |= {"tok/s": row["tok/s"] * scale, "tok/core-s": row["tok/core-s"] * scale}
        row["padding"] = 0.0 if name == "nmtkit" else padding_share(batches[name])
        gflop = update_flop(config, vocabulary, batches[name]) / 1e9
        row["of its products"] = gflop / row["seconds"] / ceilings[precision]
    size = f"{count} updates of {arguments.batch_tokens} tokens"
    report.table(f"{arguments.arch}, {size}, {arguments.threads} threads", rows)


# --- whole commands ---------------------------------------------------------------------------------------------------

EOLE = """
src_vocab: {folder}/vocab.txt
tgt_vocab: {folder}/vocab.txt
share_vocab: true
overwrite: true
report_every: 2
data: {{corpus_1: {{path_src: {folder}/train.src, path_tgt: {folder}/train.tgt, transforms: []}}}}
model:
  {{architecture: transformer, hidden_size: 128, transformer_ff: 256, layers: 4, heads: 4,
   share_decoder_embeddings: true, share_embeddings: true, embeddings: {{word_vec_size: 128, src_word_vec_size: 128,
   tgt_word_vec_size: 128, position_encoding_type: SinusoidalInterleaved}}}}
training:
  {{world_size: 0, gpu_ranks: [], batch_type: tokens, batch_size: {batch_tokens}, train_steps: {updates},
   valid_steps: 1000000, save_checkpoint_steps: {updates}, optim: adamw, learning_rate: 1.0, decay_method: noam,
   warmup_steps: 200, dropout: [0.1], label_smoothing: 0.1, num_workers: 0, model_path: {folder}/eole,
   compute_dtype: fp32}}
"""
MARIAN = """
train --type transformer --dim-emb 128 --transformer-dim-ffn 256 --enc-depth 4 --dec-depth 4 --transformer-heads 4
--tied-embeddings-all --sync-sgd --mini-batch 1000 -w 4000 --label-smoothing 0.1 --transformer-dropout 0.1
--learn-rate 0.001 --lr-warmup 200 --clip-norm 0 --disp-freq 2
"""


def peer_text(workspace: Workspace) -> None:
    """Writes the joint SentencePiece model of Marian, and the vocabulary and the pieces of eole."""
    folder, files = workspace.folder, [workspace.file("train", side) for side in (0, 1)]
    sentencepiece.SentencePieceTrainer.train(
        input=",".join(map(str, files)), model_prefix=str(folder / "joint"), vocab_size=workspace.vocab_size,
        model_type="bpe", bos_id=-1, pad_id=-1, unk_id=1, eos_id=0, minloglevel=2,
    )  # fmt: skip
    model = (folder / "joint.model").rename(folder / "joint.spm")
    pieces = sentencepiece.SentencePieceProcessor(model_file=str(model))
    (folder / "vocab.txt").write_text("".join(f"{pieces.id_to_piece(i)}\t1\n" for i in range(2, len(pieces))))
    for side, name in enumerate(("src", "tgt")):
        rows = pieces.encode(workspace.lines("train", side), out_type=str)
        (folder / f"train.{name}").write_text("".join(" ".join(row) + "\n" for row in rows))


def commands(arguments: argparse.Namespace, workspace: Workspace, report: Report) -> None:
    folder, batch, threads = workspace.folder, str(arguments.batch_tokens), str(arguments.threads)
    common = ["--arch", "transformer_tiny", "--metrics", "none", "--log-interval", "2", "--validate-interval", "none"]
    common += ["--max-update", str(arguments.updates), "--batch-tokens", batch, "--device", "cpu"]
    own = [sys.executable, "-m", "nmtkit", "train", str(workspace.data), *common]
    log = r"([\d,]+) tok/s"
    ranks = ["--nproc-per-node", "2", "--threads", "1", "--max-tokens", str(arguments.batch_tokens // 2)]
    systems: dict[str, tuple[list[str], str]] = {
        "nmtkit fp32": ([*own, "--threads", threads, "--precision", "fp32"], log),
        "nmtkit bf16": ([*own, "--threads", threads, "--precision", "bf16"], log),
        "nmtkit, 2 ranks ddp, bf16": ([*own, *ranks, "--precision", "bf16", "--parallel", "ddp"], log),
        "nmtkit, 2 ranks fsdp, bf16": ([*own, *ranks, "--precision", "bf16", "--parallel", "fsdp"], log),
    }
    if arguments.marian or arguments.eole:
        peer_text(workspace)
    if arguments.marian:
        text = [str(workspace.file("train", side)) for side in (0, 1)]
        files = ["--train-sets", *text, "--vocabs", *2 * [str(folder / "joint.spm")]]
        sizes = ["--mini-batch-words", batch, "--after-batches", str(arguments.updates), "--cpu-threads", threads]
        systems["Marian fp32"] = ([arguments.marian, *MARIAN.split(), *files, *sizes], r"([\d,.]+) words/s")
    if arguments.eole:
        settings = EOLE.format(folder=folder, updates=arguments.updates, batch_tokens=batch)
        (folder / "eole.yaml").write_text(settings)
        systems["eole fp32"] = ([arguments.eole, "train", "-c", str(folder / "eole.yaml")], r"/(\d+) tok/s")
    systems = chosen(systems, arguments.only)
    figures: dict[str, list[tuple[float, float]]] = {name: [] for name in systems}
    for _ in range(arguments.rounds):
        for name, (words, pattern) in systems.items():
            saved = folder / f"run-{time.time_ns()}"
            place = ["--model", str(saved / "model.npz")] if name.startswith("Marian") else ["--save-dir", str(saved)]
            words = words if name.startswith("eole") else [*words, *place]
            done = command(words, limit=arguments.seconds, OMP_NUM_THREADS=threads)
            logged = [float(speed.replace(",", "")) for speed in re.findall(pattern, done.log)]
            if not logged:
                raise RuntimeError(f"{name} logged no speed within {arguments.seconds} seconds:\n{done.log[-2000:]}")
            figures[name].append((statistics.median(logged[len(logged) // 2 :]), done.peak_mb))
    rows: list[Row] = []
    for name, rounds in figures.items():
        speed, memory = (statistics.median(values) for values in zip(*rounds, strict=True))
        rows.append({"system": name, "target tok/s": speed, "peak MB": memory, "rounds": rounds})
    report.table(f"whole commands, updates of {batch} tokens, {threads} threads", rows)


def main() -> None:
    flags = parser(__doc__, ["updates", "commands"])
    flags.add_argument("--arch", default="transformer_tiny", help="Transformer preset of the part `updates`")
    flags.add_argument("--batch-tokens", type=int, default=4096)
    flags.add_argument("--batches", type=int, default=3, help="number of different updates of the part `updates`")
    flags.add_argument("--updates", type=int, default=30, help="updates of a whole command")
    flags.add_argument("--seconds", type=float, default=120.0, help="time limit of a whole command")
    flags.add_argument("--marian", help="path of pymarian in its environment")
    flags.add_argument("--eole", help="path of eole in its environment")
    arguments = flags.parse_args()
    if arguments.quick:
        arguments.batch_tokens, arguments.updates, arguments.rounds = 400, 4, 1
    workspace, report = Workspace(arguments), Report(arguments)
    with busy_cores(arguments.busy):
        for part in arguments.parts:
            {"updates": updates, "commands": commands}[part](arguments, workspace, report)


if __name__ == "__main__":
    main()
