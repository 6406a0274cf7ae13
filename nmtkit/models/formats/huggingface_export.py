"""Exports a Transformer as a folder for Hugging Face's transformers.

A bilingual model becomes a MarianMTModel with a MarianTokenizer, and so does a model with tokens of target languages
only (>>deu<<). In the position encoding of MarianMTModel, all sines come before all cosines. In nmtkit's default
encoding, sines and cosines alternate. The export therefore permutes the rows and columns of all weights that read or
write the residual stream, so that the function stays the same.

Any other multilingual model becomes an M2M100ForConditionalGeneration. The tokenizer of M2M-100 has a fixed list of 100
languages. The language tokens follow the pieces, in the order of this list. The export has an embedding for each
language token. Tokens that the model does not have, such as the tokens of other languages, get copies of the embedding
of <s>, because a trained model never predicts <s>.

M2M-100 has no output bias. The output bias of an imported model only gives some ids the probability 0: pieces that the
original model does not have, and <s> if the decoder of the original model starts from </s>. The export leaves out these
hidden ids, so the export of an imported model has the same weights as the original model.
"""

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nmtkit.config.files import new_folder
from nmtkit.data.tokenizers.spm_model import FOREIGN
from nmtkit.data.tokenizers.tokenizer import BOS, EOS, UNK, Tokenizer
from nmtkit.models import building, checkpoint
from nmtkit.models.architectures.transformer import Transformer
from nmtkit.models.architectures.transformer_config import TransformerConfig
from nmtkit.models.formats.huggingface import (
    CONFIG_FILE,
    GENERATION_FILE,
    M2M_100,
    SPM_FILE,
    TOKENIZER_FILE,
    VOCAB_FILE,
)
from nmtkit.models.formats.model_card import model_card
from nmtkit.models.formats.names import TRANSFORMERS, split
from nmtkit.models.formats.safetensors import safetensors_package, save_safetensors
from nmtkit.models.formats.vocabulary import HIDDEN, is_unused, unused
from nmtkit.models.formats.writing import (
    BEAM,
    LENGTH_EXPONENT,
    SEARCH_NOTE,
    SIZES,
    add_biases,
    check_expressible,
    write_files,
)

MARIAN, M2M = "MarianMTModel", "M2M100ForConditionalGeneration"
# A program is a class of transformers. SAME has the settings of which a program supports every value. ALLOWED maps
# further settings to the values that the program supports.
SAME = {MARIAN: SIZES | {"scale_embeddings", "share_embeddings"}, M2M: SIZES | {"scale_embeddings"}}
ALLOWED: dict[str, dict[str, tuple[Any, ...]]] = {
    MARIAN: {"activation": ("relu", "gelu", "swish"), "positions": ("sinusoidal", "sinusoidal_halves")},
    M2M: {
        "activation": ("relu", "gelu", "swish"),
        "positions": ("sinusoidal_fairseq",),
        "pre_norm": (True,),
        "position_offset": (2,),  # M2M-100 counts positions from the id of the padding plus 1
    },
}
USAGE = {
    MARIAN: """\
```python
from transformers import MarianMTModel, MarianTokenizer

tokenizer, model = (kind.from_pretrained(FOLDER) for kind in (MarianTokenizer, MarianMTModel))
output = model.generate(**tokenizer(["A dog runs."], return_tensors="pt"))
print(tokenizer.batch_decode(output, skip_special_tokens=True))
```
""",
    M2M: """\
```python
from transformers import M2M100ForConditionalGeneration, M2M100Tokenizer

tokenizer = M2M100Tokenizer.from_pretrained(FOLDER, src_lang="SOURCE")
model = M2M100ForConditionalGeneration.from_pretrained(FOLDER)
inputs = tokenizer(["…"], return_tensors="pt")
output = model.generate(**inputs, forced_bos_token_id=tokenizer.get_lang_id("TARGET"))
print(tokenizer.batch_decode(output, skip_special_tokens=True))
```
""",
}
# ids of special tokens in the export; the decoder of a MarianMTModel starts from <s>, which is also the padding
MARIAN_IDS = {"pad_token_id": BOS, "decoder_start_token_id": BOS, "eos_token_id": EOS, "forced_eos_token_id": EOS}
START, PAD, END, UNKNOWN = 0, 1, 2, 3  # ids of M2M-100; START is <s>, from which the decoder of nmtkit starts
M2M_IDS = {"pad_token_id": PAD, "bos_token_id": START, "eos_token_id": END}
NAMES = {"<s>": START, "<pad>": PAD, "</s>": END, "<unk>": UNKNOWN}
WRITES = ("norm", "out_proj", "fc2")  # layers that write to the residual stream; all other layers read from the stream


def save(source: Path, destination: Path) -> None:
    """Writes `source`, the checkpoint of a Transformer, as a folder that transformers loads.

    Raises ValueError if transformers does not support an option of the architecture or a language. The message names
    the reason. Raises ImportError if the package safetensors is missing.
    """
    safetensors_package()  # raises ImportError before the model is read
    contents = checkpoint.load(source)
    model, tokenizer = building.from_contents(contents, source)
    program = M2M if tokenizer.languages and not tokenizer.has_target_languages_only else MARIAN
    if program == M2M:
        check_languages(tokenizer, source)
    transformer = check_expressible(model, source, program, SAME[program], ALLOWED[program])
    add_biases(transformer)
    weights, files = as_m2m(transformer, tokenizer, source) if program == M2M else as_marian(transformer, tokenizer)
    first, second = (*tokenizer.languages, "de", "de")[:2]
    usage = USAGE[program].replace("SOURCE", first).replace("TARGET", second)
    usage += SEARCH_NOTE.format(GENERATION_FILE)
    files["README.md"] = model_card(contents, usage, files[CONFIG_FILE]["model_type"], "transformers")
    weights = {name: tensor.clone(memory_format=torch.contiguous_format) for name, tensor in weights.items()}
    with new_folder(destination) as folder:
        save_safetensors(weights, folder / "model.safetensors", {"format": "pt"})
        write_files(folder, files)


def json_files(
    config: TransformerConfig, entries: Mapping[str, Any], forbidden: list[int], ids: dict[str, int]
) -> dict[str, Any]:
    """Returns config.json, and generation_config.json for the search that is nearest to nmtkit's defaults.

    `entries` are further entries of config.json, `forbidden` are ids of tokens that a translation never contains, and
    `ids` are the ids of special tokens.
    """
    sides: dict[str, int] = {}
    for side, layers in (("encoder", config.encoder_layers), ("decoder", config.decoder_layers)):
        sides |= {f"{side}_layers": layers, f"{side}_ffn_dim": config.d_ff, f"{side}_attention_heads": config.heads}
    settings = {
        **entries,
        "tie_word_embeddings": True,
        "d_model": config.d_model,
        **sides,
        "activation_function": config.activation,
        "dropout": config.dropout,
        "attention_dropout": config.attention_dropout,
        "activation_dropout": config.activation_dropout,
        "max_position_embeddings": config.max_positions,
        "scale_embedding": config.scale_embeddings,
        "is_encoder_decoder": True,
        "dtype": "float32",
    }
    search: dict[str, Any] = {"num_beams": BEAM, "length_penalty": LENGTH_EXPONENT, "early_stopping": "never"}
    search |= {"max_length": 512, "bad_words_ids": [[id] for id in forbidden]}
    return {CONFIG_FILE: settings | ids, GENERATION_FILE: search | ids}


# --- MarianMTModel --------------------------------------------------------------------------------------------------


def as_marian(model: Transformer, tokenizer: Tokenizer) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Returns the weights and the files of a MarianMTModel by name. Dimensions have the order of MarianMTModel."""
    config, state, axes = model.config, model.state_dict(), torch.arange(model.config.d_model)
    if config.positions == "sinusoidal":
        axes = torch.cat([axes[::2], axes[1::2]])  # the old index of each new dimension
        for name, tensor in state.items():
            if name.rpartition(".")[0].endswith(WRITES):
                state[name] = tensor[axes]
            elif name.endswith(".weight"):
                state[name] = tensor[:, axes]
    source = tokenizer.source_pieces(range(tokenizer.source_size))
    target = tokenizer.target_pieces(range(tokenizer.target_size))
    names = {"source": "model.encoder.embed_tokens.weight", "target": "model.decoder.embed_tokens.weight"}
    tables = {VOCAB_FILE: source, "target_vocab.json": target}
    if shared := tokenizer.joint and config.share_embeddings:
        names, tables = {"source": "model.shared.weight"}, {VOCAB_FILE: source}
    weights = {name: state[f"{side}_embedding.tokens.weight"] for side, name in names.items()}
    weights["final_logits_bias"] = state.get("output_projection.bias", torch.zeros(len(target)))[None]
    entries = {"architectures": [MARIAN], "model_type": "marian", "share_encoder_decoder_embeddings": shared}
    entries |= {"vocab_size": len(source), "decoder_vocab_size": len(target)}
    entries |= {"normalize_before": False, "static_position_embeddings": True}
    about = {"tokenizer_class": "MarianTokenizer", "separate_vocabs": not shared, "model_max_length": 512}
    files = {
        **json_files(config, entries, [BOS, UNK], MARIAN_IDS),
        "source.spm": tokenizer.source_model,
        "target.spm": tokenizer.target_model,
        **{name: {piece.lstrip(FOREIGN): id for id, piece in enumerate(table)} for name, table in tables.items()},
        TOKENIZER_FILE: about | {"unk_token": source[UNK], "eos_token": source[EOS], "pad_token": source[BOS]},
    }
    return weights | split(state, TRANSFORMERS.of(config)), files


# --- M2M100ForConditionalGeneration ---------------------------------------------------------------------------------


def check_languages(tokenizer: Tokenizer, source: Path) -> None:
    """Raises ValueError unless the tokenizer is joint, has tokens such as __de__, and has only languages of M2M-100."""
    tokens = tokenizer.source_pieces(list(tokenizer.languages.values()))
    advice = "give --format safetensors"
    if not tokenizer.one_model or any(not token.startswith("__") for token in tokens):
        raise ValueError(
            f"{source} has language tokens such as {tokens[0]}, but {M2M} needs one tokenizer with tokens such as "
            f"__de__ (preprocess --language-tokens both); or {advice}"
        )
    missing = sorted(set(tokenizer.languages) - set(M2M_100.split()))
    if missing:
        raise ValueError(f"{source} has languages that M2M100Tokenizer does not have: {', '.join(missing)}; {advice}")


def hidden_ids(model: Transformer, pieces: Collection[str], source: Path) -> set[int]:
    """Returns the ids to which the output bias gives the probability 0 (hidden ids).

    Raises ValueError if an export without the bias and without these ids would have different probabilities. Hidden ids
    can be left out if the bias of all other ids is 0, and if each hidden id has the embedding of a known id: </s> for
    the first token of the decoder, and <unk> for pieces. `pieces` are the names of the ids.
    """
    bias = model.state_dict().get("output_projection.bias")
    if bias is None:
        return set()
    rows, hidden = model.target_embedding.tokens.weight, bias <= HIDDEN / 2
    ids = set(hidden.nonzero().flatten().tolist())
    copies = all(torch.equal(rows[id], rows[EOS if id == BOS else UNK]) for id in ids)
    if bias[~hidden].any() or not copies or (BOS in ids and unused(START) not in pieces):
        raise ValueError(
            f"{source} has a trained output bias, which {M2M} does not support; train with --no-output-bias, or "
            "give --format safetensors"
        )
    return ids


def as_m2m(model: Transformer, tokenizer: Tokenizer, source: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Returns the weights and the files of an M2M100ForConditionalGeneration by name.

    Some ids of an imported model do not stand for a piece, and have names such as <unused 7>. In the export, these ids
    come last.
    """
    config, state, languages = model.config, model.state_dict(), M2M_100.split()
    numbers = range(3, tokenizer.source_size - len(tokenizer.languages))
    ids = dict(zip(tokenizer.source_pieces(numbers), numbers, strict=True))
    hidden = hidden_ids(model, ids, source)
    rest = {piece: id for piece, id in ids.items() if is_unused(piece)}
    pieces = [piece for piece, id in ids.items() if piece not in NAMES and piece not in rest and id not in hidden]
    start = rest.pop(unused(START)) if BOS in hidden else BOS
    # for each id of the export, the index of its row in nmtkit's embeddings
    rows = [start, ids.get("<pad>", start), EOS, UNK, *(ids[piece] for piece in pieces)]
    rows += [*(tokenizer.languages.get(code, start) for code in languages), *rest.values()]
    embeddings = state["target_embedding.tokens.weight"][rows].float()
    entries = {"architectures": [M2M], "model_type": "m2m_100", "vocab_size": len(rows)}
    entries |= {"encoder_layerdrop": config.encoder_layerdrop, "decoder_layerdrop": config.decoder_layerdrop}
    special = M2M_IDS | {"decoder_start_token_id": END if BOS in hidden else START}
    about: dict[str, Any] = {"tokenizer_class": "M2M100Tokenizer", "language_codes": "m2m100"}
    about |= {"num_madeup_words": len(rows) - len(NAMES) - len(pieces) - len(languages)}
    files = {
        **json_files(config, entries, [START, PAD, UNKNOWN], special),
        SPM_FILE: tokenizer.source_model,
        VOCAB_FILE: NAMES | {piece: id for id, piece in enumerate(pieces, len(NAMES))},
        TOKENIZER_FILE: about | {"src_lang": next(iter(tokenizer.languages)), "model_max_length": config.max_positions},
    }
    return {"model.shared.weight": embeddings} | split(state, TRANSFORMERS.of(config)), files
