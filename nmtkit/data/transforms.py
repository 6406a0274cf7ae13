"""Transforms of training pairs: noise, casing, tags, BPE-dropout. `--transforms a,b` applies a, then b.

A registered factory is called as `factory(config, tokenizer)`. Training applies all transforms to each pair, again in
every epoch. Validation applies no transforms. Tags at the beginning of a source sentence do not change, because
a transform gets the sentence without the tags.

Updates and micro-batches are planned from the lengths on disk, before transforms, so that the plan is the same for any
number of processes. A micro-batch may therefore exceed --max-tokens. Losses are divided by the number of tokens that
remain after the transforms.
"""

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import numpy as np
import numpy.typing as npt

from nmtkit.config import Config, option
from nmtkit.data.subword_sampling import SubwordSampler
from nmtkit.data.tokenizer import BOS, EOS, SPACE_SYMBOL, UNK, Encoded, Tokenizer
from nmtkit.registry import Registry

Side = Any  # one side of a pair: a text or an array of ids [tokens] without eos, depending on `level`
Ids = npt.NDArray[Any]


class Transform(ABC):
    """Changes a training pair. The change may be random."""

    level: ClassVar[Literal["text", "ids"]] = "ids"  # type of the arguments and results of `transform`

    @abstractmethod
    def transform(self, source: Side, target: Side, generator: np.random.Generator) -> tuple[Side, Side]:
        """Returns the pair to train on.

        `generator` is seeded by (seed, epoch, pair, name) and must be the only source of randomness.
        """


TRANSFORMS: Registry[Transform] = Registry("transform", "--transforms", several=True)


# --- noise of words ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Words:
    """The words of a sentence of pieces."""

    begins: npt.NDArray[np.bool_]  # marks the first piece of each word
    index: npt.NDArray[np.int64]  # the word of each piece
    count: int


class WordNoise(Transform):
    """Noise that changes whole source words.

    A word begins at the first piece of the sentence and at every piece that begins with a space. A word ends before the
    beginning of the next word.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        pieces = tokenizer.source_pieces(range(tokenizer.source_size))
        self.begins_word = np.array([piece.startswith(SPACE_SYMBOL) for piece in pieces])

    def transform(self, source: Ids, target: Ids, generator: np.random.Generator) -> tuple[Ids, Ids]:
        if not len(source):
            return source, target
        begins = self.begins_word[source]
        begins[0] = True
        index = np.cumsum(begins) - 1
        return self.noised(source, Words(begins, index, int(index[-1]) + 1), generator), target

    @abstractmethod
    def noised(self, ids: Ids, words: Words, generator: np.random.Generator) -> Ids:
        """Returns the noised ids of a sentence."""


@dataclass(frozen=True, kw_only=True)
class WordDropoutConfig(Config):
    word_dropout: float = option(0.1, "Share of source words left out. At least one word is kept.", above=0, below=1)


@TRANSFORMS.register("word_dropout", WordDropoutConfig())
class WordDropout(WordNoise):
    """Leaves out each source word with a given probability (Lample et al. 2018, section 2.3: 0.1)."""

    def __init__(self, config: WordDropoutConfig, tokenizer: Tokenizer) -> None:
        super().__init__(tokenizer)
        self.probability = config.word_dropout

    def noised(self, ids: Ids, words: Words, generator: np.random.Generator) -> Ids:
        kept = generator.random(words.count) >= self.probability
        if not kept.any():
            kept[generator.integers(words.count)] = True
        return ids[kept[words.index]]


@dataclass(frozen=True, kw_only=True)
class WordBlankConfig(Config):
    word_blank: float = option(0.2, "Share of source words replaced by a blank.", above=0, max=1)
    word_blank_symbol: str = option("<unk>", "The blank: a piece of the source vocabulary.")


@TRANSFORMS.register("word_blank", WordBlankConfig())
class WordBlank(WordNoise):
    """Replaces each source word by a blank with a given probability.

    Source: Xie et al. 2017. The code of Lample et al. 2018 has the probability 0.2.
    """

    def __init__(self, config: WordBlankConfig, tokenizer: Tokenizer) -> None:
        super().__init__(tokenizer)
        self.probability = config.word_blank
        pieces = tokenizer.source_pieces(range(tokenizer.source_size))
        symbol = config.word_blank_symbol
        known = [piece for piece in (symbol, SPACE_SYMBOL + symbol) if piece in pieces]
        if not known:
            raise ValueError(f"--word-blank-symbol {symbol} is not a piece of the source vocabulary; <unk> always is")
        self.blank = pieces.index(known[0])

    def noised(self, ids: Ids, words: Words, generator: np.random.Generator) -> Ids:
        blank = (generator.random(words.count) < self.probability)[words.index]
        return np.where(blank, self.blank, ids)[words.begins | ~blank].astype(ids.dtype)


@dataclass(frozen=True, kw_only=True)
class WordShuffleConfig(Config):
    word_shuffle: int = option(3, "Largest number of words by which a source word moves.", min=1)


@TRANSFORMS.register("word_shuffle", WordShuffleConfig())
class WordShuffle(WordNoise):
    """Moves source words by at most k places (Lample et al. 2018, section 2.3: k = 3).

    Words are sorted by their position plus a uniform number below k + 1.
    """

    def __init__(self, config: WordShuffleConfig, tokenizer: Tokenizer) -> None:
        super().__init__(tokenizer)
        self.distance = config.word_shuffle

    def noised(self, ids: Ids, words: Words, generator: np.random.Generator) -> Ids:
        positions = np.arange(words.count)
        order = np.argsort(positions + generator.random(words.count) * (self.distance + 1), kind="stable")
        ranks = np.empty(words.count, np.int64)
        ranks[order] = positions
        return ids[np.argsort(ranks[words.index], kind="stable")]


# --- casing, tags, segmentation ---------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class CasingConfig(Config):
    casing_lower: float = option(0.05, "Share of pairs in lower case.", min=0, max=1)
    casing_upper: float = option(0.05, "Share of pairs in capitals.", min=0, max=1)
    casing_title: float = option(0.05, "Share of pairs whose words begin with a capital.", min=0, max=1)
    casing_sides: Literal["both", "source"] = option("both", "Sides whose case changes.")

    def __post_init__(self) -> None:
        super().__post_init__()
        total = self.casing_lower + self.casing_upper + self.casing_title
        if not 0 < total <= 1:
            raise ValueError(
                f"--casing-lower, --casing-upper and --casing-title add up to {total:g}; "
                "the sum must be above 0 and at most 1"
            )


@TRANSFORMS.register("casing", CasingConfig())
class Casing(Transform):
    """Changes given shares of the pairs to lower case, to upper case, or to title case.

    Training on such pairs helps to translate headlines and text with irregular case.
    """

    level = "text"

    def __init__(self, config: CasingConfig, tokenizer: Tokenizer) -> None:
        self.bounds = np.cumsum([config.casing_lower, config.casing_upper, config.casing_title])
        self.both = config.casing_sides == "both"

    def transform(self, source: str, target: str, generator: np.random.Generator) -> tuple[str, str]:
        change = (str.lower, str.upper, title, str)[int(np.searchsorted(self.bounds, generator.random(), "right"))]
        return change(source), change(target) if self.both else target


def title(text: str) -> str:
    """Returns the text with the first letter of each word in upper case. Other letters do not change."""
    return " ".join(word[:1].upper() + word[1:] for word in text.split(" "))


@dataclass(frozen=True, kw_only=True)
class TagConfig(Config):
    tag_symbol: str = option("", "The tag: a symbol given to `nmtkit preprocess --tag`.")
    tag_share: float = option(1.0, "Share of pairs that get the tag.", above=0, max=1)


@TRANSFORMS.register("tag", TagConfig())
class Tag(Transform):
    """Puts a tag before a given share of the source sentences (Johnson et al. 2017, section 3)."""

    def __init__(self, config: TagConfig, tokenizer: Tokenizer) -> None:
        if not config.tag_symbol:
            raise ValueError("--transforms tag needs --tag-symbol, the tag to put before source sentences")
        tokenizer.check_tag(config.tag_symbol)
        self.tag = tokenizer.encode_source([config.tag_symbol]).ids[:1]
        self.share = config.tag_share

    def transform(self, source: Ids, target: Ids, generator: np.random.Generator) -> tuple[Ids, Ids]:
        tagged = generator.random() < self.share
        return np.concatenate((self.tag.astype(source.dtype), source)) if tagged else source, target


@dataclass(frozen=True, kw_only=True)
class BPEDropoutConfig(Config):
    bpe_dropout: float = option(
        0.1,
        "Share of merges left out. For a unigram vocabulary: exponent (alpha) of the probabilities of segmentations.",
        above=0,
        below=1,
    )


@TRANSFORMS.register("bpe_dropout", BPEDropoutConfig())
class BPEDropout(Transform):
    """Segments both sides at random: BPE-dropout (Provilkov et al. 2020), or unigram sampling (Kudo 2018)."""

    def __init__(self, config: BPEDropoutConfig, tokenizer: Tokenizer) -> None:
        self.source = SubwordSampler(tokenizer.source_model, config.bpe_dropout, "source")
        self.target = self.source
        if not tokenizer.joint:
            self.target = SubwordSampler(tokenizer.target_model, config.bpe_dropout, "target")

    def transform(self, source: Ids, target: Ids, generator: np.random.Generator) -> tuple[Ids, Ids]:
        return np.array(self.source(source, generator), np.int64), np.array(self.target(target, generator), np.int64)


# --- the pipeline -----------------------------------------------------------------------------------------------------


class TransformPipeline:
    """All transforms of a training run with their names, in order. Several threads may call one pipeline at once.

    The random numbers of a transform depend only on (seed, epoch, pair, name of the transform). Raises ValueError for a
    transform of text if decoding with the tokenizer does not return the encoded text.
    """

    def __init__(self, transforms: Sequence[tuple[str, Transform]], tokenizer: Tokenizer, seed: int) -> None:
        self.transforms = transforms
        self.tokenizer = tokenizer
        self.seed = seed
        languages = frozenset(tokenizer.languages.values())
        self.language_ids = languages, languages if tokenizer.joint else frozenset()
        for name, transform in transforms:
            if transform.level == "text":
                tokenizer.check_lossless(f"--transforms {name}")

    def __call__(
        self, epoch: int, pairs: npt.NDArray[np.int64], source: Encoded, target: Encoded
    ) -> tuple[Encoded, Encoded]:
        """Applies the transforms to `pairs` in this epoch. Sentences end in eos, before and after."""
        sides = []
        languages = []  # the language tokens at the beginning of each sentence, for both sides
        for side, known in zip((source, target), self.language_ids, strict=True):
            taken, sentences = _without_prefixes([ids[:-1] for ids in side.split()], known)
            languages.append(taken)
            sides.append(sentences)
        tags: list[Ids] = [ids[:0] for ids in sides[0]]
        for name, transform in self.transforms:
            new, sides[0] = _without_prefixes(sides[0], self.tokenizer.source_tags)
            tags = list(map(_after, new, tags))
            key = hashlib.blake2b(f"{self.seed} {epoch} {name}".encode(), digest_size=8).digest()
            bits = np.random.Philox(key=0)
            generator, state = np.random.Generator(bits), bits.state
            state["state"]["key"][0] = int.from_bytes(key, "little")
            before = sides if transform.level == "ids" else self._decoded(name, sides)
            after = []
            for pair, one, other in zip(pairs.tolist(), *before, strict=True):
                state["state"]["key"][1] = pair
                bits.state = state  # restart the generator for this pair
                after.append(transform.transform(one, other, generator))
            sides = self._checked(name, transform.level, after, before, sides)
        heads = list(map(_after, languages[0], tags)), languages[1]
        return self._joined(heads[0], sides[0]), self._joined(heads[1], sides[1])

    def _decoded(self, name: str, sides: list[list[Ids]]) -> list[list[str]]:
        if any((ids == UNK).any() for side in sides for ids in side):
            raise ValueError(
                f"--transforms {name} works on text, but <unk> has no text; name {name} before transforms that "
                "make <unk>, such as word_blank"
            )
        decoders = self.tokenizer.decode_source, self.tokenizer.decode_target
        return [[decode(ids.tolist()) for ids in side] for decode, side in zip(decoders, sides, strict=True)]

    def _checked(
        self, name: str, level: str, after: list[Any], before: list[list[Any]], ids: list[list[Ids]]
    ) -> list[list[Ids]]:
        """Checks and encodes the results of a transform. Returns the ids of both sides.

        Raises ValueError for a result that a transform must not return.
        """
        tokenizer = self.tokenizer
        encoders = tokenizer.encode_source, tokenizer.encode_target
        result = []
        for index, size in enumerate((tokenizer.source_size, tokenizer.target_size)):
            made = []
            for pair in after:
                if not isinstance(pair, tuple) or len(pair) != 2:
                    raise ValueError(
                        f"--transforms {name} returned a {type(pair).__name__}, not a pair (source, target)"
                    )
                made.append(pair[index])
            if level == "text":
                changed = [row for row, text in enumerate(made) if _is_new_text(name, text, before[index][row])]
                encoded = encoders[index]([made[row] for row in changed]).split()
                made = list(ids[index])
                for row, sentence in zip(changed, encoded, strict=True):
                    made[row] = sentence[:-1]
            else:
                made = [_as_ids(name, sentence, size) for sentence in made]
            result.append(made)
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
        raise ValueError(
            f"--transforms {name} works on text and returned {kind}; it must return a line of text for each side"
        )
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
