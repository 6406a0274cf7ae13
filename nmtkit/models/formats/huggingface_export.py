"""Exports a Transformer as a folder for Hugging Face's transformers: MarianMTModel with MarianTokenizer.

A model of several languages becomes an M2M-100 model instead (`huggingface_m2m_export.py`).

In the position encoding of MarianMTModel, all sines come before all cosines. In nmtkit's default encoding, sines and
cosines alternate. The export therefore permutes the rows and columns of all weights that read or write the residual
stream. Both models then compute the same function.
"""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nmtkit.config.files import write_folder
from nmtkit.data.tokenizers.spm_model import FOREIGN
from nmtkit.data.tokenizers.tokenizer import BOS, EOS, UNK, Tokenizer
from nmtkit.models import building, checkpoint
from nmtkit.models.architectures.transformer import Transformer
from nmtkit.models.architectures.transformer_config import TransformerConfig
from nmtkit.models.formats import huggingface_m2m_export
from nmtkit.models.formats.expressible import check_expressible
from nmtkit.models.formats.huggingface import CONFIG_FILE, GENERATION_FILE, TOKENIZER_FILE
from nmtkit.models.formats.huggingface_tensors import common_settings, layer_tensors, write_json
from nmtkit.models.formats.model_card import model_card
from nmtkit.models.formats.weights import check_safetensors, save_safetensors

# MarianMTModel supports every value of the settings in SAME. ALLOWED maps further settings to their supported values.
SAME = {"encoder_layers", "decoder_layers", "d_model", "d_ff", "heads", "max_positions", "scale_embeddings"}
SAME |= {"share_embeddings", "output_bias", "attention_bias"}
ALLOWED = {"activation": ("relu", "gelu", "swish"), "positions": ("sinusoidal", "sinusoidal_halves")}
USAGE = [
    "```python",
    "from transformers import MarianMTModel, MarianTokenizer",
    "",
    "tokenizer, model = (kind.from_pretrained(FOLDER) for kind in (MarianTokenizer, MarianMTModel))",
    'output = model.generate(**tokenizer(["A dog runs."], return_tensors="pt"))',
    "print(tokenizer.batch_decode(output, skip_special_tokens=True))",
    "```",
]


def save(source: Path, destination: Path) -> None:
    """Writes `source`, the checkpoint of a Transformer, as a folder that transformers loads.

    Raises ValueError if MarianMTModel does not support an option of the architecture. The message names the option.
    Raises ImportError if the package safetensors is missing.
    """
    check_safetensors()
    contents = checkpoint.load(source)
    model, tokenizer = building.from_checkpoint(source)
    if tokenizer.languages and not tokenizer.has_target_languages_only:
        huggingface_m2m_export.save(contents, model, tokenizer, source, destination)
        return
    transformer = check_expressible(model, source, "MarianMTModel", SAME, ALLOWED)
    settings = settings_of(transformer.config, tokenizer)
    weights = to_transformers(transformer, tokenizer)

    def fill(folder: Path) -> None:
        save_safetensors(weights, folder / "model.safetensors", {"format": "pt"})
        write_json(folder / CONFIG_FILE, settings)
        write_json(folder / GENERATION_FILE, generation_settings())
        save_tokenizer(tokenizer, folder, settings["share_encoder_decoder_embeddings"])
        card = model_card(contents, transformer.config, ["library_name: transformers"], USAGE)
        (folder / "README.md").write_text(card, encoding="utf-8")

    write_folder(destination, fill)


def settings_of(config: TransformerConfig, tokenizer: Tokenizer) -> dict[str, Any]:
    """Returns the contents of config.json. The decoder starts from <s>, which is also the padding token."""
    return {
        "architectures": ["MarianMTModel"],
        "model_type": "marian",
        "vocab_size": tokenizer.source_size,
        "decoder_vocab_size": tokenizer.target_size,
        "share_encoder_decoder_embeddings": tokenizer.joint and config.share_embeddings,
        **common_settings(config),
        "normalize_before": False,
        "static_position_embeddings": True,
        **special_ids(),
    }


def special_ids() -> dict[str, int]:
    return {"pad_token_id": BOS, "decoder_start_token_id": BOS, "eos_token_id": EOS, "forced_eos_token_id": EOS}


def generation_settings() -> dict[str, Any]:
    """Returns the generation settings for a search like nmtkit's default search, but without a length penalty."""
    return {"num_beams": 4, "max_length": 512, "bad_words_ids": [[BOS], [UNK]], **special_ids()}


def to_transformers(model: Transformer, tokenizer: Tokenizer) -> dict[str, Tensor]:
    """Returns the weights under the names of transformers."""
    config, state = model.config, {name: tensor.detach() for name, tensor in model.state_dict().items()}
    axes = torch.arange(config.d_model)
    if config.positions == "sinusoidal":
        axes = torch.cat([axes[::2], axes[1::2]])
    source, target = (state[f"{side}_embedding.tokens.weight"][:, axes] for side in ("source", "target"))
    if tokenizer.joint and config.share_embeddings:
        tensors = {"model.shared.weight": target}
    else:
        tensors = {"model.encoder.embed_tokens.weight": source, "model.decoder.embed_tokens.weight": target}
    bias = state.get("output_projection.bias", torch.zeros(len(target)))
    tensors["final_logits_bias"] = bias[None]
    tensors |= layer_tensors(state, config, axes)
    return {name: tensor.clone(memory_format=torch.contiguous_format) for name, tensor in tensors.items()}


def save_tokenizer(tokenizer: Tokenizer, folder: Path, shared: bool) -> None:
    (folder / "source.spm").write_bytes(tokenizer.source_model)
    (folder / "target.spm").write_bytes(tokenizer.target_model)
    source = tokenizer.source_pieces(range(tokenizer.source_size))
    target = tokenizer.target_pieces(range(tokenizer.target_size))
    tables = {"vocab.json": source} if shared else {"vocab.json": source, "target_vocab.json": target}
    for name, pieces in tables.items():
        write_json(folder / name, {piece.lstrip(FOREIGN): id for id, piece in enumerate(pieces)})
    tokens = {"unk_token": source[UNK], "eos_token": source[EOS], "pad_token": source[BOS]}
    about = {"tokenizer_class": "MarianTokenizer", "separate_vocabs": not shared, "model_max_length": 512}
    write_json(folder / TOKENIZER_FILE, about | tokens)
