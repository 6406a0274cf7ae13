"""One self-contained HTML page that shows every attention head of a model at work on a sentence.

It is what the appendix of "Attention Is All You Need" prints of a few heads, for all of them, to look at by hand.
"""

import base64
import html
import json
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from nmtkit.architectures import Architecture
from nmtkit.architectures.interface import layer_index
from nmtkit.data.tokenizer import BOS, EOS, SPACE_SYMBOL, Tokenizer
from nmtkit.layers.packed import Packed
from nmtkit.pages.document import asset
from nmtkit.search.constraints import Constraints
from nmtkit.search.decoding import beam_search
from nmtkit.search.options import SearchOptions

# H heads, S source and T target tokens, L queries, M keys; tokens include eos

TITLES = {
    "encoder": ("Encoder self-attention", "What each source token looks at among the source tokens."),
    "decoder": ("Decoder self-attention", "What the decoder looks at among the tokens so far, while it writes each."),
    "cross": ("Cross-attention", "What the decoder looks at in the source, while it writes each token."),
}


@dataclass(frozen=True, eq=False)
class Attention:
    """A sentence, its translation, and the weights of every head."""

    source: list[str]  # S pieces, eos last
    target: list[str]  # T pieces, eos last: what the decoder writes at each step
    weights: dict[str, list[npt.NDArray[np.float32]]]  # "encoder", "decoder", "cross" -> layers of H L M

    @property
    def alignment(self) -> list[tuple[int, int]]:
        """Pairs of a source and a target piece: for each of the target the one that it attends to most, eos aside.

        By the cross-attention that `nmtkit generate --alignment` goes by: the mean of the heads of one layer, see
        `layer_index`. Raises ValueError where there is none.
        """
        layers = self.weights.get("cross")
        if not layers:
            raise ValueError("the model has no cross-attention to align by")
        weights = layers[layer_index(None, len(layers))].mean(0)[:-1, :-1]  # H L M -> L M
        return [(int(row.argmax()), target) for target, row in enumerate(weights)] if weights.shape[1] else []


def attend(
    model: Architecture,
    tokenizer: Tokenizer,
    source: str,
    target: str | None = None,
    beam: int = 4,
    source_lang: str | None = None,
    target_lang: str | None = None,
) -> Attention:
    """Runs the model over `source` and `target`, or over its own translation.

    Raises ValueError for an empty source, one the model cannot read, and a model without attention.
    """
    if not source.strip():
        raise ValueError("the sentence is empty; there is nothing to look at")
    device = next(model.parameters()).device
    before, begin = tokenizer.language_ids(source_lang, target_lang)
    source_ids = [*before, *tokenizer.encode_source([source]).ids.tolist()]
    limit = model.max_source_positions
    if limit is not None and len(source_ids) > limit:
        raise ValueError(f"the sentence has {len(source_ids)} pieces; this model reads {limit} at most")
    packed = Packed.from_lists([source_ids], device)
    with torch.no_grad():
        if target is None:
            constraints = [Constraints(prefix=tuple(begin), given=len(begin))]
            target_ids = [*beam_search([model], packed, SearchOptions(beam=beam), constraints)[0][0].tokens, EOS]
        else:
            target_ids = [*begin, *tokenizer.encode_target([target]).ids.tolist()]
        target_input = Packed.from_lists([[BOS, *target_ids[:-1]]], device)
        weights = model.attention_weights(packed, target_input)
    return Attention(
        source=[*tokenizer.source_pieces(source_ids[:-1]), "end"],
        target=[*tokenizer.target_pieces(target_ids[:-1]), "end"],
        weights={kind: [layer[0].float().cpu().numpy() for layer in layers] for kind, layers in weights.items()},
    )


def page(attention: Attention, title: str) -> str:
    """Returns the HTML page. Everything is inside: it opens without a network, and asks for nothing."""
    keys = {"encoder": attention.source, "decoder": ["start", *attention.target[:-1]], "cross": attention.source}
    data = {
        "tokens": {"source": _labels(attention.source, 1), "target": _labels(attention.target, 1)},
        "kinds": [
            {
                "name": kind,
                "title": TITLES[kind][0],
                "about": TITLES[kind][1],
                "queries": "source" if kind == "encoder" else "target",
                "keys": _labels(keys[kind], 0 if kind == "decoder" else 1),
                "keysAreSource": kind != "decoder",
                "layers": [_encoded(layer) for layer in attention.weights[kind]],
            }
            for kind in TITLES
            if kind in attention.weights
        ],
    }
    template = asset("attention.html").replace("{{style}}", asset("style.css"))
    # as JSON may write it, and so that no token can end the script element that the data stands in
    encoded = json.dumps(data, ensure_ascii=False, separators=(",", ":")).replace("<", "\\u003c")
    return template.replace("{{title}}", html.escape(title)).replace("{{data}}", encoded)


def _encoded(layer: npt.NDArray[np.float32]) -> dict[str, Any]:
    heads, queries, keys = layer.shape
    weights = base64.b64encode(np.ascontiguousarray(layer, dtype="<f4").tobytes()).decode()
    return {"heads": heads, "queries": queries, "keys": keys, "weights": weights}


def _labels(pieces: list[str], special_from_end: int) -> list[dict[str, Any]]:
    """Returns pieces as they are shown: without the mark of a space, and whether a word begins there; `end` and `start`
    are special.
    """
    special = len(pieces) - 1 if special_from_end else 0
    return [
        {
            "text": piece if index == special else piece.replace(SPACE_SYMBOL, "") or "␣",
            "begins": index == special or piece.startswith(SPACE_SYMBOL) or index == 0,
            "special": index == special,
        }
        for index, piece in enumerate(pieces)
    ]
