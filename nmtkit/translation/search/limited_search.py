"""A search over a part of the target vocabulary: the pieces in the shortlists of the sentences of a batch.

The output projection computes the logits of all pieces in the union of the lists. The search of a sentence sees only
the columns of the list of this sentence: a tenth of the union in a batch of 100 sentences. The tokens of such a search
are columns: indices into the sorted list of the sentence. The columns of unk, bos and eos equal their ids, so the
search itself is the same as without a shortlist. Shorter lists are padded with columns whose logit is -inf. So the
translation of a sentence does not depend on the other sentences of the batch.
"""

import copy
import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from nmtkit.data.packed import Packed
from nmtkit.models.architectures import Architecture
from nmtkit.models.architectures.interface import DecoderState
from nmtkit.models.layers.output_columns import select_columns
from nmtkit.text.encoded import Encoded
from nmtkit.translation.search.constraints import NO_CONSTRAINTS, Constraints, Phrase, PieceTexts
from nmtkit.translation.search.scorer import SearchModel
from nmtkit.translation.search.shortlist import Shortlist
from nmtkit.translation.search.types import BatchHypotheses

# B sentences, R hypotheses of each, N = B x R rows, V target vocabulary, U pieces in the union of the lists, K pieces
# in the longest list

Pieces = npt.NDArray[np.int64]
SearchFunction = Callable[[Sequence[SearchModel], Packed, Sequence[Constraints]], BatchHypotheses]


@dataclass
class Columns:
    """The meaning of the tokens in a search with a shortlist.

    A token of such a search is a column: an index into the list of target pieces that its sentence may use.
    """

    pieces: Tensor  # U, sorted
    lists: Tensor  # B K, indices into `pieces`
    absent: Tensor  # bool, B 1 K: columns outside the list of a sentence

    def ids(self, tokens: Tensor) -> Tensor:
        """Returns the ids in the target vocabulary, [N], that the columns `tokens` [N] stand for."""
        return self.pieces[self.lists.gather(1, tokens.view(len(self.lists), -1)).flatten()]

    def logits(self, logits: Tensor) -> Tensor:
        """Returns the logits [N, K] of the list of each sentence.

        `logits` is [N, U], with a column for each of `pieces`, or [N, V], with a column for each target piece.

        Columns that are not in the list of a sentence get the logit -inf.
        """
        if logits.shape[1] != len(self.pieces):
            logits = logits[:, self.pieces]
        rows = logits.unflatten(0, (len(self.lists), -1))
        own = rows.gather(2, self.lists[:, None].expand(-1, rows.shape[1], -1))
        return own.masked_fill_(self.absent, -torch.inf).flatten(0, 1)


class LimitedState(DecoderState):
    """The decoder state of a `LimitedModel`: the state of the whole model, and the `Columns` of the open sentences."""

    def __init__(self, state: DecoderState, columns: Columns) -> None:
        self.beams = state.beams
        self.state, self.columns = state, columns

    def reorder(self, beam_index: Tensor) -> None:
        self.state.reorder(beam_index)

    def drop_finished(self, sentences: Tensor) -> None:
        self.state.drop_finished(sentences)
        columns = self.columns
        self.columns = Columns(columns.pieces, columns.lists[sentences], columns.absent[sentences])

    def insert(self, slots: Tensor, memory: Packed) -> None:
        raise NotImplementedError("a search with a shortlist has no slots")


class LimitedModel:
    """A model with the pieces of `columns` instead of the whole target vocabulary.

    The model is a shallow copy with a different output projection, and shares all weights with the given model. If the
    `step` of a model does not use `output_projection`, the logits of the pieces are selected from its result.
    """

    def __init__(self, model: Architecture, columns: Columns) -> None:
        self.model = copy.copy(model)
        self.model._modules = {name: part for name, part in model._modules.items() if name != "output_projection"}
        self.model.__dict__["output_projection"] = select_columns(model.output_projection, columns.pieces)
        self.max_target_positions = model.max_target_positions
        self.columns = columns

    def encode(self, source: Packed) -> Packed:
        return self.model.encode(source)

    def start(self, memory: Packed, beams: int) -> LimitedState:
        return LimitedState(self.model.start(memory, beams), self.columns)

    def step(self, tokens: Tensor, state: DecoderState) -> Tensor:
        assert isinstance(state, LimitedState)
        return state.columns.logits(self.model.step(state.columns.ids(tokens), state.state))


def limited_search(
    models: Sequence[Architecture],
    source: Packed,
    constraints: Sequence[Constraints],
    shortlist: Shortlist,
    search: SearchFunction,
) -> BatchHypotheses:
    """Runs `search` over the pieces of the shortlists. Returns the hypotheses, with ids of the whole vocabulary.

    The list of a sentence contains the pieces of its prefix and of its required texts. The constraints of `search`
    refer to columns.
    """
    sentences = Encoded(source.values.cpu().numpy(), source.layout.lengths.cpu().numpy())
    allowed = shortlist.allowed(sentences, [needed_pieces(sentence) for sentence in constraints])
    pieces = np.flatnonzero(allowed.any(0))
    lists = [np.flatnonzero(row) for row in allowed]
    number = max(map(len, lists))
    columns = _columns(pieces, lists, number, source.values.device)
    limited = [LimitedModel(model, columns) for model in models]
    own = [_in_columns(sentence, ids, number) for sentence, ids in zip(constraints, lists, strict=True)]
    return [
        [dataclasses.replace(hypothesis, tokens=ids[hypothesis.tokens].tolist()) for hypothesis in hypotheses]
        for hypotheses, ids in zip(search(limited, source, own), lists, strict=True)
    ]


def _columns(pieces: Pieces, lists: Sequence[Pieces], number: int, device: torch.device) -> Columns:
    """Returns the columns of all sentences. Column i of sentence b is piece lists[b][i].

    `pieces` [U] is the union of the lists, and the longest list has `number` pieces.
    """
    index, absent = np.zeros((len(lists), number), np.int64), np.ones((len(lists), 1, number), np.bool_)
    for row, ids in enumerate(lists):
        index[row, : len(ids)] = np.searchsorted(pieces, ids)
        absent[row, 0, : len(ids)] = False
    return Columns(*(torch.from_numpy(part).to(device) for part in (pieces, index, absent)))


def needed_pieces(sentence: Constraints) -> list[int]:
    """Returns the pieces of the prefix and of the required texts."""
    return [*sentence.prefix, *(token for text in sentence.required for token in text.tokens)]


def _in_columns(sentence: Constraints, pieces: Pieces, number: int) -> Constraints:
    """Returns the constraints with columns (indices into `pieces`) in place of ids. The search has `number` columns."""
    if sentence == NO_CONSTRAINTS:
        return sentence

    def convert(phrase: Phrase) -> Phrase:
        columns = np.searchsorted(pieces, phrase).clip(max=len(pieces) - 1)
        return tuple(np.where(pieces[columns] == phrase, columns, -1).tolist())

    @cache
    def columns(texts: PieceTexts) -> PieceTexts:
        return texts.columns(pieces, number)

    required = []
    for text in sentence.required:
        spellings = [dataclasses.replace(each, tokens=convert(each.tokens)) for each in text.alternatives]
        required.append(dataclasses.replace(text, alternatives=tuple(spellings), pieces=columns(text.pieces)))
    return dataclasses.replace(
        sentence,
        prefix=convert(sentence.prefix),
        after_prefix=tuple(column for column in convert(sentence.after_prefix) if column != -1),
        required=tuple(required),
        avoided=tuple(dataclasses.replace(text, pieces=columns(text.pieces)) for text in sentence.avoided),
    )
