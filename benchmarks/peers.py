"""Training speed beside Marian and eole, whole commands of two threads, each in its own environment.

    python3 -m venv /tmp/marian && /tmp/marian/bin/pip install pymarian       # the real Marian 1.12
    python3 -m venv /tmp/eole && /tmp/eole/bin/pip install eole
    python benchmarks/peers.py --prefix data/train --valid data/val -s en -t de \\
        --marian /tmp/marian/bin/pymarian --eole /tmp/eole/bin/eole

Asked of each: a Transformer of 4 + 4 layers, width 128, feed-forward 256, 4 heads, one matrix for all embeddings, one
joint SentencePiece BPE model of 10,000 pieces (nmtkit trains its own: special tokens have other ids), updates of about
4,096 target tokens, label smoothing and dropout 0.1, Adam. The speed is what each program logs, target tokens per
second, the median of the second half. Marian and eole compute in fp32; nmtkit in fp32 and in bf16.
"""

import argparse
import os
import re
import statistics
import subprocess
import sys
import time
from pathlib import Path

import sentencepiece
from compare_checkouts import nmtkit

EOLE = """
src_vocab: {folder}/vocab.txt
tgt_vocab: {folder}/vocab.txt
share_vocab: true
overwrite: true
report_every: 2
data: {{corpus_1: {{path_src: {folder}/train.src, path_tgt: {folder}/train.tgt, transforms: []}}}}
model:
  architecture: transformer
  hidden_size: 128
  transformer_ff: 256
  layers: 4
  heads: 4
  share_decoder_embeddings: true
  share_embeddings: true
  embeddings: {{word_vec_size: 128, src_word_vec_size: 128, tgt_word_vec_size: 128,
    position_encoding_type: SinusoidalInterleaved}}
training:
  world_size: 0
  gpu_ranks: []
  batch_type: tokens
  batch_size: 4096
  train_steps: {updates}
  valid_steps: 1000000
  save_checkpoint_steps: {updates}
  optim: adamw
  learning_rate: 1.0
  decay_method: noam
  warmup_steps: 200
  dropout: [0.1]
  label_smoothing: 0.1
  num_workers: 0
  model_path: {folder}/eole
  compute_dtype: fp32
"""


def logged(command: list[str], pattern: str, seconds: float) -> float:
    """Returns the median of the second half of the speeds that a command logs within `seconds`."""
    environment = os.environ | {"OMP_NUM_THREADS": "2"}
    with subprocess.Popen(
        command, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    ) as process:
        try:
            output, _ = process.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            process.kill()
            output, _ = process.communicate()
    speeds = [float(speed.replace(",", "")) for speed in re.findall(pattern, output)]
    if not speeds:
        raise RuntimeError(f"{command[0]} logged no speed:\n{output[-2000:]}")
    return statistics.median(speeds[len(speeds) // 2 :])


def prepare(arguments: argparse.Namespace, folder: Path) -> None:
    """Writes the joint tokenizer and the training text in pieces."""
    sides = [f"{arguments.prefix}.{language}" for language in (arguments.source_lang, arguments.target_lang)]
    sentencepiece.SentencePieceTrainer.train(
        input=",".join(sides), model_prefix=str(folder / "joint"), vocab_size=10_000, model_type="bpe",
        bos_id=-1, pad_id=-1, unk_id=1, eos_id=0, minloglevel=2,
    )  # fmt: skip
    pieces = sentencepiece.SentencePieceProcessor(model_file=str(folder / "joint.model"))
    (folder / "joint.spm").write_bytes((folder / "joint.model").read_bytes())
    (folder / "vocab.txt").write_text("".join(f"{pieces.id_to_piece(i)}\t1\n" for i in range(2, len(pieces))))
    for name, path in zip(("src", "tgt"), sides, strict=True):
        lines = pieces.encode(Path(path).read_text().splitlines(), out_type=str)
        (folder / f"train.{name}").write_text("".join(" ".join(line) + "\n" for line in lines))


def marian(arguments: argparse.Namespace, folder: Path) -> dict[str, float]:
    model, vocabularies = folder / "marian.npz", [str(folder / "joint.spm")] * 2
    text = [f"{arguments.prefix}.{language}" for language in (arguments.source_lang, arguments.target_lang)]
    shape = (
        "--type transformer --dim-emb 128 --transformer-dim-ffn 256 --enc-depth 4 --dec-depth 4 --transformer-heads 4"
    )
    flags = "--tied-embeddings-all --cpu-threads 2 --sync-sgd --mini-batch 1000 --mini-batch-words 4096 -w 4000"
    rates = (
        "--label-smoothing 0.1 --transformer-dropout 0.1 --learn-rate 0.001 --lr-warmup 200 --clip-norm 0 --disp-freq 2"
    )
    command = [str(arguments.marian), "train", *f"{shape} {flags} {rates}".split(), "--train-sets", *text]
    command += ["--vocabs", *vocabularies, "--model", str(model), "--after-batches", str(arguments.updates)]
    return {"Marian fp32": logged(command, r"([\d,.]+) words/s", arguments.seconds)}


def eole(arguments: argparse.Namespace, folder: Path) -> dict[str, float]:
    (folder / "eole.yaml").write_text(EOLE.format(folder=folder, updates=arguments.updates))
    command = [str(arguments.eole), "train", "-c", str(folder / "eole.yaml")]
    return {"eole fp32": logged(command, r"/(\d+) tok/s", arguments.seconds)}


def ours(arguments: argparse.Namespace, folder: Path) -> dict[str, float]:
    checkout, data = Path(__file__).resolve().parents[1], folder / "data-bin"
    flags = ["-s", arguments.source_lang, "-t", arguments.target_lang, "--trainpref", arguments.prefix]
    flags += ["--validpref", arguments.valid, "--destdir", str(data), "--vocab-size", "10000"]
    nmtkit(checkout, "preprocess", *flags, "--overwrite")
    figures = {}
    for precision in ("fp32", "bf16"):
        save_dir = folder / f"nmtkit-{precision}-{time.time_ns()}"
        flags = "--arch transformer_tiny --log-interval 2 --batch-tokens 4096 --metrics none --threads 2"
        command = [sys.executable, "-m", "nmtkit", "train", str(data), *flags.split()]
        command += ["--max-update", str(arguments.updates)]
        command += ["--precision", precision, "--save-dir", str(save_dir)]
        figures[f"nmtkit {precision}"] = logged(command, r"([\d,]+) tok/s", arguments.seconds)
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prefix", required=True, help="training text, without its language")
    parser.add_argument("--valid", required=True, help="valid text, without its language")
    parser.add_argument("-s", "--source-lang", required=True)
    parser.add_argument("-t", "--target-lang", required=True)
    parser.add_argument("--marian", type=Path, help="the pymarian command of its environment; none leaves it out")
    parser.add_argument("--eole", type=Path, help="the eole command of its environment; none leaves it out")
    parser.add_argument("--updates", type=int, default=30)
    parser.add_argument("--seconds", type=float, default=120.0, help="a training is stopped after so long")
    parser.add_argument("--folder", type=Path, default=Path("peers"))
    arguments = parser.parse_args()
    folder = arguments.folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    prepare(arguments, folder)
    contestants = [ours, *([marian] if arguments.marian else []), *([eole] if arguments.eole else [])]
    for contestant in contestants:
        for name, speed in contestant(arguments, folder).items():
            print(f"{name:<24}{speed:>12,.0f} target tokens/s", flush=True)


if __name__ == "__main__":
    main()
