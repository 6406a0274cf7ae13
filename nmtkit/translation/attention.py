"""Attention weights of every head of a model over one sentence and its translation."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from nmtkit.data.packed import Packed
from nmtkit.data.tokenizers.tokenizer import BOS, EOS, Tokenizer
from nmtkit.models.architectures import Architecture
from nmtkit.models.architectures.interface import layer_index
from nmtkit.translation.engines import Decoder, LoadedModels
from nmtkit.translation.languages import Codes
from nmtkit.translation.pipeline import Pipeline
from nmtkit.translation.search.options import SearchOptions
from nmtkit.translation.search.types import Request

# Axes of shapes: H heads, S source tokens, T target tokens, L queries, M keys. Tokens include eos.

UNLIMITED = 1_000_000  # no practical limit on the pieces of a source, because a sentence must not be cut off


@dataclass(frozen=True, eq=False)
class Attention:
    """A sentence, its translation, and the weights of every head."""

    source: list[str]  # S pieces; the last piece is "end", for eos
    target: list[str]  # T pieces; the last piece is "end", for eos
    weights: dict[str, list[npt.NDArray[np.float32]]]  # kind (encoder, decoder, cross) -> [H, L, M] for each layer

    @property
    def alignment(self) -> list[tuple[int, int]]:
        """Index pairs (source, target): for each target piece, the source piece with the highest attention weight.

        The weights come from one cross-attention layer, chosen by `layer_index`, and are averaged over heads, as in
        `nmtkit generate --alignment`. Eos is left out. Raises ValueError for a model without cross-attention.
        """
        layers = self.weights.get("cross")
        if not layers:
            raise ValueError("the model has no cross-attention, so words cannot be aligned")
        weights = layers[layer_index(None, len(layers))].mean(0)[:-1, :-1]  # H L M -> L M
        return [(int(row.argmax()), target) for target, row in enumerate(weights)] if weights.shape[1] else []


def attend(
    model: Architecture,
    tokenizer: Tokenizer,
    source: str,
    target: str | None = None,
    beam: int = 4,
    *,
    languages: Codes,
) -> Attention:
    """Returns the attention weights of a model over `source` and `target`.

    `languages` are the codes of the source and target language, for a model of several languages. Without `target`, the
    model translates `source` with the given `beam`. Raises ValueError for an empty source, for a text with more pieces
    than the model has positions, and for a model without attention.
    """
    device = next(model.parameters()).device
    search = SearchOptions(
        beam=beam, score_reference=target is not None, source_lang=languages[0], target_lang=languages[1]
    )
    pipeline = Pipeline(tokenizer, search, max_source_len=UNLIMITED, models=[model])
    (line,) = pipeline.segments([Request(source, reference=target)])
    segments = [leaf.input for leaf in line.leaves()]  # empty if the source has only invisible characters
    if not source.strip() or not segments:
        raise ValueError("the sentence is empty; give a sentence with words")
    (segment,) = segments
    packed = Packed.from_lists([segment.ids], device)
    with torch.no_grad():
        if segment.reference is None:
            decoder = Decoder(LoadedModels([model], tokenizer, str(device), max_tokens=UNLIMITED), "torch")
            ((_, ((best, *_),)),) = decoder.decoder(search)([[segment]])
            target_ids = [*best.tokens, EOS]
        else:
            target_ids = [*segment.reference, EOS]
        weights = model.attention_weights(packed, Packed.from_lists([[BOS, *target_ids[:-1]]], device))
    return Attention(
        source=[*tokenizer.source_pieces(segment.ids[:-1]), "end"],
        target=[*tokenizer.target_pieces(target_ids[:-1]), "end"],
        weights={kind: [layer[0].float().cpu().numpy() for layer in layers] for kind, layers in weights.items()},
    )
