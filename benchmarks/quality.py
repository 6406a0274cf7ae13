"""Quality: how well do the architectures translate, does bf16 cost anything, and do estimates find bad translations?

    python benchmarks/quality.py --minutes 2                                     # on the corpus of the demo
    python benchmarks/quality.py --parts rivals --only gnmt_small,moe_small --minutes 2
    python benchmarks/quality.py --parts estimates --text m30k --checkpoint averaged.pt

rivals     Table 2 of "Attention Is All You Need" in miniature. Every model is trained, averaged, and translates the
           test set through the commands of nmtkit. All models are about as large as the Transformer and use the same
           BPE vocabulary. In addition, ByteNet reads characters and Deep-Att reads words (with unknown words
           replaced), as in their papers. One training gives both columns of BLEU: after `--updates`, and after
           `--minutes` of one core, including the start. MFLOP count the matrix products of an update, forward and
           backward, per target token. A finished run is not repeated. `--refine` adds a row for GNMT, refined by
           expected reward. `--ensemble` adds a row for the ensemble of all models with the BPE vocabulary.
precision  Loss curves of three fp32 seeds, and of bf16 with the first seed: nats per token in each tenth of a run. The
           bf16 run has the initial parameters, batches and dropout of the fp32 run with this seed, so the two curves
           differ by rounding alone.
estimates  Rank correlation (Spearman) of the scores of `--quality` with the chrF of each sentence, and the probability
           that a sentence of the worst tenth by chrF scores lower than another sentence (AUC).
"""

import argparse
import json
import os
import shlex
import signal
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from harness import Report, Row, Workspace, chosen, cpu_seconds, nmtkit, parser, search_path

QUIET = "--clip-norm 1 --metrics none --validate-interval none --save-interval none"
RECIPE = f"--lr 0.003 --warmup-updates 200 --dropout 0.1 {QUIET}"
INTERVAL = 25  # updates between checkpoints, of which the last three are averaged
REFINED = "gnmt_small"
REFINEMENT = (
    "--criterion expected_reward --candidates-per-sentence 8 --likelihood-weight 0.1 "
    f"--lr-scheduler fixed --lr 0.0002 --warmup-updates 0 {QUIET}"
)
DEEP_ATT = (
    "--encoder-layers 2 --decoder-layers 2 --d-embedding 128 --d-model 96 --d-memory 256 --d-attention 96 "
    "--initial-range 0.13"
)
VOCABULARIES = {"bpe": (), "char": ("--max-len", "1000"), "word": ("--separate-vocab",)}  # further flags of preprocess

# --- rivals -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Rival:
    """A row of Table 2: our preset, the flags that make it small, and the paper's BLEU and training FLOP.

    `title` is the name in the paper. `bleu` and `flop` are for En-De and En-Fr. `piece` is the unit of text, a key of
    VOCABULARIES. `generate` are flags of decoding.
    """

    arch: str
    flags: str
    title: str = "-"
    bleu: tuple[float | None, float | None] = (None, None)
    flop: tuple[float | None, float | None] = (None, None)
    piece: str = "bpe"
    generate: str = ""

    @property
    def name(self) -> str:
        return self.arch if self.piece == "bpe" else f"{self.arch}_{self.piece}"


RIVALS = (
    Rival("bytenet_small", "--dilations 1,2,4 --d-model 128 --dropout 0.3 --lr 0.004"),
    Rival(
        "bytenet_small",
        "--d-model 80 --dropout 0.3 --lr 0.004",
        "ByteNet",
        (23.75, None),
        piece="char",
    ),
    Rival("extended_neural_gpu_small", "--recomputed-steps 0"),
    Rival("deep_att_small", DEEP_ATT),
    Rival(
        "deep_att_small",
        DEEP_ATT,
        "Deep-Att + PosUnk",
        (None, 39.2),
        (None, 1.0e20),
        piece="word",
        generate="--replace-unknown",
    ),
    Rival(
        "gnmt_small",
        "--encoder-layers 3 --decoder-layers 3 --d-model 128 --d-attention 128 --initial-range 0.2",
        "GNMT + RL",
        (24.6, 39.92),
        (2.3e19, 1.4e20),
    ),
    Rival(
        "convs2s_small",
        "--encoder-widths 128,128,128 --encoder-kernels 3,3,3 --decoder-widths 128,128,128 --decoder-kernels 3,3,3 "
        "--d-embedding 128 --d-output 128 --max-positions 512",
        "ConvS2S",
        (25.16, 40.46),
        (9.6e18, 1.5e20),
    ),
    Rival(
        "moe_small",
        "--d-model 128 --d-hidden 192 --d-expert 128 --experts 8 --active-experts 2 --initial-range 0.2",
        "MoE",
        (26.03, 40.56),
        (2.0e19, 1.2e20),
    ),
    Rival(
        "transformer_tiny",
        "--encoder-layers 3 --decoder-layers 3",
        "Transformer (base)",
        (27.3, 38.1),
        (3.3e18, 3.3e18),
    ),
    Rival(
        "transformer_moe_tiny",
        "--encoder-layers 3 --decoder-layers 3 --d-ff 128 --experts 4 --active-experts 2",
    ),
)


def target_tokens(data: Path) -> int:
    """Returns the number of target tokens of the training set."""
    from nmtkit.data.dataset.binarized import Dataset

    return int(Dataset.open(data)["train"].target.lengths.sum())


def train(data: Path, save_dir: Path, flags: str, updates: int | None, seconds: float) -> float:
    """Trains until `updates`, or stops (and saves) after `seconds` of CPU time. Returns the CPU seconds used."""
    words = [sys.executable, "-m", "nmtkit", "train", str(data), *shlex.split(flags), "--threads", "1"]
    words += ["--save-dir", str(save_dir), "--max-update", str(updates or "none"), "--keep-last", "3"]
    print("$", shlex.join(words[2:]), file=sys.stderr, flush=True)
    process = subprocess.Popen(words, env=os.environ | {"PYTHONPATH": search_path()})
    used, stopped = 0.0, False
    while process.poll() is None:
        used = cpu_seconds(process.pid) or used
        if used > seconds and not stopped:
            process.send_signal(signal.SIGTERM)
            stopped = True
        time.sleep(0.2)
    if process.returncode and not stopped:
        raise RuntimeError(f"training {save_dir} ended with status {process.returncode}")
    return used


def bleu_of(data: Path, folder: Path, models: Sequence[Path], flags: str = "") -> float:
    """Returns BLEU on the test set, with a beam of 4."""
    output, scores = folder / "test.hyp", folder / "score.json"
    paths = [word for model in models for word in ("--path", str(model))]
    nmtkit("generate", str(data), "--gen-subset", "test", *paths, *shlex.split(flags), stdout=output)
    nmtkit("score", "--data", str(data), "--sys", str(output), "--metric", "bleu", "--format", "json", stdout=scores)
    (bleu,) = json.loads(scores.read_text())
    return float(bleu["score"])


def complete_run(
    data: Path, folder: Path, flags: str, updates: int | None, minutes: float | None, generate: str = ""
) -> dict[str, Any]:
    """Trains until each limit, and there averages checkpoints, translates and scores. Returns the results by limit.

    The limits are "updates" and "minutes" (of one core). Results are saved in the folder. A limit that has a saved
    result is skipped.
    """
    result, checkpoints = folder / "result.json", folder / "checkpoints"
    facts: dict[str, Any] = json.loads(result.read_text()) if result.exists() else {"core_seconds": 0.0}
    remaining = {"updates": updates, "minutes": minutes}
    while remaining := {name: limit for name, limit in remaining.items() if limit and name not in facts}:
        seconds = 60 * remaining["minutes"] - facts["core_seconds"] if "minutes" in remaining else float("inf")
        last_update = int(remaining["updates"]) if "updates" in remaining else None
        facts["core_seconds"] += train(data, checkpoints, flags, last_update, seconds)
        newest = sorted(checkpoints.glob("update_*.pt"))[-3:]
        reached = int(newest[-1].stem.removeprefix("update_"))
        name = "updates" if last_update == reached else "minutes"
        averaged = folder / f"{name}.pt"
        nmtkit("average-checkpoints", *map(str, newest), "--output", str(averaged))
        bleu = bleu_of(data, folder, [averaged], generate)
        facts[name] = {"bleu": bleu, "updates": reached, "core_seconds": round(facts["core_seconds"], 1)}
        result.write_text(json.dumps(facts))
    return facts


def size_and_cost(checkpoint: Path, data: Path) -> dict[str, float]:
    """Returns the parameters, training FLOP per target token, and training tokens per core-second of a checkpoint."""
    import torch
    from torch.utils.flop_counter import FlopCounterMode

    from nmtkit.data.dataset.binarized import Dataset
    from nmtkit.models.architectures.interface import parameter_count
    from nmtkit.models.building import from_checkpoint
    from nmtkit.training.precision import autocast, resolve

    model, _ = from_checkpoint(checkpoint)
    train = Dataset.open(data)["train"]
    similar = np.argsort(train.target.lengths, kind="stable")[len(train) // 2 :][
        :108
    ]  # pairs of similar lengths, as in an update
    batch = train.batch(np.sort(similar).astype(np.int64))
    model.train()
    torch.set_num_threads(1)

    def update() -> None:
        features = model(batch.source, batch.target_input)
        torch.nn.functional.cross_entropy(
            model.output_projection(features), batch.target_output, reduction="sum"
        ).backward()

    # oneDNN is off, because the counter does not see the products inside its fused LSTM
    warnings.filterwarnings("ignore", "TF32 acceleration")
    with FlopCounterMode(display=False) as counter, torch.backends.mkldnn.flags(enabled=False):
        update()
    seconds = []
    with autocast(resolve("auto", torch.device("cpu")), torch.device("cpu")):
        for _ in range(4):
            begin = time.process_time()
            update()
            seconds.append(time.process_time() - begin)
    cost = counter.get_total_flops() / batch.target_tokens / 1e6
    return {
        "parameters": parameter_count(model),
        "MFLOP/tok": cost,
        "tok/core-s": batch.target_tokens / min(seconds[1:]),
    }


def row_of(rival: Rival, arguments: argparse.Namespace, data: dict[str, Path], runs: Path) -> Row:
    own = data[rival.piece]
    batch = round(arguments.batch_tokens * target_tokens(own) / target_tokens(data["bpe"]))  # as many pairs
    interval = min(INTERVAL, arguments.updates)
    flags = f"--arch {rival.arch} {RECIPE} {rival.flags} --batch-tokens {batch} --save-interval-updates {interval}"
    folder = runs / rival.name
    facts = complete_run(own, folder, flags, arguments.updates, arguments.minutes, rival.generate)
    updates, minutes = facts["updates"], facts.get("minutes", {})
    row: Row = {"model": rival.name} | size_and_cost(folder / "updates.pt", own)
    row |= {"BLEU, updates": updates["bleu"], "core-s": updates["core_seconds"]}
    row |= {"BLEU, minutes": minutes.get("bleu"), "updates": minutes.get("updates"), "paper's row": rival.title}
    return row | {
        "En-De": rival.bleu[0],
        "En-Fr": rival.bleu[1],
        "FLOP En-De": rival.flop[0],
        "FLOP En-Fr": rival.flop[1],
    }


def rivals(arguments: argparse.Namespace, workspace: Workspace, report: Report) -> None:
    runs, size = workspace.folder / "rivals", ("--vocab-size", str(workspace.vocab_size))
    selected = list(chosen({rival.name: rival for rival in RIVALS}, arguments.only).values())
    pieces = {"bpe", *(rival.piece for rival in selected)}
    data = {
        piece: workspace.preprocess(f"data-{piece}", "--model-type", piece, *size, *VOCABULARIES[piece])
        for piece in pieces
    }
    rows = [row_of(rival, arguments, data, runs) for rival in selected]
    blank = dict.fromkeys(rows[0])
    for rival in selected:
        if arguments.refine and rival.arch == REFINED:
            refine = f"--arch {rival.arch} {rival.flags} {REFINEMENT} --batch-tokens {arguments.batch_tokens}"
            refine += f" --finetune-from {runs / rival.name / 'updates.pt'} --save-interval-updates {INTERVAL}"
            facts = complete_run(data["bpe"], runs / f"{rival.name}_refined", refine, arguments.refine, None)
            rows.append(blank | {"model": f"{rival.name} + expected_reward", "BLEU, updates": facts["updates"]["bleu"]})
    if arguments.ensemble:
        members = [runs / rival.name / "updates.pt" for rival in selected if rival.piece == "bpe"]
        bleu = bleu_of(data["bpe"], runs, members)
        rows.append(blank | {"model": f"ensemble of the {len(members)} of one vocabulary", "BLEU, updates": bleu})
    report.table(
        f"{arguments.updates} updates of {arguments.batch_tokens} tokens; {arguments.minutes} core-minutes", rows
    )


# --- precision --------------------------------------------------------------------------------------------------------

TENTHS = 10


def precision(arguments: argparse.Namespace, workspace: Workspace, report: Report) -> None:
    updates, batch_tokens = (10, 200) if arguments.quick else (300, 1024)
    flags = f"--arch transformer_tiny --dropout 0.3 --lr 0.002 --warmup-updates 200 --log-interval 1 {QUIET}"
    flags += f" --save-interval-minutes none --batch-tokens {batch_tokens} --max-update {updates}"
    flags += f" --threads {arguments.threads}"
    curves: dict[tuple[str, int], list[float]] = {}
    for kind, seed in (("fp32", 1), ("fp32", 2), ("fp32", 3), ("bf16", 1)):
        path = workspace.trained(f"{kind}-{seed}", f"{flags} --precision {kind} --seed {seed}")
        records = map(json.loads, (path.parent / "log.jsonl").open(encoding="utf-8"))
        losses = [record["nll"] for record in records if record["kind"] == "train"]
        size = len(losses) // TENTHS
        curves[kind, seed] = [statistics.mean(losses[i * size : (i + 1) * size]) for i in range(TENTHS)]
    rows: dict[str, Sequence[float]] = {f"{kind}, seed {seed}": curve for (kind, seed), curve in curves.items()}
    fp32 = [curve for (kind, _), curve in curves.items() if kind == "fp32"]
    rows["range of fp32"] = [max(tenth) - min(tenth) for tenth in zip(*fp32, strict=True)]
    rows["bf16 - fp32"] = [a - b for a, b in zip(curves["bf16", 1], curves["fp32", 1], strict=True)]
    table = [
        {"nats per token": name} | {str(i + 1): f"{x:.3f}" for i, x in enumerate(row)} for name, row in rows.items()
    ]
    report.table(f"loss in each tenth of {updates} updates of {batch_tokens} tokens, dropout 0.3", table)


# --- estimates --------------------------------------------------------------------------------------------------------


def ranks(values: np.ndarray) -> np.ndarray:
    """Returns the rank of each value, from 1 on; equal values have their mean rank."""
    _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
    return (np.cumsum(counts) - (counts - 1) / 2)[inverse]


def estimates(arguments: argparse.Namespace, workspace: Workspace, report: Report) -> None:
    from sacrebleu.metrics.chrf import CHRF

    import nmtkit as package

    sources, references = (workspace.lines("test", side) for side in (0, 1))
    training = f"--arch transformer_tiny --max-update {2 if arguments.quick else 900} --threads {arguments.threads}"
    model = package.load(arguments.checkpoint or workspace.trained("tiny", training))
    outputs = [result.hypotheses[0] for result in model.translate(sources, nbest=1, quality=True)]
    pairs = zip(outputs, references, strict=True)
    chrf = np.array([CHRF().sentence_score(output.text, [reference]).score for output, reference in pairs])
    worst = chrf <= np.quantile(chrf, 0.1)
    figures = {name: [getattr(output.quality, name) for output in outputs]
               for name in ("score", "mean_probability", "min_probability")}  # fmt: skip
    figures["length of the source, negative"] = [-len(source) for source in sources]
    rows: list[Row] = []
    for name, values in figures.items():
        scores = np.array(values)
        below = ranks(-scores)[worst].sum() - worst.sum() * (worst.sum() + 1) / 2
        spearman = float(np.corrcoef(ranks(scores), ranks(chrf))[0, 1])
        auc = float(below / (worst.sum() * (~worst).sum())) if (~worst).any() else None
        rows.append({"estimate": name, "Spearman": spearman, "AUC of the worst tenth": auc})
    report.table(f"{len(sources)} sentences", rows)


def main() -> None:
    parts = {"rivals": rivals, "precision": precision, "estimates": estimates}
    flags = parser(__doc__, list(parts))
    flags.add_argument("--updates", type=int, default=600, help="updates of each model of the part `rivals`")
    flags.add_argument("--minutes", type=float, help="train the rivals also for this many minutes of one core")
    flags.add_argument("--batch-tokens", type=int, default=2000, help="tokens of an update of the part `rivals`")
    flags.add_argument("--refine", type=int, default=0, metavar="N", help="updates of GNMT's refinement by reward")
    flags.add_argument("--ensemble", action="store_true", help="also measure the ensemble of the BPE models")
    flags.add_argument("--checkpoint", type=Path, help="for the part `estimates`; default: a new transformer_tiny")
    arguments = flags.parse_args()
    if arguments.quick:
        arguments.updates, arguments.batch_tokens, arguments.only = 2, 200, arguments.only or "transformer_tiny"
    workspace, report = Workspace(arguments), Report(arguments)
    for part in arguments.parts:
        parts[part](arguments, workspace, report)


if __name__ == "__main__":
    main()
