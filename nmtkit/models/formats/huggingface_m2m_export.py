"""Exports a Transformer of several languages as a folder for M2M100ForConditionalGeneration of transformers.

The tokenizer of M2M-100 has a fixed list of 100 languages. The language tokens follow the pieces, in the order of this
list. The export has an embedding for each language token. Tokens that the model does not have, such as the tokens of
other languages, get copies of the embedding of <s>, because a trained model never predicts <s>.

M2M-100 has no output bias. The output bias of an imported model only hides ids of nmtkit: <s>, if the decoder of the
original starts from </s>, and pieces that the original does not have. The export leaves out these ids, so the export of
an import has the same weights as the original.
"""

from collections.abc import Collection
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nmtkit.config.files import write_folder
from nmtkit.data.checkpoint_file import Checkpoint
from nmtkit.data.tokenizers.tokenizer import BOS, EOS, UNK, Tokenizer
from nmtkit.models.architectures.transformer import Transformer
from nmtkit.models.architectures.transformer_config import TransformerConfig
from nmtkit.models.formats.expressible import check_expressible
from nmtkit.models.formats.huggingface import (
    CONFIG_FILE,
    GENERATION_FILE,
    M2M_100,
    SPM_FILE,
    TOKENIZER_FILE,
    VOCAB_FILE,
)
from nmtkit.models.formats.huggingface_tensors import common_settings, layer_tensors, write_json
from nmtkit.models.formats.model_card import model_card
from nmtkit.models.formats.vocabulary import HIDDEN, is_unused, unused
from nmtkit.models.formats.weights import save_safetensors

PROGRAM = "M2M100ForConditionalGeneration"
SAME = {"encoder_layers", "decoder_layers", "d_model", "d_ff", "heads", "max_positions", "scale_embeddings"}
SAME |= {"attention_bias", "output_bias"}
ALLOWED = {
    "activation": ("relu", "gelu", "swish"),
    "positions": ("sinusoidal_fairseq",),
    "pre_norm": (True,),
    "position_offset": (2,),  # M2M-100 counts positions from the id of the padding plus 1
}
START, PAD, END, UNKNOWN = 0, 1, 2, 3  # ids of M2M-100; START is <s>, from which the decoder of nmtkit starts
NAMES = {"<s>": START, "<pad>": PAD, "</s>": END, "<unk>": UNKNOWN}
USAGE = [
    "```python",
    "from transformers import M2M100ForConditionalGeneration, M2M100Tokenizer",
    "",
    'tokenizer = M2M100Tokenizer.from_pretrained(FOLDER, src_lang="{source}")',
    "model = M2M100ForConditionalGeneration.from_pretrained(FOLDER)",
    'inputs = tokenizer(["…"], return_tensors="pt")',
    'output = model.generate(**inputs, forced_bos_token_id=tokenizer.get_lang_id("{target}"))',
    "print(tokenizer.batch_decode(output, skip_special_tokens=True))",
    "```",
]


def save(contents: Checkpoint, model: Any, tokenizer: Tokenizer, source: Path, destination: Path) -> None:
    """Exports the model of the checkpoint file `source` to the folder `destination`.

    Raises ValueError for settings or languages that M2M-100 does not support.
    """
    check_languages(tokenizer, source)
    transformer = check_expressible(model, source, PROGRAM, SAME, ALLOWED)
    config = transformer.config
    first, second = (*tokenizer.languages, "de")[:2]
    usage = [line.format(source=first, target=second) for line in USAGE]
    hidden = hidden_ids(transformer, tokenizer, source)
    pieces, table = list(ordinary_pieces(tokenizer, hidden)), rows_of(tokenizer, hidden)
    ids = IDS | {"decoder_start_token_id": END if BOS in hidden else START}

    def fill(folder: Path) -> None:
        save_safetensors(to_transformers(transformer, table), folder / "model.safetensors", {"format": "pt"})
        write_json(folder / CONFIG_FILE, settings_of(config, len(table)) | ids)
        forbidden = [[START], [PAD], [UNKNOWN]]
        write_json(folder / GENERATION_FILE, {"num_beams": 4, "max_length": 512, "bad_words_ids": forbidden} | ids)
        (folder / SPM_FILE).write_bytes(tokenizer.source_model)
        write_json(folder / VOCAB_FILE, NAMES | {piece: id for id, piece in enumerate(pieces, len(NAMES))})
        about: dict[str, Any] = {"tokenizer_class": "M2M100Tokenizer", "language_codes": "m2m100"}
        about |= {"num_madeup_words": len(table) - len(NAMES) - len(pieces) - len(M2M_100.split())}
        write_json(folder / TOKENIZER_FILE, about | {"src_lang": first, "model_max_length": config.max_positions})
        card = model_card(contents, config, ["library_name: transformers"], usage, "m2m_100")
        (folder / "README.md").write_text(card, encoding="utf-8")

    write_folder(destination, fill)


IDS = {"pad_token_id": PAD, "bos_token_id": START, "eos_token_id": END}


def check_languages(tokenizer: Tokenizer, source: Path) -> None:
    """Raises ValueError unless the tokenizer is joint, has tokens such as __de__, and has only languages of M2M-100."""
    tokens = tokenizer.source_pieces(list(tokenizer.languages.values()))
    advice = "give --format safetensors"
    if not tokenizer.one_model or any(not token.startswith("__") for token in tokens):
        raise ValueError(
            f"{source} has language tokens such as {tokens[0]}, but {PROGRAM} needs one tokenizer with tokens such as "
            f"__de__ (preprocess --language-tokens both); or {advice}"
        )
    missing = sorted(set(tokenizer.languages) - set(M2M_100.split()))
    if missing:
        raise ValueError(f"{source} has languages that M2M100Tokenizer does not have: {', '.join(missing)}; {advice}")


def hidden_ids(model: Transformer, tokenizer: Tokenizer, source: Path) -> set[int]:
    """Returns the ids that the output bias hides. Raises ValueError if the export would have other probabilities.

    A hidden id can be left out if the bias of the other ids is 0, and if the id has the embedding of an other id: </s>
    for the first token of the decoder, and <unk> for pieces.
    """
    bias = model.state_dict().get("output_projection.bias")
    if bias is None:
        return set()
    rows, hidden = model.target_embedding.tokens.weight, bias <= HIDDEN / 2
    ids = set(hidden.nonzero().flatten().tolist())
    copies = all(torch.equal(rows[id], rows[EOS if id == BOS else UNK]) for id in ids)
    if bias[~hidden].any() or not copies or (BOS in ids and unused(START) not in unused_ids(tokenizer)):
        raise ValueError(
            f"{source} has a trained output bias, which {PROGRAM} does not support; train with --no-output-bias, or "
            "give --format safetensors"
        )
    return ids


def piece_ids(tokenizer: Tokenizer) -> dict[str, int]:
    """Returns the ids of the pieces by text, in order, without <unk>, bos, eos and language tokens."""
    ids = range(3, tokenizer.source_size - len(tokenizer.languages))
    return dict(zip(tokenizer.source_pieces(ids), ids, strict=True))


def unused_ids(tokenizer: Tokenizer) -> dict[str, int]:
    """Returns the ids of entries of an imported model that stand for no piece, such as <unused 7>."""
    return {piece: id for piece, id in piece_ids(tokenizer).items() if is_unused(piece)}


def ordinary_pieces(tokenizer: Tokenizer, hidden: Collection[int]) -> dict[str, int]:
    """Returns the ids of the pieces that are in the table of M2M-100, by text, in order."""
    others = NAMES.keys() | unused_ids(tokenizer).keys()
    return {piece: id for piece, id in piece_ids(tokenizer).items() if piece not in others and id not in hidden}


def rows_of(tokenizer: Tokenizer, hidden: Collection[int]) -> list[int]:
    """Returns, for each id of the export, the index of its row in nmtkit's embeddings."""
    rest = unused_ids(tokenizer)
    start = rest.pop(unused(START)) if BOS in hidden else BOS
    pad = piece_ids(tokenizer).get("<pad>", start)
    languages = (tokenizer.languages.get(code, start) for code in M2M_100.split())
    return [start, pad, EOS, UNK, *ordinary_pieces(tokenizer, hidden).values(), *languages, *rest.values()]


def to_transformers(model: Transformer, table: list[int]) -> dict[str, Tensor]:
    """Returns the weights under the names of transformers. `table` is the result of `rows_of`."""
    config, state = model.config, {name: tensor.detach() for name, tensor in model.state_dict().items()}
    rows = state["target_embedding.tokens.weight"][table].float()
    tensors = {"model.shared.weight": rows, **layer_tensors(state, config, torch.arange(config.d_model))}
    for stack in ("encoder", "decoder"):
        for part in ("weight", "bias"):
            tensors[f"model.{stack}.layer_norm.{part}"] = state[f"{stack}_norm.{part}"]
    return {name: tensor.clone(memory_format=torch.contiguous_format) for name, tensor in tensors.items()}


def settings_of(config: TransformerConfig, size: int) -> dict[str, Any]:
    """Returns the contents of config.json without the ids of special tokens."""
    return {
        "architectures": [PROGRAM],
        "model_type": "m2m_100",
        "vocab_size": size,
        "encoder_layerdrop": config.encoder_layerdrop,
        "decoder_layerdrop": config.decoder_layerdrop,
        **common_settings(config),
    }
