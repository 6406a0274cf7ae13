"""Vocabulary shortlists: the likely target pieces of each source piece.

A search with a shortlist considers only the pieces in the lists of the source pieces of a sentence, the most frequent
target pieces, and the pieces of the constraints. It computes the logits of a few hundred columns instead of the whole
vocabulary. Source: Jean et al. 2015, "On Using Very Large Target Vocabulary for Neural Machine Translation", section
3.2. The lists are learned by IBM model 1, as in Devlin 2017, "Sharp Models on Dull Hardware", section 4.2.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from nmtkit.data.tokenizers.tokenizer import BOS, EOS, UNK, Tokenizer
from nmtkit.jobs import progress
from nmtkit.models.formats.lexical_shortlist import LexicalEntries, NumpyArray
from nmtkit.text.encoded import Encoded, ranges
from nmtkit.text.ibm_model1 import ITERATIONS, LexicalTable

# B sentences, V target vocabulary

SPECIAL = sorted((UNK, BOS, EOS))  # every list begins with these ids, so the column of each id equals the id
assert list(range(len(SPECIAL))) == SPECIAL


@dataclass(frozen=True, eq=False)
class Shortlist:
    """The target pieces of each source piece, and the target pieces in every list, as stored in a checkpoint."""

    offsets: NumpyArray  # [source vocabulary + 1], int64: the list of piece s is targets[offsets[s] : offsets[s + 1]]
    targets: NumpyArray  # [entries], ids of target pieces
    frequent: NumpyArray  # ids of target pieces that are in every list
    target_size: int

    @staticmethod
    def from_entries(
        sources: NumpyArray, targets: NumpyArray, frequent: NumpyArray, source_size: int, target_size: int
    ) -> "Shortlist":
        """Returns the shortlist with entry i for source piece sources[i] and target piece targets[i]."""
        keys = np.unique(np.asarray(sources, np.int64) * target_size + np.asarray(targets, np.int64))
        counts = np.bincount(keys // target_size, minlength=source_size)
        offsets = np.concatenate(([0], np.cumsum(counts)))
        return Shortlist(offsets, keys % target_size, np.unique(np.asarray(frequent, np.int64)), target_size)

    def union(self, other: "Shortlist") -> "Shortlist":
        sources = [np.repeat(np.arange(each.source_size), np.diff(each.offsets)) for each in (self, other)]
        return Shortlist.from_entries(
            np.concatenate(sources),
            np.concatenate((self.targets, other.targets)),
            np.concatenate((self.frequent, other.frequent)),
            self.source_size,
            self.target_size,
        )

    @property
    def source_size(self) -> int:
        return len(self.offsets) - 1

    def state(self) -> dict[str, Tensor]:
        """Returns the entry `shortlist` of a checkpoint, in the smallest unsigned types that hold the values."""
        lengths, pieces = np.diff(self.offsets), np.min_scalar_type(self.target_size - 1)
        return {
            "lengths": torch.from_numpy(lengths.astype(np.min_scalar_type(lengths.max(initial=0)))),
            "targets": torch.from_numpy(self.targets.astype(pieces)),
            "frequent": torch.from_numpy(self.frequent.astype(pieces)),
        }

    @staticmethod
    def from_state(state: Any, source_size: int, target_size: int) -> "Shortlist":
        """Returns the shortlist of a checkpoint. Raises ValueError if `state` does not match these vocabulary sizes."""
        try:
            lengths, targets, frequent = (
                state[name].numpy().astype(np.int64) for name in ("lengths", "targets", "frequent")
            )
            ids = np.concatenate((targets, frequent))
            offsets = np.concatenate(([0], np.cumsum(lengths)))
            valid = len(lengths) == source_size and (lengths >= 0).all() and offsets[-1] == len(targets)
            valid = valid and targets.ndim == frequent.ndim == 1 and ((ids >= 0) & (ids < target_size)).all()
        except (TypeError, KeyError, AttributeError, ValueError):
            valid = False
        if not valid:
            raise ValueError(
                "the shortlist in the checkpoint does not match the vocabularies; run nmtkit shortlist again"
            )
        return Shortlist(offsets, targets, frequent, target_size)

    def allowed(self, sentences: Encoded, extra: Sequence[Sequence[int]] = ()) -> npt.NDArray[np.bool_]:
        """Returns a bool for each sentence and target piece, [B, V]: whether the list of the sentence has the piece.

        `extra` has additional pieces for the list of each sentence.
        """
        allowed = np.zeros((len(sentences.lengths), self.target_size), np.bool_)
        allowed[:, SPECIAL] = True
        allowed[:, self.frequent] = True
        ids = np.asarray(sentences.ids)
        starts, widths = self.offsets[ids], self.offsets[ids + 1] - self.offsets[ids]
        allowed[np.repeat(sentences.sentence_of_id, widths), self.targets[ranges(starts, widths)]] = True
        for row, pieces in enumerate(extra):
            if pieces:
                allowed[row, list(pieces)] = True
        return allowed

    def coverage(self, source: Encoded, target: Encoded) -> "Coverage":
        """Returns the coverage of translations by the lists of their source sentences. Both sides contain eos."""
        covered = complete = size = 0
        for ids, translation in zip(source.split(), target.split(), strict=True):
            allowed = self.allowed(Encoded(ids, np.array([len(ids)])))[0]
            hits = allowed[translation]
            covered, complete, size = covered + int(hits.sum()), complete + int(hits.all()), size + int(allowed.sum())
        sentences = max(1, len(source.lengths))
        return Coverage(covered / max(1, len(target.ids)), complete / sentences, size / sentences)


@dataclass(frozen=True)
class Coverage:
    """Coverage of translations by the lists of their source sentences."""

    pieces: float  # share of the pieces of the translations, eos included, that are in the list of their sentence
    sentences: float  # share of the translations with all pieces in the list
    size: float  # mean number of pieces in the list of a sentence


def learned_entries(source: Encoded, target: Encoded, tokenizer: Tokenizer, number: int) -> LexicalEntries:
    """Learns the `number` most probable target pieces of each source piece, by IBM model 1.

    Sentences end in eos, which does not count. The source id `source_size` stands for the empty source word.
    """
    source, target = source.without_last(), target.without_last()
    progress.begin("Learning", "pairs", len(source.lengths), passes=1 + ITERATIONS)
    table = LexicalTable.train(source, target, tokenizer.source_size, tokenizer.target_size)
    return LexicalEntries(*table.best(number), None)


def most_frequent(target: Encoded, number: int) -> NumpyArray:
    """Returns the `number` most frequent pieces of sentences that end in eos. eos does not count."""
    counts = np.bincount(target.without_last().ids)
    return np.argsort(-counts, kind="stable")[: min(number, int((counts > 0).sum()))]


def shortlist_of(entries: LexicalEntries, tokenizer: Tokenizer) -> Shortlist:
    """Returns the shortlist with these entries.

    If a source piece is also in the target vocabulary, its list contains this piece, so that names can be copied.
    Entries of the empty source word are left out.
    """
    same_source, same_target = same_pieces(tokenizer)
    real = entries.sources < tokenizer.source_size
    return Shortlist.from_entries(
        np.concatenate((entries.sources[real], same_source)),
        np.concatenate((entries.targets[real], same_target)),
        np.empty(0, np.int64) if entries.frequent is None else entries.frequent,
        tokenizer.source_size,
        tokenizer.target_size,
    )


def same_pieces(tokenizer: Tokenizer) -> tuple[NumpyArray, NumpyArray]:
    """Returns the source ids and the target ids of the pieces that both vocabularies have, special pieces excluded."""
    if tokenizer.joint:
        ids = np.arange(len(SPECIAL), tokenizer.source_size)
        return ids, ids
    targets = {piece: id for id, piece in enumerate(tokenizer.target_pieces(range(tokenizer.target_size)))}
    pieces = tokenizer.source_pieces(range(tokenizer.source_size))
    pairs = [(id, targets[piece]) for id, piece in enumerate(pieces) if id >= len(SPECIAL) and piece in targets]
    columns = np.array(pairs, np.int64).reshape(-1, 2)
    return columns[:, 0], columns[:, 1]
