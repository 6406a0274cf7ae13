"""The page of attention heads: a self-contained HTML page with the weights of every head over one sentence pair.

The appendix of "Attention Is All You Need" prints weights of a few heads. This page shows all heads.
"""

import base64
import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from nmtkit.pages.document import Html, render

SPACE_SYMBOL = "▁"  # symbol of SentencePiece for a space

# name of the attention -> title, explanation
TITLES = {
    "encoder": ("Encoder self-attention", "The source tokens that each source token attends to."),
    "decoder": (
        "Decoder self-attention",
        "The earlier target tokens that the decoder attends to when it writes a token.",
    ),
    "cross": ("Cross-attention", "The source tokens that the decoder attends to when it writes a token."),
}


def page(
    source: list[str], target: list[str], weights: Mapping[str, Sequence[npt.NDArray[np.float32]]], title: str
) -> str:
    """Returns the HTML page. The page contains all its data and requests nothing from a network.

    `source` and `target` are the pieces of a sentence and of its translation, both with eos. `weights` has the weights
    [heads, queries, keys] of each layer, by the kind of attention: "encoder", "decoder" or "cross".
    """
    keys = {"encoder": source, "decoder": ["start", *target[:-1]], "cross": source}
    data = {
        "tokens": {"source": _labels(source, -1), "target": _labels(target, -1)},
        "kinds": [
            {
                "name": name,
                "title": TITLES[name][0],
                "about": TITLES[name][1],
                "queries": "source" if name == "encoder" else "target",
                "keys": _labels(keys[name], 0 if name == "decoder" else -1),
                "keysAreSource": name != "decoder",
                "layers": [_encoded(layer) for layer in weights[name]],
            }
            for name in TITLES
            if name in weights
        ],
    }
    # "<" is escaped, so that no token can end the script element
    encoded = json.dumps(data, ensure_ascii=False, separators=(",", ":")).replace("<", "\\u003c")
    return render("attention.html", title=title, data=Html(encoded))


def _encoded(layer: npt.NDArray[np.float32]) -> dict[str, Any]:
    heads, queries, keys = layer.shape
    weights = base64.b64encode(np.ascontiguousarray(layer, dtype="<f4").tobytes()).decode()
    return {"heads": heads, "queries": queries, "keys": keys, "weights": weights}


def _labels(pieces: list[str], special: int) -> list[dict[str, Any]]:
    """Returns the label of each piece: its text without the space symbol, and whether a word begins with the piece.

    `special` is the index of the piece that stands for the start or the end of the sentence.
    """
    special %= len(pieces)
    return [
        {
            "text": piece if index == special else piece.replace(SPACE_SYMBOL, "") or "␣",
            "begins": index == special or piece.startswith(SPACE_SYMBOL) or index == 0,
            "special": index == special,
        }
        for index, piece in enumerate(pieces)
    ]
