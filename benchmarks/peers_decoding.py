"""Decoding speed beside Marian and eole, whole commands on two cores, all with the same weights.

    nmtkit preprocess … --destdir data-bin
    nmtkit train data-bin --arch transformer_tiny --pre-norm … --save-dir tiny
    python benchmarks/peers_decoding.py tiny/last.pt --source test.en --reference test.de \\
        --marian /tmp/marian/bin/pymarian --eole /tmp/eole/bin/eole

The checkpoint is a Transformer with norms before its sub-layers, which is all that eole has, and one matrix for all
embeddings. Its weights are written in the formats of Marian and eole; the embedding of bos becomes zero, as Marian
begins a sentence with zeros. Everyone searches with a beam of 4; Marian sorts its input by length, as nmtkit does.

Each command translates the source once, and four times over: from the difference comes the speed without the start. A
token is one of the reference's pieces, the same number for all; outputs differ in length by little, as BLEU shows.
Commands take turns; medians. What everybody writes stays in the folder.

Marian does not yet translate with these weights (BLEU 1): its rows are marked, and count only once that is mended.
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

import numpy as np
import sentencepiece
import torch
from torch import Tensor

from nmtkit import checkpoint
from nmtkit.layers.positions import sinusoids
from nmtkit.scoring.metrics import score

UNK, BOS, EOS = 0, 1, 2
NEVER = -1e4  # added to the logit of what is no piece
REPEATS = 4
BLEU_SPREAD = 2.0  # between programs that search and end differently

MARIAN = """\
bert-train-type-embeddings: true
bert-type-vocab-size: 2
dec-cell: gru
dec-cell-base-depth: 2
dec-cell-high-depth: 1
dec-depth: {decoder_layers}
dim-emb: {d_model}
dim-rnn: 1024
dim-vocabs: [{vocabulary}, {vocabulary}]
enc-cell: gru
enc-cell-depth: 1
enc-depth: {encoder_layers}
enc-type: bidirectional
factors-combine: sum
factors-dim-emb: 0
input-types: []
layer-normalization: false
lemma-dependency: ""
lemma-dim-emb: 0
output-omit-bias: false
right-left: false
separator-symbol: "[eos]"
skip: false
tied-embeddings: false
tied-embeddings-all: true
tied-embeddings-src: false
transformer-aan-activation: swish
transformer-aan-depth: 2
transformer-aan-nogate: false
transformer-alibi-shift: false
transformer-alibi-trainable: false
transformer-attention-mask: default
transformer-decoder-autoreg: self-attention
transformer-decoder-dim-ffn: 0
transformer-decoder-ffn-depth: 0
transformer-depth-scaling: false
transformer-dim-aan: 2048
transformer-dim-ffn: {d_ff}
transformer-disable-position-embeddings: false
transformer-ffn-activation: relu
transformer-ffn-depth: 2
transformer-guided-alignment-layer: last
transformer-heads: {heads}
transformer-no-affine: false
transformer-no-bias: false
transformer-no-projection: false
transformer-pool: false
transformer-postprocess: da
transformer-postprocess-emb: d
transformer-postprocess-top: n
transformer-preprocess: n
transformer-rnn-projection: false
transformer-tied-layers: []
transformer-train-position-embeddings: false
type: transformer
ulr: false
ulr-dim-emb: 0
ulr-trainable-transformation: false
version: v1.12.42
"""


Weights = dict[str, Tensor]


@dataclass(frozen=True)
class Material:
    folder: Path
    config: dict[str, int]
    weights: Weights
    pieces: sentencepiece.SentencePieceProcessor
    source: list[str]
    references: list[str]


# --- the models -------------------------------------------------------------------------------------------------------


def layers(material: Material) -> list[tuple[str, str]]:
    """Returns nmtkit's prefix of each layer, and Marian's."""
    sides = (("encoder", material.config["encoder_layers"]), ("decoder", material.config["decoder_layers"]))
    return [(f"{side}.{index}.", f"{side}_l{index + 1}_") for side, count in sides for index in range(count)]


def attention_parts(weights: Weights, prefix: str) -> dict[str, Tensor]:
    """Returns the weights of one attention by the letter of their role: q, k, v, o."""
    if f"{prefix}.qkv_proj.weight" in weights:
        q, k, v = weights[f"{prefix}.qkv_proj.weight"].chunk(3)
    else:
        q = weights[f"{prefix}.q_proj.weight"]
        k, v = weights[f"{prefix}.kv_proj.weight"].chunk(2)
    return {"q": q, "k": k, "v": v, "o": weights[f"{prefix}.out_proj.weight"]}


def sines_first(weights: Weights, width: int) -> Weights:
    """Returns the weights of the same model for positions with all sines before the cosines, which Marian has.

    (Marian's trained positions cannot hold ours: its decoder takes the first one at every step.)
    """
    order = torch.cat([torch.arange(0, width, 2), torch.arange(1, width, 2)])  # the new order of the model's dimensions
    result = {}
    for name, weight in weights.items():
        written = name.endswith(("out_proj.weight", "fc2.weight")) or weight.dim() == 1
        if name.endswith("fc1.bias"):
            result[name] = weight
        else:
            result[name] = weight[order] if written else weight[:, order]
    return result


def write_marian(material: Material) -> Path:
    weights, width = sines_first(material.weights, material.config["d_model"]), material.config["d_model"]
    arrays = {"Wemb": weights["output_projection.weight"]}
    bias = torch.zeros(1, len(material.pieces))
    bias[0, BOS] = NEVER
    arrays["decoder_ff_logit_out_b"] = bias
    for ours, theirs in layers(material):
        for part, name in (("self_attention", "self"), ("cross_attention", "context")):
            if f"{ours}{part}.out_proj.weight" in weights:
                for letter, weight in attention_parts(weights, f"{ours}{part}").items():
                    arrays[f"{theirs}{name}_W{letter}"] = weight.T
                    arrays[f"{theirs}{name}_b{letter}"] = torch.zeros(1, width)
                norm(arrays, weights, f"{ours}{part}_norm", f"{theirs}{name}_Wo", "_pre")
        for number in (1, 2):
            arrays[f"{theirs}ffn_W{number}"] = weights[f"{ours}feed_forward.fc{number}.weight"].T
            arrays[f"{theirs}ffn_b{number}"] = weights[f"{ours}feed_forward.fc{number}.bias"][None]
        norm(arrays, weights, f"{ours}feed_forward_norm", f"{theirs}ffn_ffn", "_pre")
    for side in ("encoder", "decoder"):
        norm(arrays, weights, f"{side}_norm", f"{side}_top", "")
    path = material.folder / "marian.npz"
    settings = MARIAN.format(vocabulary=len(material.pieces), **material.config).encode() + b"\0"
    contents = {name: np.ascontiguousarray(tensor.float().numpy()) for name, tensor in arrays.items()}
    np.savez(path, **contents, **{"special:model.yml": np.frombuffer(settings, np.int8)})  # type: ignore[arg-type]
    return path


def norm(arrays: Weights, weights: Weights, ours: str, theirs: str, suffix: str) -> None:
    arrays[f"{theirs}_ln_scale{suffix}"] = weights[f"{ours}.weight"][None]
    arrays[f"{theirs}_ln_bias{suffix}"] = weights[f"{ours}.bias"][None]


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
    for ours, _ in layers(material):
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


def write_nmtkit(material: Material, contents: checkpoint.Checkpoint) -> Path:
    path = material.folder / "nmtkit.pt"
    contents.pop("training", None)
    checkpoint.save(path, {**contents, "model": material.weights})
    return path


# --- the contestants --------------------------------------------------------------------------------------------------


def nmtkit_command(model: Path, precision: str, source: Path, output: Path) -> list[str]:
    flags = ["--path", str(model), "--beam", "4", "--precision", precision, "--workers", "2"]
    quoted = " ".join([sys.executable, "-m", "nmtkit", "generate", *flags])
    return ["bash", "-c", f"{quoted} < {source} > {output}"]


def marian_command(program: Path, model: Path, vocabulary: Path, source: Path, output: Path) -> list[str]:
    flags = (
        "--beam-size 4 --normalize 0.6 --cpu-threads 2 --mini-batch 64 --maxi-batch 100 --maxi-batch-sort src --quiet"
    )
    files = ["-m", str(model), "-v", str(vocabulary), str(vocabulary), "-i", str(source), "-o", str(output)]
    return [str(program), "decode", *flags.split(), *files, "-w", "500", "--quiet-translation"]


def eole_command(program: Path, folder: Path, source: Path, output: Path) -> list[str]:
    flags = "-beam_size 4 -batch_size 64 -batch_type sents -world_size 0"
    return [
        str(program),
        "predict",
        "-model_path",
        str(folder),
        "-src",
        str(source),
        "-output",
        str(output),
        *flags.split(),
    ]


def seconds(command: list[str]) -> float:
    started = time.perf_counter()
    done = subprocess.run(
        command, env=os.environ | {"OMP_NUM_THREADS": "2"}, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}")
    return time.perf_counter() - started


Command = Callable[[int], list[str]]  # of the number of times that the source is translated


def contestants(arguments: argparse.Namespace, material: Material, ours: Path) -> dict[str, tuple[Command, bool]]:
    """Returns for each a function that makes its command, and whether its output is pieces."""
    folder = material.folder
    found: dict[str, tuple[Command, bool]] = {}
    for precision in ("fp32", "bf16", "int8"):
        found[f"nmtkit {precision}"] = (
            partial(
                lambda name, n: nmtkit_command(ours, name, folder / f"{n}.txt", folder / f"nmtkit-{name}.{n}"),
                precision,
            ),
            False,
        )
    if arguments.marian:
        model = write_marian(material)
        for name, gemm in (("fp32", "float32"), ("int8", "intgemm8avx512")):
            converted = model.with_name(f"marian-{name}.bin")
            seconds([str(arguments.marian), "convert", "-f", str(model), "-t", str(converted), "--gemm-type", gemm])
            found[f"Marian {name}"] = (
                partial(
                    lambda path, name, n: marian_command(
                        arguments.marian, path, folder / "joint.spm", folder / f"{n}.txt", folder / f"Marian-{name}.{n}"
                    ),
                    converted,
                    name,
                ),
                False,
            )
    if arguments.eole:
        model = write_eole(material)
        found["eole fp32"] = (
            lambda n: eole_command(arguments.eole, model, folder / f"{n}.pieces", folder / f"eole-fp32.{n}"),
            True,
        )
    return found


def translations(path: Path, pieces: sentencepiece.SentencePieceProcessor, in_pieces: bool) -> list[str]:
    lines = path.read_text().splitlines()
    return [pieces.decode(line.split()) for line in lines] if in_pieces else lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--source", type=Path, required=True)
    parser.add_argument("--reference", type=Path, required=True)
    parser.add_argument("--marian", type=Path, help="the pymarian command of its environment; none leaves it out")
    parser.add_argument("--eole", type=Path, help="the eole command of its environment; none leaves it out")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", help="comma-separated names of contestants")
    parser.add_argument("--folder", type=Path, default=Path("peers-decoding"))
    arguments = parser.parse_args()
    folder = arguments.folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    contents = checkpoint.load(arguments.checkpoint)
    assert contents["config"]["pre_norm"], "eole has norms before sub-layers only"
    model = bytes(contents["tokenizer"]["joint.model"].numpy())
    (folder / "joint.spm").write_bytes(model)
    weights = {name: tensor.clone() for name, tensor in contents["model"].items()}
    for name in ("source_embedding.tokens.weight", "target_embedding.tokens.weight", "output_projection.weight"):
        weights[name][BOS] = 0
    pieces = sentencepiece.SentencePieceProcessor(model_proto=model)
    lines, references = (path.read_text().splitlines() for path in (arguments.source, arguments.reference))
    material = Material(folder, contents["config"], weights, pieces, lines, references)
    for count in (1, REPEATS):
        (folder / f"{count}.txt").write_text("".join(f"{line}\n" for line in lines * count))
        rows = pieces.encode(lines, out_type=str)
        (folder / f"{count}.pieces").write_text("".join(" ".join(row) + "\n" for row in rows * count))
    commands = contestants(arguments, material, write_nmtkit(material, contents))
    names = [name for name in commands if not arguments.only or name in arguments.only.split(",")]
    times: dict[tuple[str, int], list[float]] = {(name, count): [] for name in names for count in (1, REPEATS)}
    for _ in range(arguments.rounds):
        for name, count in times:
            times[name, count].append(seconds(commands[name][0](count)))
    tokens = sum(map(len, pieces.encode(references)))
    print(f"{len(lines):,} lines, {tokens:,} pieces of the reference, {arguments.rounds} rounds")
    expected: float | None = None  # of the first contestant
    for name in names:
        once, often = (statistics.median(times[name, count]) for count in (1, REPEATS))
        found = translations(folder / (name.replace(" ", "-") + ".1"), pieces, commands[name][1])
        bleu = score(found, [references])[0].value
        steady = tokens * (REPEATS - 1) / max(0.01, often - once)
        whole = f"{tokens / once:>9,.0f} tok/s a whole command ({once:.1f} s)"
        expected = bleu if expected is None else expected
        note = "" if abs(bleu - expected) < BLEU_SPREAD else "  NOT THE SAME MODEL: this speed says nothing"
        print(f"{name:12}{whole}{steady:>10,.0f} without start  BLEU {bleu:.1f}{note}")


if __name__ == "__main__":
    main()
