"""Small neural metrics with random weights, in the file layout of the published models.

The weights depend only on the seed, so that `benchmarks/neural_parity.py` and the tests score with equal models.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import transformers

from nmtkit.data.tokenizers.spm_model import CONTROL, UNKNOWN, ModelPiece, new_model, with_pieces
from nmtkit.models.formats.safetensors import save_safetensors

LETTERS = "abcdefghijklmnopqrstuvwxyzäöüßABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789.,;:!?'\"-()"
WORDS = ["▁the", "▁a", "▁dog", "▁runs", "▁cat", "▁sleeps", "▁der", "▁die", "▁Hund", "▁Katze", "▁läuft", "▁schläft"]
PIECES = [ModelPiece("▁", -3.0), *(ModelPiece(text, -4.0 - index / 10) for index, text in enumerate(WORDS))]
PIECES += [ModelPiece(text, -8.0 - index / 100) for index, text in enumerate(LETTERS)]
SPM = new_model(PIECES, "unigram", b"")  # for XLM-R: <unk>, <s>, </s>, pieces
# for mT5: <pad>, </s>, <unk>, pieces; field 40 of the trainer's settings is the id of <unk>
MT5_SPM = with_pieces(
    SPM + bytes([0x12, 3, 0xC0, 0x02, 2]),
    [ModelPiece("<pad>", 0.0, CONTROL), ModelPiece("</s>", 0.0, CONTROL), ModelPiece("<unk>", 0.0, UNKNOWN), *PIECES],
)
ROWS = [  # lines of the pinned scores; the third and the fourth are beyond the limit of the models
    {"src": "the dog runs.", "mt": "der Hund läuft.", "ref": "die Katze schläft"},
    {"src": "a cat, a dog!", "mt": "", "ref": "eine Katze, ein Hund!"},
    {"src": "the cat sleeps " * 9, "mt": "die Katze schläft " * 9, "ref": "der Hund"},
    {"src": "dog", "mt": "0123456789" * 9, "ref": "9876543210" * 9},
    {"src": " 2  spaces, 中 and \u2028 </s> <pad>", "mt": "<mask> e\u0301 😀", "ref": ""},
]
CLASSES = {
    "comet": ("regression_metric", {"layer_transformation": "sparsemax", "layer_norm": False, "pool": "avg"}),
    "kiwi": ("unified_metric", {"layer_transformation": "sparsemax_patch", "input_segments": ["mt", "src"]}),
    "unite": ("unified_metric", {"layer_transformation": "sparsemax", "input_segments": ["mt", "src", "ref"]}),
    "referenceless": ("referenceless_regression_metric", {"layer_transformation": "softmax", "pool": "cls"}),
    "xl": ("unified_metric", {"layer_norm": False, "input_segments": ["mt", "src"], "encoder_model": "XLM-RoBERTa-XL"}),
}
TINY = {"hidden_size": 16, "num_hidden_layers": 3, "num_attention_heads": 2, "intermediate_size": 24}


def random_weights(shapes: Mapping[str, torch.Size], seed: int, scale: float) -> dict[str, torch.Tensor]:
    """Returns random weights, normal with the standard deviation `scale`. Factors of normalisations are near 1."""
    generator = torch.Generator().manual_seed(seed)
    weights = {}
    for name in sorted(shapes):
        values = torch.randn(shapes[name], generator=generator)
        is_factor = name.endswith("weight") and ("norm" in name.lower()) and len(shapes[name]) == 1
        weights[name] = 1 + 0.1 * values if is_factor else scale * values
    return weights


def write_comet(
    folder: Path, kind: str = "comet", *, spm: bytes = SPM, vocabulary: int = 0, positions: int = 40, seed: int = 1
) -> Path:
    """Writes a COMET model of a kind in `CLASSES`: hparams.yaml, checkpoints/model.ckpt, and the folder `encoder` with
    the config and the tokenizer of the encoder, which stands for a repository such as xlm-roberta-large.
    """
    identifier, changes = CLASSES[kind]
    encoder = folder / "encoder"
    encoder.mkdir(parents=True)
    (folder / "checkpoints").mkdir()
    (encoder / "sentencepiece.bpe.model").write_bytes(spm)
    prefix = "XLMRobertaXL" if kind == "xl" else "XLMRoberta"
    config = getattr(transformers, f"{prefix}Config")(
        vocab_size=vocabulary or len(PIECES) + 5, max_position_embeddings=positions, type_vocab_size=1, **TINY
    )
    written = {key: value for key, value in config.to_dict().items() if key != "transformers_version"}
    (encoder / "config.json").write_text(json.dumps(written))
    hparams: dict[str, Any] = {
        "class_identifier": identifier, "encoder_model": "XLM-RoBERTa", "pretrained_model": str(encoder),
        "layer_norm": True, "hidden_sizes": [12, 8], "activations": "Tanh", "final_activation": None, "dropout": 0.1,
        "nr_frozen_epochs": 0.3, "keep_embeddings_frozen": True, "train_data": [], "validation_data": [],
        ("sent_layer" if identifier == "unified_metric" else "layer"): "mix",
    } | changes  # fmt: skip
    # JSON is YAML; Lightning stores the settings in the checkpoint, too, where published models say sparsemax
    (folder / "hparams.yaml").write_text(json.dumps(hparams))
    stored = {key: value for key, value in hparams.items() if key != "class_identifier"}
    if stored.get("layer_transformation") == "sparsemax_patch":
        stored["layer_transformation"] = "sparsemax"
    network = getattr(transformers, f"{prefix}Model")(config, add_pooling_layer=False)
    width = {"regression_metric": 6, "unified_metric": 1}.get(identifier, 4) * config.hidden_size
    shapes = {f"encoder.model.{name}": value.shape for name, value in network.state_dict().items()}
    for index, (inner, outer) in enumerate(((width, 12), (12, 8), (8, 1))):
        shapes[f"estimator.ff.{3 * index}.weight"] = torch.Size((outer, inner))
        shapes[f"estimator.ff.{3 * index}.bias"] = torch.Size((outer,))
    shapes |= {f"layerwise_attention.scalar_parameters.{index}": torch.Size((1,)) for index in range(4)}
    weights = random_weights(shapes, seed, 0.3) | {"layerwise_attention.gamma": torch.tensor([1.2])}
    lightning = {"epoch": 1, "global_step": 7, "pytorch-lightning_version": "1.8.2", "callbacks": {}}
    torch.save(
        lightning | {"state_dict": weights, "hyper_parameters": stored, "hparams_name": "kwargs"},
        folder / "checkpoints" / "model.ckpt",
    )
    return folder


def write_metricx(folder: Path, *, spm: bytes = MT5_SPM, seed: int = 1, dtype: torch.dtype = torch.float32) -> Path:
    """Writes a MetricX model with the tokenizer of mT5: config.json, model.safetensors and spiece.model."""
    folder.mkdir(parents=True)
    (folder / "spiece.model").write_bytes(spm)
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "T5Tokenizer", "extra_ids": 0}))
    sizes = {"vocab_size": 250_112, "d_model": 8, "d_kv": 4, "d_ff": 16, "num_layers": 2, "num_decoder_layers": 2}
    settings = {"model_type": "mt5", "architectures": ["MT5ForRegression"], "tie_word_embeddings": False}
    settings |= {"feed_forward_proj": "gated-gelu", "is_gated_act": True, "dense_act_fn": "gelu_new"}
    settings |= {"num_heads": 2, **sizes}
    (folder / "config.json").write_text(json.dumps(settings | {"relative_attention_num_buckets": 32}))
    network = transformers.MT5Model(transformers.MT5Config(**sizes, num_heads=2))
    shapes = {name: value.shape for name, value in network.state_dict().items() if "embed_tokens" not in name}
    weights = random_weights(shapes, seed, 0.5)
    # the decoder reads only piece 0, so the projection on its embedding gives scores inside the limits of 0 and 25
    projection = torch.zeros(sizes["vocab_size"], sizes["d_model"])
    projection[250_089] = 4 * weights["shared.weight"][0]
    weights["lm_head.weight"] = projection
    save_safetensors(
        {name: value.to(dtype).contiguous() for name, value in weights.items()}, folder / "model.safetensors",
        {"format": "pt"},
    )  # fmt: skip
    return folder
