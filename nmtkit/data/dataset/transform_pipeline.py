"""Applies the transforms of a training run to pairs, with separate random numbers for each pair and transform.

Updates and micro-batches are planned from the lengths on disk, before transforms, so that the plan is the same for any
number of processes. A micro-batch may therefore exceed --max-tokens after the transforms. Losses are divided by the
number of tokens after the transforms.
"""

import hashlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from nmtkit.data.dataset.transforms import Transform
from nmtkit.data.tokenizers.tokenizer import BOS, EOS, Tokenizer
from nmtkit.text.encoded import Encoded, Ids

Draw = int | tuple[int, int]  # the epoch; or (epoch, index of the update) if an epoch can repeat a pair


class TransformPipeline:
    """All transforms of a training run with their names, in order. Several threads may call one pipeline at once.

    Transforms of text come before transforms of ids. In the other order, ids would be decoded and encoded again: a
    random segmentation would be lost, and a mask cannot be decoded. The random numbers of a transform depend only on
    (seed, draw, pair, copy, name of the transform). Raises ValueError for a transform of text if encoding and decoding
    with the tokenizer can lose characters.
    """

    def __init__(self, transforms: Sequence[tuple[str, Transform]], tokenizer: Tokenizer, seed: int) -> None:
        self.transforms = sorted(transforms, key=lambda named: named[1].level != "text")  # a stable sort
        self.tokenizer = tokenizer
        self.seed = seed
        languages = frozenset(tokenizer.languages.values())
        self.language_ids = languages, languages if tokenizer.joint else frozenset()
        for name, transform in transforms:
            if transform.level == "text":
                tokenizer.check_lossless(f"--transforms {name}")

    def __call__(
        self,
        draw: Draw,
        pairs: npt.NDArray[np.int64],
        source: Encoded,
        target: Encoded,
        *,
        monolingual: npt.NDArray[np.bool_],
        copies: npt.ArrayLike = 0,
    ) -> tuple[Encoded, Encoded]:
        """Applies the transforms to the pairs with the indices `pairs`. All given and returned sentences end in eos.

        `monolingual` [pairs] says which pairs have the same language on both sides. `copies` [pairs] is 0, 1, … for the
        copies of a pair with the same draw. Raises ValueError if a transform returns an invalid result.
        """
        sides = []
        languages = []  # for both sides: the language tokens at the beginning of each sentence
        for side, known in zip((source, target), self.language_ids, strict=True):
            taken, sentences = _without_prefixes([ids[:-1] for ids in side.split()], known)
            languages.append(taken)
            sides.append(sentences)
        tags: list[Ids] = [ids[:0] for ids in sides[0]]
        for name, transform in self.transforms:
            new, sides[0] = _without_prefixes(sides[0], self.tokenizer.source_tags)
            tags = list(map(_after, tags, new))  # a new tag comes after the earlier tags
            key = hashlib.blake2b(f"{self.seed} {draw} {name}".encode(), digest_size=8).digest()
            bits = np.random.Philox(key=0)
            generator, state = np.random.Generator(bits), bits.state
            state["state"]["key"][0] = int.from_bytes(key, "little")
            before = sides if transform.level == "ids" else self._decoded(sides)
            after = []
            applies = monolingual if transform.monolingual else np.ones_like(monolingual)
            numbers = np.broadcast_to(copies, pairs.shape)
            for pair, copy, applied, first, second in zip(pairs, numbers, applies, *before, strict=True):
                if applied:
                    state["state"]["key"][1], state["state"]["counter"][3] = pair, copy
                    bits.state = state  # restart the generator for this pair
                after.append(transform.transform(first, second, generator) if applied else (first, second))
            sides = self._checked(name, transform.level, after, before, sides)
        heads = list(map(_after, languages[0], tags)), languages[1]
        return self._joined(heads[0], sides[0]), self._joined(heads[1], sides[1])

    def _decoded(self, sides: list[list[Ids]]) -> list[list[str]]:
        decoders = self.tokenizer.decode_source, self.tokenizer.decode_target
        return [[decode(ids.tolist()) for ids in side] for decode, side in zip(decoders, sides, strict=True)]

    def _checked(
        self, name: str, level: str, after: list[Any], before: list[list[Any]], ids: list[list[Ids]]
    ) -> list[list[Ids]]:
        """Checks the results `after` of a transform, and encodes changed texts. Returns the ids of both sides.

        `before` has the arguments of the transform. `ids` has the ids of the same sentences. Raises ValueError for an
        invalid result.
        """
        for pair in after:
            if not isinstance(pair, tuple) or len(pair) != 2:
                raise ValueError(f"--transforms {name} returned a {type(pair).__name__}, not a pair (source, target)")
        tokenizer = self.tokenizer
        sizes = tokenizer.source_size, tokenizer.target_size
        if level == "ids":
            return [[_as_ids(name, pair[side], size) for pair in after] for side, size in enumerate(sizes)]
        result = [list(side) for side in ids]
        for side, encode in enumerate((tokenizer.encode_source, tokenizer.encode_target)):
            changed = [row for row, pair in enumerate(after) if _is_new_text(name, pair[side], before[side][row])]
            encoded = encode([after[row][side] for row in changed]).split()
            for row, sentence in zip(changed, encoded, strict=True):
                result[side][row] = sentence[:-1]
        return result

    def _joined(self, heads: list[Ids], sentences: list[Ids]) -> Encoded:
        eos = np.array([EOS])
        parts = [part for head, ids in zip(heads, sentences, strict=True) for part in (head, ids, eos)]
        lengths = [len(head) + len(ids) + 1 for head, ids in zip(heads, sentences, strict=True)]
        return Encoded(np.concatenate(parts).astype(np.int64), np.array(lengths, np.int64))


def _without_prefixes(sentences: list[Ids], prefixes: frozenset[int]) -> tuple[list[Ids], list[Ids]]:
    """Splits each sentence into two parts: the leading ids that are in `prefixes`, and the rest. Returns both lists."""
    if not prefixes:
        return [ids[:0] for ids in sentences], sentences
    counts = [next((i for i, id in enumerate(ids.tolist()) if id not in prefixes), len(ids)) for ids in sentences]
    pairs = list(zip(sentences, counts, strict=True))
    return [ids[:count] for ids, count in pairs], [ids[count:] for ids, count in pairs]


def _after(first: Ids, second: Ids) -> Ids:
    """Concatenates two arrays of ids. `first` is often empty."""
    return np.concatenate((first, second)) if len(first) else second


def _is_new_text(name: str, text: Any, before: str) -> bool:
    if not isinstance(text, str) or "\n" in text:
        kind = "a text of several lines" if isinstance(text, str) else f"a {type(text).__name__}"
        raise ValueError(f"--transforms {name} works on text and returned {kind}; it must return a line for each side")
    return text != before


def _as_ids(name: str, sentence: Any, size: int) -> Ids:
    ids = np.asarray(sentence)
    if ids.ndim != 1 or (len(ids) and ids.dtype.kind not in "iu"):
        raise ValueError(f"--transforms {name} returned a {type(sentence).__name__} where a list of ids is expected")
    if len(ids) and (int(ids.min()) < 0 or int(ids.max()) >= size or np.isin(ids, (BOS, EOS)).any()):
        raise ValueError(
            f"--transforms {name} returned ids from {ids.min()} to {ids.max()}; they must be below {size}, the size of "
            f"the vocabulary, without bos ({BOS}) and eos ({EOS})"
        )
    return ids.astype(np.int64)
