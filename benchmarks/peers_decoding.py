"""Decoding speed beside Marian, CTranslate2 and eole, whole commands on two cores, all with a beam of 4.

    nmtkit preprocess … --destdir data-bin
    nmtkit train data-bin --arch transformer_tiny --positions sinusoidal_fairseq … --save-dir tiny
    nmtkit train data-bin --arch transformer_tiny --pre-norm … --save-dir tiny-pre-norm
    python benchmarks/peers_decoding.py tiny/last.pt --source test.en --reference test.de \\
        --marian /tmp/marian/bin/pymarian --eole /tmp/eole/bin/eole --eole-checkpoint tiny-pre-norm/last.pt

The checkpoint has one matrix for all embeddings; Marian and CTranslate2 translate with `nmtkit export` of it. eole has
norms before its sub-layers only, so it gets another of the same shape, whose weights are written here, and with which
nmtkit is measured too. Nobody rewards length (`--lenpen 0`, `--normalize 0`), so that the search is the same. nmtkit,
Marian and CTranslate2 sort by length. Batches: nmtkit's default, 64 sentences of Marian and eole, 32 of CTranslate2.

Each command translates the source once, and three times over: from the difference comes the speed without the start. A
token is one of the reference's pieces, the same number for all; that the model is the same shows in BLEU.
Commands take turns; medians. What everybody writes stays in the folder, as do the seconds, so that the rounds may be
spread over several runs.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import sentencepiece
import torch
from torch import Tensor

from nmtkit import checkpoint
from nmtkit.formats import ctranslate2, marian_export
from nmtkit.layers.positions import sinusoids
from nmtkit.scoring.metrics import score

UNK, BOS, EOS = 0, 1, 2
NEVER = -1e4  # added to the logit of what is no piece
REPEATS = 3
BLEU_SPREAD = 2.0  # between programs that search and end differently
MARIAN = {"Marian fp32": "float32", "Marian intgemm": "intgemm8avx512", "Marian FBGEMM": "packed8avx512"}  # two in int8
CTRANSLATE2 = """\
import sys
import ctranslate2, sentencepiece
folder, compute_type, source, output = sys.argv[1:]
pieces = sentencepiece.SentencePieceProcessor(model_file=folder + "/joint.model")
translator = ctranslate2.Translator(folder, inter_threads=2, intra_threads=1, compute_type=compute_type)
lines = pieces.encode(open(source).read().splitlines(), out_type=str)
found = translator.translate_batch(lines, beam_size=4, max_batch_size=32, length_penalty=0)
open(output, "w").writelines(pieces.decode(one.hypotheses[0]) + "\\n" for one in found)
"""

Weights = dict[str, Tensor]


@dataclass(frozen=True)
class Material:
    """The model that eole gets."""

    folder: Path
    config: dict[str, int]
    weights: Weights
    pieces: sentencepiece.SentencePieceProcessor


# --- eole's model -----------------------------------------------------------------------------------------------------


def layers(material: Material) -> list[str]:
    """Returns the prefix of each layer."""
    sides = (("encoder", material.config["encoder_layers"]), ("decoder", material.config["decoder_layers"]))
    return [f"{side}.{index}." for side, count in sides for index in range(count)]


def attention_parts(weights: Weights, prefix: str) -> dict[str, Tensor]:
    """Returns the weights of one attention by the letter of their role: q, k, v, o."""
    if f"{prefix}.qkv_proj.weight" in weights:
        q, k, v = weights[f"{prefix}.qkv_proj.weight"].chunk(3)
    else:
        q = weights[f"{prefix}.q_proj.weight"]
        k, v = weights[f"{prefix}.kv_proj.weight"].chunk(2)
    return {"q": q, "k": k, "v": v, "o": weights[f"{prefix}.out_proj.weight"]}


def write_eole(material: Material) -> Path:
    from safetensors.torch import save_file

    folder, weights, width = material.folder / "eole", material.weights, material.config["d_model"]
    folder.mkdir(exist_ok=True)
    count = len(material.pieces)
    words = ["<unk>", "<blank>", "<s>", "</s>"] + [material.pieces.id_to_piece(token) for token in range(3, count)]
    rows = weights["output_projection.weight"]
    table = torch.cat([rows[UNK : UNK + 1], torch.zeros(1, width), rows[BOS:]])
    bias = torch.zeros(len(words))
    bias[1] = bias[2] = NEVER
    arrays = {"src_emb.embeddings.weight": table, "generator.bias": bias}
    for side in ("src", "tgt"):
        arrays[f"{side}_emb.pe.pe"] = sinusoids(5000, width)[:, None]
    names = {"self_attention_norm": "input_layernorm", "cross_attention_norm": "precontext_layernorm"}
    names["feed_forward_norm"] = "post_attention_layernorm"
    linears = {"q": "linear_query", "k": "linear_keys", "v": "linear_values", "o": "final_linear"}
    for ours in layers(material):
        theirs = ours.replace(".", ".transformer_layers.", 1)
        for part, name in (("self_attention", "self_attn"), ("cross_attention", "context_attn")):
            if f"{ours}{part}.out_proj.weight" in weights:
                for letter, weight in attention_parts(weights, f"{ours}{part}").items():
                    arrays[f"{theirs}{name}.{linears[letter]}.weight"] = weight
        for number, name in ((1, "gate_up_proj"), (2, "down_proj")):
            for kind in ("weight", "bias"):
                arrays[f"{theirs}mlp.{name}.{kind}"] = weights[f"{ours}feed_forward.fc{number}.{kind}"]
        for part, name in names.items():
            for kind in ("weight", "bias"):
                if f"{ours}{part}.{kind}" in weights:
                    arrays[f"{theirs}{name}.{kind}"] = weights[f"{ours}{part}.{kind}"]
        if ours.startswith("decoder"):
            arrays[f"{theirs}layer_scalar"] = torch.ones(1)
    for side in ("encoder", "decoder"):
        for kind in ("weight", "bias"):
            arrays[f"{side}.layer_norm.{kind}"] = weights[f"{side}_norm.{kind}"]
    save_file({name: tensor.float().contiguous() for name, tensor in arrays.items()}, folder / "model.00.safetensors")
    specials = {"unk_token": "<unk>", "pad_token": "<blank>", "bos_token": "<s>", "eos_token": "</s>"}
    vocabulary = {"src": words, "tgt": words, "decoder_start_token": "<s>", "specials": specials}
    (folder / "vocab.json").write_text(json.dumps(vocabulary))
    (folder / "config.json").write_text(json.dumps(eole_config(material, folder)))
    return folder


def eole_config(material: Material, folder: Path) -> dict[str, Any]:
    config = material.config
    shape = {"hidden_size": config["d_model"], "transformer_ff": config["d_ff"], "heads": config["heads"]}
    shape |= {"position_encoding_type": "SinusoidalInterleaved", "add_ffnbias": True}  # type: ignore[dict-item]
    width = {f"{side}word_vec_size": config["d_model"] for side in ("", "src_", "tgt_")}
    encoder = {"encoder_type": "transformer", "layers": config["encoder_layers"], **shape}
    decoder = {"decoder_type": "transformer", "layers": config["decoder_layers"], "with_cross_attn": True, **shape}
    encoder["src_word_vec_size"] = decoder["tgt_word_vec_size"] = config["d_model"]
    embeddings = {"position_encoding_type": "SinusoidalInterleaved", **width}
    model = {"architecture": "transformer", "layers": config["encoder_layers"], **shape, "embeddings": embeddings}
    model |= {"share_embeddings": True, "share_decoder_embeddings": True, "encoder": encoder, "decoder": decoder}
    training = {"world_size": 0, "gpu_ranks": [], "compute_dtype": "torch.float32", "model_path": str(folder)}
    vocabulary = str(folder / "vocab.json")
    files = {"src_vocab": vocabulary, "tgt_vocab": vocabulary, "share_vocab": True, "data": {}}
    return {**files, "training": training, "model": model}


# --- the contestants --------------------------------------------------------------------------------------------------


def nmtkit_command(model: Path, precision: str, source: Path, output: Path) -> list[str]:
    flags = ["--path", str(model), "--beam", "4", "--lenpen", "0", "--precision", precision, "--workers", "2"]
    quoted = " ".join([sys.executable, "-m", "nmtkit", "generate", *flags])
    return ["bash", "-c", f"{quoted} < {source} > {output}"]


def marian_command(program: Path, folder: Path, model: Path, source: Path, output: Path) -> list[str]:
    flags = "--beam-size 4 --normalize 0 --cpu-threads 2 --mini-batch 64 --maxi-batch 100 --maxi-batch-sort src"
    files = ["-c", str(folder / "decoder.yml"), "-m", str(model), "-i", str(source), "-o", str(output)]
    return [str(program), "decode", *files, *flags.split(), "-w", "500", "--quiet", "--quiet-translation"]


def ctranslate2_command(folder: Path, compute_type: str, source: Path, output: Path) -> list[str]:
    return [sys.executable, "-c", CTRANSLATE2, str(folder), compute_type, str(source), str(output)]


def eole_command(program: Path, folder: Path, source: Path, output: Path) -> list[str]:
    flags = "-beam_size 4 -length_penalty none -batch_size 64 -batch_type sents -world_size 0"
    files = ["-model_path", str(folder), "-src", str(source), "-output", str(output)]
    return [str(program), "predict", *files, *flags.split()]


def seconds(command: list[str]) -> float:
    started = time.perf_counter()
    done = subprocess.run(
        command, env=os.environ | {"OMP_NUM_THREADS": "2"}, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}")
    return time.perf_counter() - started


Command = Callable[[int], list[str]]  # of the number of times that the source is translated


def contestants(arguments: argparse.Namespace, folder: Path) -> dict[str, Command]:
    """Returns for each a function that makes its command. Models that stand there already are not written again."""

    def command(of: Callable[[Path, Path], list[str]], name: str, suffix: str, times: int) -> list[str]:
        return of(folder / f"{times}.{suffix}", output_of(folder, name, times))

    found: dict[str, Command] = {}
    models = {f"nmtkit {precision}": (arguments.checkpoint, precision) for precision in ("fp32", "bf16", "int8")}
    if arguments.eole:
        models["nmtkit fp32, pre-norm"] = arguments.eole_checkpoint, "fp32"
    for name, (path, precision) in models.items():
        found[name] = partial(command, partial(nmtkit_command, path, precision), name, "txt")
    for name, quantization in (("CTranslate2 fp32", "float32"), ("CTranslate2 int8", "int8")):
        model = folder / name.replace(" ", "-")
        if not model.is_dir():
            ctranslate2.save(arguments.checkpoint, model, quantization)  # type: ignore[arg-type]
        found[name] = partial(command, partial(ctranslate2_command, model, quantization), name, "txt")
    if arguments.marian:
        model = folder / "marian"
        if not model.is_dir():
            marian_export.save(arguments.checkpoint, model)
        for name, gemm in MARIAN.items():
            converted = model / f"{gemm}.bin"
            if not converted.is_file():
                files = ["-f", str(model / "model.npz"), "-t", str(converted)]
                seconds([str(arguments.marian), "convert", *files, "--gemm-type", gemm])
            of = partial(marian_command, arguments.marian, model, converted)
            found[name] = partial(command, of, name, "txt")
    if arguments.eole:
        of = partial(eole_command, arguments.eole, write_eole(material_of(arguments.eole_checkpoint, folder)))
        found["eole fp32, pre-norm"] = partial(command, of, "eole fp32, pre-norm", "pieces")
    return found


def output_of(folder: Path, name: str, times: int) -> Path:
    return folder / f"{name.replace(' ', '-')}.{times}"


def material_of(path: Path, folder: Path) -> Material:
    contents = checkpoint.load(path)
    assert contents["config"]["pre_norm"], "eole has norms before sub-layers only"
    return Material(folder, contents["config"], contents["model"], pieces_of(path))


def pieces_of(path: Path) -> sentencepiece.SentencePieceProcessor:
    model = checkpoint.load(path)["tokenizer"]["joint.model"]
    return sentencepiece.SentencePieceProcessor(model_proto=bytes(model.numpy()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--source", type=Path, required=True)
    parser.add_argument("--reference", type=Path, required=True)
    parser.add_argument("--marian", type=Path, help="the pymarian command of its environment; none leaves it out")
    parser.add_argument("--eole", type=Path, help="the eole command of its environment; none leaves it out")
    parser.add_argument("--eole-checkpoint", type=Path, help="the model with pre-norm that eole gets")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", help="names of contestants, with semicolons between")
    parser.add_argument("--folder", type=Path, default=Path("peers-decoding"))
    arguments = parser.parse_args()
    folder = arguments.folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    lines, references = (path.read_text().splitlines() for path in (arguments.source, arguments.reference))
    pieces = pieces_of(arguments.checkpoint)
    theirs = pieces_of(arguments.eole_checkpoint) if arguments.eole else pieces
    for count in (1, REPEATS):
        (folder / f"{count}.txt").write_text("".join(f"{line}\n" for line in lines * count))
        rows = theirs.encode(lines, out_type=str)
        (folder / f"{count}.pieces").write_text("".join(" ".join(row) + "\n" for row in rows * count))
    commands = contestants(arguments, folder)
    names = [name for name in commands if not arguments.only or name in arguments.only.split(";")]
    kept = folder / "seconds.json"
    times: dict[str, list[float]] = json.loads(kept.read_text()) if kept.is_file() else {}
    for _ in range(arguments.rounds):
        for name in names:
            for count in (1, REPEATS):
                times.setdefault(f"{name} x{count}", []).append(seconds(commands[name](count)))
            kept.write_text(json.dumps(times))
    tokens = sum(map(len, pieces.encode(references)))
    print(f"{len(lines):,} lines, {tokens:,} pieces of the reference")
    expected: dict[bool, float] = {}  # of the first contestant with the model of eole, and with the other
    for name in commands:
        if f"{name} x1" not in times:
            continue
        once, often = (statistics.median(times[f"{name} x{count}"]) for count in (1, REPEATS))
        found = output_of(folder, name, 1).read_text().splitlines()
        if name.startswith("eole"):
            found = [theirs.decode(line.split()) for line in found]
        bleu = score(found, [references])[0].value
        steady = tokens * (REPEATS - 1) / max(0.01, often - once)
        whole = f"{tokens / once:>9,.0f} tok/s a whole command ({once:.2f} s)"
        same = expected.setdefault("pre-norm" in name, bleu)
        note = "" if abs(bleu - same) < BLEU_SPREAD else "  NOT THE SAME MODEL: this speed says nothing"
        rounds = len(times[f"{name} x1"])
        print(f"{name:22}{whole}{steady:>10,.0f} without start  BLEU {bleu:.2f}  {rounds} rounds{note}")


if __name__ == "__main__":
    main()
