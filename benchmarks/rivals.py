"""Table 2 of "Attention Is All You Need" in miniature: the Transformer and its rivals on one small task.

    python benchmarks/rivals.py --runs runs/rivals               # the demo corpus: 600 updates of 2,000 tokens
    python benchmarks/rivals.py --runs runs/rivals --minutes 2   # and, beside it, two core-minutes of training each
    python benchmarks/rivals.py --runs runs/rivals --minutes 2 --refine 40 --ensemble
    python benchmarks/rivals.py --runs runs/rivals --only gnmt_small,moe_small   # the table shows all that have run
    python benchmarks/rivals.py --runs runs/rivals-m30k --text m30k --vocab-size 4000 --batch-tokens 4096

Every model is trained, averaged, and translates the test set through the commands of nmtkit. Sizes are of the order of
the Transformer's; a finished run is not repeated. All models read one BPE vocabulary; ByteNet and Deep-Att also read
what they were published on, characters and (with unknown words replaced) words, in batches of equally many sentences.
One training serves both columns of BLEU: the learning rate does not depend on the end of the run, so a model is scored
where it first reaches a limit, and continues to the other. Minutes are CPU time of one core, start-up included (Linux
only). FLOP are those of the matrix products of an update, forward and backward, per target token, counted while a model
trains on one batch; tokens per core-second are measured on the same batch. Writes rivals.json.
"""

import argparse
import json
import os
import shlex
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

NMTKIT = (sys.executable, "-m", "nmtkit")
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
NO_ROW: dict[str, Any] = {"title": "", "paper_bleu": (None, None), "paper_flop": (None, None)}  # none of the paper's
VOCABULARIES = {"bpe": (), "char": ("--max-len", "1000"), "word": ("--separate-vocab",)}  # further flags of preprocess


@dataclass(frozen=True)
class Rival:
    """A row of Table 2: the preset here, its miniature, and the paper's BLEU and training FLOP, En-De and En-Fr.

    `piece` is its unit of text, one of VOCABULARIES; `generate` are flags of its decoding.
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


def call(*arguments: str, output: Path | None = None) -> None:
    print("$ nmtkit", shlex.join(arguments), f"> {output}" if output else "", file=sys.stderr, flush=True)
    with (output or Path("/dev/null")).open("wb") as file:
        subprocess.run([*NMTKIT, *arguments], stdout=file, check=True)


def demo_text(folder: Path) -> Path:
    """Writes the corpus of the demo, unless it exists; returns its folder."""
    from nmtkit.demo.run import read_corpus, write_corpus

    text = folder / "text"
    if not text.exists():
        text.mkdir()
        write_corpus(read_corpus(), text)
    return text


def binarized(text: Path, runs: Path, piece: str, vocab_size: int) -> Path:
    """Runs `preprocess` on `text` (train, valid and test .en and .de), unless its output exists; returns that."""
    binary = runs / f"data-{piece}"
    if not binary.exists():
        files = [f"--{split}pref={text}/{split}" for split in ("train", "valid", "test")]
        vocabulary = ("--model-type", piece, "--vocab-size", str(vocab_size), *VOCABULARIES[piece])
        call("preprocess", "-s", "en", "-t", "de", *files, "--destdir", str(binary), *vocabulary)
    return binary


def tokens(data: Path) -> int:
    """Returns the target tokens of the training set."""
    from nmtkit.data.binarized import Dataset

    return int(Dataset.open(data)["train"].target.lengths.sum())


def train(data: Path, save_dir: Path, flags: str, updates: int | None, seconds: float) -> float:
    """Trains until `updates`, or stops (and saves) after `seconds` of CPU time. Returns the CPU seconds used."""
    arguments = ["train", str(data), *shlex.split(flags), "--threads", "1", "--save-dir", str(save_dir)]
    arguments += ["--max-update", str(updates or "none"), "--save-interval-updates", str(INTERVAL), "--keep-last", "3"]
    print("$ nmtkit", shlex.join(arguments), file=sys.stderr, flush=True)
    process = subprocess.Popen([*NMTKIT, *arguments])
    used, asked = 0.0, False
    while process.poll() is None:
        used = core_seconds(process.pid) or used
        if used > seconds and not asked:
            process.send_signal(signal.SIGTERM)
            asked = True
        time.sleep(0.2)
    if process.returncode and not asked:
        raise SystemExit(f"rivals.py: training {save_dir} failed")
    return used


def core_seconds(pid: int) -> float:
    """Returns the CPU seconds of all threads of a process; 0 after its end."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return 0.0
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def evaluate(data: Path, folder: Path, models: Sequence[Path], flags: str = "") -> float:
    """Returns BLEU on the test set, with a beam of 4."""
    output, scores = folder / "test.hyp", folder / "score.json"
    paths = [word for model in models for word in ("--path", str(model))]
    call("generate", str(data), "--gen-subset", "test", *paths, *shlex.split(flags), output=output)
    call("score", "--data", str(data), "--sys", str(output), "--metric", "bleu", "--format", "json", output=scores)
    (bleu,) = json.loads(scores.read_text())
    return float(bleu["score"])


def complete_run(
    data: Path, folder: Path, flags: str, updates: int | None, minutes: float | None, generate: str = ""
) -> dict[str, Any]:
    """Trains, and averages, translates and scores at each limit. Returns the results by limit, "updates" or "minutes".

    Results are saved in the folder, and limits with results are skipped.
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
        call("average-checkpoints", *map(str, newest), "--output", str(averaged))
        bleu = evaluate(data, folder, [averaged], generate)
        facts[name] = {"bleu": bleu, "updates": reached, "core_seconds": round(facts["core_seconds"], 1)}
        result.write_text(json.dumps(facts))
    return facts


def size_and_cost(checkpoint: Path, data: Path) -> dict[str, float]:
    """Returns the parameters, training FLOP per target token, and training tokens per core-second of a checkpoint."""
    import numpy as np
    import torch
    from torch.utils.flop_counter import FlopCounterMode

    from nmtkit.architectures.interface import parameter_count
    from nmtkit.data.binarized import Dataset
    from nmtkit.models import from_checkpoint
    from nmtkit.training.precision import autocast, resolve

    model, _ = from_checkpoint(checkpoint)
    train = Dataset.open(data)["train"]
    similar = np.argsort(train.target.lengths, kind="stable")[len(train) // 2 :][
        :108
    ]  # of similar lengths, as in an update
    batch = train.batch(np.sort(similar).astype(np.int64))
    model.train()
    torch.set_num_threads(1)

    def update() -> None:
        features = model(batch.source, batch.target_input)
        torch.nn.functional.cross_entropy(
            model.output_projection(features), batch.target_output, reduction="sum"
        ).backward()

    # the library's fused LSTM hides its products from the counter
    warnings.filterwarnings("ignore", "TF32 acceleration")
    with FlopCounterMode(display=False) as counter, torch.backends.mkldnn.flags(enabled=False):
        update()
    seconds = []
    with autocast(resolve("auto", torch.device("cpu")), torch.device("cpu")):
        for _ in range(4):
            begin = time.process_time()
            update()
            seconds.append(time.process_time() - begin)
    return {
        "parameters": parameter_count(model),
        "mflop": counter.get_total_flops() / batch.target_tokens / 1e6,
        "tokens_per_core_second": batch.target_tokens / min(seconds[1:]),
    }


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Returns the rows as a Markdown table."""

    def cell(value: float | None, form: str = ".1f") -> str:
        return "" if value is None else format(value, form)

    lines = [
        "| model | parameters | MFLOP / token | tokens / core-second | BLEU, equal updates (core-seconds) "
        "| BLEU, equal core-minutes (updates) "
        "| paper's row | En-De | En-Fr | FLOP En-De | FLOP En-Fr |",
        "|---|---:|---:|---:|---:|---:|---|---:|---:|---:|---:|",
    ]
    for row in rows:
        updates, minutes = row.get("updates"), row.get("minutes")
        by_updates = f"{updates['bleu']:.1f}" if updates else ""
        if updates and "core_seconds" in updates:  # an ensemble has none
            by_updates += f" ({updates['core_seconds']:.0f})"
        by_minutes = f"{minutes['bleu']:.1f} ({minutes['updates']:,})" if minutes else ""
        lines.append(
            f"| {row['model']} | {cell(row.get('parameters'), ',')} | {cell(row.get('mflop'))} "
            f"| {cell(row.get('tokens_per_core_second'), ',.0f')} | {by_updates} | {by_minutes} "
            f"| {row['title']} | {' | '.join(cell(value, '.2f') for value in row['paper_bleu'])} "
            f"| {' | '.join(cell(value, '.1e') for value in row['paper_flop'])} |"
        )
    return "\n".join(lines)


def run(rival: Rival, arguments: argparse.Namespace, data: Path, limits: bool) -> dict[str, Any]:
    """Returns a row of the table; with `limits`, trains to those not reached yet."""
    batch = round(arguments.batch_tokens * tokens(data) / tokens(arguments.runs / "data-bpe"))
    flags = f"--arch {rival.arch} {RECIPE} {rival.flags} --batch-tokens {batch} {arguments.flags}"
    folder = arguments.runs / rival.name
    until = (arguments.updates, arguments.minutes) if limits else (None, None)
    facts = complete_run(data, folder, flags, *until, rival.generate)
    row = {"model": rival.name, "title": rival.title, "paper_bleu": rival.bleu, "paper_flop": rival.flop}
    return row | facts | size_and_cost(next(folder.glob("*.pt")), data)


def refined(rival: Rival, arguments: argparse.Namespace, data: Path) -> dict[str, Any]:
    """Returns GNMT's second row: the same model, fine-tuned on expected reward."""
    start = arguments.runs / rival.name / "updates.pt"
    flags = f"--arch {rival.arch} {rival.flags} {REFINEMENT} --batch-tokens {arguments.batch_tokens} {arguments.flags}"
    folder = arguments.runs / f"{rival.name}_refined"
    facts = complete_run(data, folder, f"{flags} --finetune-from {start}", arguments.refine, None)
    return NO_ROW | {"model": f"{rival.name} + expected_reward", "updates": facts["updates"]}


def ensemble(rivals: Sequence[Rival], arguments: argparse.Namespace, data: Path) -> dict[str, Any]:
    """Returns the row of the ensemble of all models that share a vocabulary."""
    folder = arguments.runs / "ensemble"
    folder.mkdir(exist_ok=True)
    bleu = evaluate(data, folder, [arguments.runs / rival.name / "updates.pt" for rival in rivals])
    return NO_ROW | {"model": f"ensemble of the {len(rivals)} of one vocabulary", "updates": {"bleu": bleu}}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=Path, required=True, help="folder of the runs")
    parser.add_argument("--text", type=Path, help="folder of train, valid and test .en and .de; else the demo corpus")
    parser.add_argument("--vocab-size", type=int, default=1000)
    parser.add_argument("--updates", type=int, default=600)
    parser.add_argument("--minutes", type=float, help="also train for this many minutes of one core")
    parser.add_argument("--batch-tokens", type=int, default=2000)
    parser.add_argument("--only", help="rivals to run, with commas")
    parser.add_argument("--refine", type=int, default=0, metavar="N", help="updates of GNMT's refinement by reward")
    parser.add_argument("--ensemble", action="store_true", help="also all models of one vocabulary together")
    parser.add_argument("--flags", default="", help="further flags of every training")
    arguments = parser.parse_args()
    runs = arguments.runs
    runs.mkdir(parents=True, exist_ok=True)
    text = arguments.text or demo_text(runs)
    data = {piece: binarized(text, runs, piece, arguments.vocab_size) for piece in VOCABULARIES}
    wanted = arguments.only.split(",") if arguments.only else [rival.name for rival in RIVALS]
    shown = [rival for rival in RIVALS if rival.name in wanted or (runs / rival.name / "result.json").exists()]
    rows = [run(rival, arguments, data[rival.piece], rival.name in wanted) for rival in shown]
    if arguments.refine:
        rows += [refined(rival, arguments, data["bpe"]) for rival in shown if rival.arch == REFINED]
    if arguments.ensemble:
        rows.append(ensemble([rival for rival in shown if rival.piece == "bpe"], arguments, data["bpe"]))
    print(table(rows))
    (runs / "rivals.json").write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
