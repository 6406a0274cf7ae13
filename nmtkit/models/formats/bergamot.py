"""Exports a student (a small, fast model) for the engines of browsers: Bergamot (Firefox Translations) and slimt.

A folder holds the model in 8 bits, the SentencePiece model, the lexical shortlist and config.yml. The file of the model
has Marian's binary format: version, number of tensors, headers (length of the name, type, number of dimensions, bytes
of data), names, shapes, an offset to the next multiple of 256 bytes, and the data. All numbers are little-endian; data
is padded to multiples of 256 bytes.

The elements of a matrix have 8 bits: a weight w becomes round(w s). Each matrix has one scale s = 127 / max |w|, which
follows the elements. The shape in the file is the shape in Marian, but the elements have the order of torch: all
weights of the first output, then all weights of the second output, and so on. The engines also need a scale for the
input of each product, in a tensor whose name is the name of the matrix with the ending _QuantMultA. These scales come
from the activations of a few sentences. The embeddings are also the output projection.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from nmtkit.config.files import new_folder
from nmtkit.data.packed import Packed
from nmtkit.data.tokenizers.tokenizer import BOS, EOS, Tokenizer
from nmtkit.models import building, checkpoint
from nmtkit.models.architectures.transformer import Transformer
from nmtkit.models.formats import lexical_shortlist
from nmtkit.models.formats.lexical_shortlist import LexicalEntries, NumpyArray
from nmtkit.models.formats.marian import NORM_EPS, POSITIONS, SETTINGS
from nmtkit.models.formats.marian_export import as_yaml, check_tokenizer, settings_of, to_marian
from nmtkit.models.formats.names import MARIAN
from nmtkit.models.formats.writing import LENGTH_EXPONENT, SIZES, check_expressible, write_files

SAME = SIZES | {"share_embeddings", "tie_output", "zero_bos"}
ALLOWED: dict[str, tuple[Any, ...]] = {"decoder_self_attention": ("ssru",), "activation": ("relu",)}
ALLOWED |= {"positions": (POSITIONS,), "norm_eps": (NORM_EPS, 1e-5)}

MODEL, VOCABULARY, SHORTLIST = "model.intgemm.alphas.bin", "vocab.spm", "lex.s2t.bin"
VERSION, ALIGNMENT = 1, 256
FLOAT32, INT8, INTGEMM8 = 0x0404, 0x0101, 0x4101  # Marian's codes of data types
INPUT_SCALE = "_QuantMultA"
OUTPUT = "none"  # name of the output projection in Marian; the matrix itself is stored as the embeddings

Item = tuple[int, tuple[int, ...], bytes]  # type, shape, data


def save(source: Path, destination: Path, pairs: Sequence[tuple[str, str]]) -> None:
    """Writes `source`, the checkpoint of a student, as a folder for Bergamot and slimt.

    `pairs` are sentences and their translations. The scales come from the activations for these pairs. Raises
    ValueError if there are no pairs, or if the engines do not support the architecture or the tokenizer. The message
    names the reason.
    """
    if not pairs:
        raise ValueError("the scales of an int8 model come from sentences; give a file with at least one line")
    contents = checkpoint.load(source)
    model, tokenizer = building.from_contents(contents, source)
    transformer = check_expressible(model, source, "Bergamot", SAME, ALLOWED)
    check_tokenizer(tokenizer, source)
    shared = transformer.source_embedding.tokens is transformer.target_embedding.tokens
    if not (tokenizer.one_model and shared and transformer.config.tie_output):
        raise ValueError(
            f"{source} has several vocabularies or matrices; Bergamot supports only models with one vocabulary, and "
            "with one matrix for both embeddings and the output projection; preprocess with a joint vocabulary, and "
            "train with --share-embeddings --tie-output"
        )
    config, size = transformer.config, tokenizer.target_size
    if config.d_model % 64 or config.d_ff % 64 or size % 8:
        raise ValueError(
            f"{source} has d_model {config.d_model}, d_ff {config.d_ff} and {size:,} pieces; the 8-bit products of "
            "Bergamot need widths that are multiples of 64, and a vocabulary size that is a multiple of 8"
        )
    weights = to_marian(transformer)
    scales = input_scales(transformer, tokenizer, pairs)
    settings = as_yaml(settings_of(transformer.config, tokenizer)).encode() + b"\0"
    data = model_file({**items_of(weights, scales), SETTINGS: (INT8, (len(settings),), settings)})
    with new_folder(destination) as folder:
        write_files(folder, {MODEL: data, VOCABULARY: tokenizer.source_model, "config.yml": CONFIG})
        lexical_shortlist.write_binary(folder / SHORTLIST, shortlist_of(contents, tokenizer), tokenizer)


CONFIG = f"""\
relative-paths: true
models: [{MODEL}]
vocabs: [{VOCABULARY}, {VOCABULARY}]
shortlist: [{SHORTLIST}, false]
beam-size: 1
normalize: {LENGTH_EXPONENT}
word-penalty: 0
mini-batch-words: 1024
max-length-break: 128
max-length-factor: 2.0
workspace: 128
skip-cost: true
cpu-threads: 0
quiet: true
quiet-translation: true
gemm-precision: int8shiftAlphaAll
alignment: soft
"""


def shortlist_of(contents: Mapping[str, Any], tokenizer: Tokenizer) -> LexicalEntries:
    """Returns the shortlist of a checkpoint, or a shortlist that allows all pieces."""
    none = np.empty(0, np.int64)
    if "shortlist" not in contents:
        return LexicalEntries(none, none, None, np.arange(tokenizer.target_size))
    state = {name: tensor.numpy().astype(np.int64) for name, tensor in contents["shortlist"].items()}
    sources = np.repeat(np.arange(len(state["lengths"])), state["lengths"])
    return LexicalEntries(sources, state["targets"], None, np.append(state["frequent"], EOS))


# --- scales of the inputs -------------------------------------------------------------------------------------------


def products(model: Transformer) -> dict[nn.Module, list[str]]:
    """Maps each linear layer of nmtkit to the names of its matrices in Marian. A layer may hold several matrices."""
    modules = dict(model.named_modules())
    weights = {modules.get(name.removesuffix(".weight")): theirs for name, theirs in MARIAN.of(model.config).items()}
    weights[model.output_projection] = [OUTPUT]
    return {module: theirs for module, theirs in weights.items() if isinstance(module, nn.Linear)}


def input_scales(model: Transformer, tokenizer: Tokenizer, pairs: Sequence[tuple[str, str]]) -> dict[str, float]:
    """Returns the scale of the input of each product, by the name of its matrix in Marian.

    Each sentence gives one value for each product: the largest absolute input. A scale is 127 / m. m is the mean of
    these values plus 1.1 standard deviations, but at most the largest value. Inputs larger than m are clipped.
    """
    layers = products(model)
    largest: dict[nn.Module, list[float]] = {module: [] for module in layers}

    def record(module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        largest[module].append(float(inputs[0].abs().max()))

    hooks = [module.register_forward_pre_hook(record) for module in layers]
    sources = tokenizer.encode_source([source for source, _ in pairs]).lists()
    targets = tokenizer.encode_target([target for _, target in pairs]).lists()
    with torch.inference_mode():
        for source, target in zip(sources, targets, strict=True):
            features = model(Packed.from_lists([source]), Packed.from_lists([[BOS, *target[:-1]]]))
            model.output_projection(features)
    for hook in hooks:
        hook.remove()
    scales: dict[str, float] = {}
    for module, values in largest.items():
        limit = min(float(np.mean(values) + 1.1 * np.std(values)), max(values))
        scales |= dict.fromkeys(layers[module], 127 / max(limit, 1e-6))
    return scales


# --- the file of the model ------------------------------------------------------------------------------------------


def items_of(weights: Mapping[str, Tensor], scales: Mapping[str, float]) -> dict[str, Item]:
    """Returns all tensors in the form of the file: matrices in 8 bits, all other tensors and the scales in fp32."""
    items: dict[str, Item] = {}
    for name, tensor in weights.items():
        array = tensor.numpy()
        if name == "Wemb":
            items[name] = quantized(array, array)
        elif name in scales:
            items[name] = quantized(array, array.T)
        else:
            items[name] = FLOAT32, array.shape, array.astype("<f4").tobytes()
    for name, scale in scales.items():
        items[name + INPUT_SCALE] = FLOAT32, (1, 1), np.float32(scale).tobytes()
    return items


def quantized(matrix: NumpyArray, stored: NumpyArray) -> Item:
    """Returns `matrix` in 8 bits, followed by its scale. `stored` is the matrix in the order of the file."""
    scale = np.float32(127 / max(float(np.abs(matrix).max()), 1e-12))
    values = np.rint(stored * scale).clip(-127, 127).astype(np.int8)
    return INTGEMM8, matrix.shape, values.tobytes() + scale.tobytes()


def model_file(items: Mapping[str, Item]) -> bytes:
    """Returns the contents of a file in Marian's binary format."""
    names = [name.encode() + b"\0" for name in items]
    padded = [data + bytes(-len(data) % ALIGNMENT) for _, _, data in items.values()]
    rows = zip(names, items.values(), padded, strict=True)
    headers = [(len(name), type, len(shape), len(data)) for name, (type, shape, _), data in rows]
    start = np.array([VERSION, len(items), *(number for row in headers for number in row)], "<u8").tobytes()
    start += b"".join(names)
    start += b"".join(np.array(shape, "<i4").tobytes() for _, shape, _ in items.values())
    offset = -(len(start) + 8) % ALIGNMENT
    return b"".join([start, np.uint64(offset).tobytes(), bytes(offset), *padded])
