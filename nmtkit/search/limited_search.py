"""A search over a part of the target vocabulary: the pieces in the shortlists of the sentences of a batch.

The tokens of such a search are columns, indices into the sorted pieces of all lists. The columns of unk, bos and eos
equal their ids, so the search itself is the same as without a shortlist. Pieces that are not in the list of a sentence
have the logit -inf, so the translation of a sentence does not depend on the other sentences of the batch.
"""

import copy
import dataclasses
from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from nmtkit.architectures import Architecture
from nmtkit.architectures.interface import DecoderState
from nmtkit.data.tokenizer import Encoded
from nmtkit.layers.output_columns import select_columns
from nmtkit.layers.packed import Packed
from nmtkit.search.constraints import Constraints, Phrase, PieceEdges, RequiredPhrase
from nmtkit.search.scorer import SearchModel
from nmtkit.search.segments import BatchHypotheses
from nmtkit.search.shortlist import Shortlist

# B sentences, R hypotheses of each, N = B x R rows, V target vocabulary, U pieces that are in some list

Models = Sequence[SearchModel]
Search = Callable[[Models, Packed, Sequence[Constraints], PieceEdges | None], BatchHypotheses]


class LimitedState(DecoderState):
    """The state of a model, with the columns that are missing in the list of each sentence."""

    def __init__(self, state: DecoderState, forbidden: Tensor | None) -> None:
        self.beams = state.beams
        self.state = state
        self.forbidden = forbidden  # B 1 U, bool; None: every list has all columns

    def reorder(self, beam_index: Tensor) -> None:
        self.state.reorder(beam_index)

    def drop_finished(self, sentences: Tensor) -> None:
        self.state.drop_finished(sentences)
        if self.forbidden is not None:
            self.forbidden = self.forbidden[sentences]

    def insert(self, slots: Tensor, memory: Packed) -> None:
        raise NotImplementedError("a search with a shortlist has no slots")


class LimitedModel:
    """A model with the target pieces `pieces` [U] instead of the whole vocabulary.

    The model is a shallow copy with a different output projection, and shares all weights with the given model. If the
    `step` of a model does not use `output_projection`, the logits of `pieces` are selected from its result.
    """

    def __init__(self, model: Architecture, pieces: Tensor, forbidden: Tensor | None) -> None:
        self.model = copy.copy(model)
        self.model._modules = {name: part for name, part in model._modules.items() if name != "output_projection"}
        self.model.__dict__["output_projection"] = select_columns(model.output_projection, pieces)
        self.max_target_positions = model.max_target_positions
        self.pieces, self.forbidden = pieces, forbidden

    def encode(self, source: Packed) -> Packed:
        return self.model.encode(source)

    def start(self, memory: Packed, beams: int) -> LimitedState:
        return LimitedState(self.model.start(memory, beams), self.forbidden)

    def step(self, tokens: Tensor, state: DecoderState) -> Tensor:
        assert isinstance(state, LimitedState)
        logits = self.model.step(self.pieces[tokens], state.state)
        if logits.shape[1] != len(self.pieces):
            logits = logits[:, self.pieces]
        if state.forbidden is not None:
            logits.unflatten(0, (len(state.forbidden), -1)).masked_fill_(state.forbidden, -torch.inf)
        return logits


def limited_search(
    models: Sequence[Architecture],
    source: Packed,
    constraints: Sequence[Constraints],
    edges: PieceEdges | None,
    shortlist: Shortlist,
    search: Search,
) -> BatchHypotheses:
    """Runs `search` over the pieces of the shortlists. Returns its hypotheses with ids of the vocabulary.

    The list of a sentence contains the pieces of its prefix and of its required phrases. `search` gets models, source,
    constraints and piece edges. Constraints and edges refer to columns.
    """
    sentences = Encoded(source.values.cpu().numpy(), source.layout.lengths.cpu().numpy())
    allowed = shortlist.allowed(sentences, [_pieces(sentence) for sentence in constraints])
    pieces = np.flatnonzero(allowed.any(0))
    column = np.full(allowed.shape[1], -1)
    column[pieces] = np.arange(len(pieces))
    forbidden = torch.from_numpy(~allowed[:, None, pieces]).to(source.values.device)
    ids = torch.from_numpy(pieces).to(source.values.device)
    limited = [LimitedModel(model, ids, forbidden if len(allowed) > 1 else None) for model in models]
    if edges is not None:
        edges = PieceEdges(*([values[piece] for piece in pieces.tolist()] for values in edges))
    results = search(limited, source, [_in_columns(sentence, column) for sentence in constraints], edges)
    return [
        [dataclasses.replace(hypothesis, tokens=pieces[hypothesis.tokens].tolist()) for hypothesis in hypotheses]
        for hypotheses in results
    ]


def _pieces(sentence: Constraints) -> list[int]:
    """Returns the pieces of the prefix and of the required phrases."""
    alternatives = [alternative for phrase in sentence.required for alternative in phrase.alternatives]
    return [piece for phrase in (sentence.prefix, *alternatives) for piece in phrase]


def _in_columns(sentence: Constraints, column: "np.ndarray[tuple[int], np.dtype[np.int64]]") -> Constraints:
    """Returns the constraints with columns instead of pieces. Avoided phrases that cannot occur are left out."""

    def convert(phrase: Phrase) -> Phrase:
        return tuple(column[list(phrase)].tolist())

    return Constraints(
        convert(sentence.prefix),
        sentence.language_tokens,
        tuple(
            RequiredPhrase(tuple(map(convert, phrase.alternatives)), phrase.whole_words) for phrase in sentence.required
        ),
        tuple(phrase for phrase in map(convert, sentence.avoided) if -1 not in phrase),
    )
