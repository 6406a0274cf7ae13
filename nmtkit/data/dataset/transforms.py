"""Transforms of training pairs: noise, casing, tags, BPE-dropout. `--transforms a,b` applies a, then b.

Transforms of text come before transforms of ids, because text does not keep a segmentation or a mask.

A registered factory is called as `factory(config, tokenizer)`. Training applies the transforms to each pair anew in
every epoch. If an epoch contains several copies of a pair, training applies the transforms to each copy anew.
Validation applies no transforms. Tags at the beginning of a source sentence are removed before a transform and put back
after the transform, so that the tags do not change.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import numpy as np
import numpy.typing as npt

from nmtkit.config import Config, option
from nmtkit.config.registry import Registry
from nmtkit.data.tokenizers.subword_sampling import SubwordSampler
from nmtkit.data.tokenizers.tokenizer import SPACE_SYMBOL, UNK, Tokenizer
from nmtkit.text.encoded import Ids
from nmtkit.text.sentences import SENTENCE_ENDS

Side = Any  # one side of a pair: a text or an array of ids [tokens] without eos, depending on `level`


class Transform(ABC):
    """Changes a training pair. The change may be random."""

    level: ClassVar[Literal["text", "ids"]] = "ids"  # type of the arguments and results of `transform`
    monolingual: ClassVar[bool] = False  # True if only pairs with the same language on both sides change
    source_only: bool = False  # True if target sentences never change

    @abstractmethod
    def transform(self, source: Side, target: Side, generator: np.random.Generator) -> tuple[Side, Side]:
        """Returns the pair to train on.

        `generator` is seeded by (seed, `Draw` of transform_pipeline.py, pair, copy of the pair, name of the transform).
        This generator must be the only source of randomness.
        """


TRANSFORMS: Registry[Transform] = Registry("transform", "--transforms", several=True)


# --- noise of words ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Words:
    """The words of a sentence. The sentence is an array of pieces."""

    begins: npt.NDArray[np.bool_]  # [pieces], True for the first piece of each word
    index: npt.NDArray[np.int64]  # [pieces], index of the word to which each piece belongs
    count: int  # number of words


class WordNoise(Transform):
    """Noise that changes whole source words.

    A word begins at the first piece of the sentence and at every piece that begins with a space. A word ends before the
    beginning of the next word.
    """

    source_only = True

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.pieces = tokenizer.source_pieces(range(tokenizer.source_size))
        self.begins_word = np.array([piece.startswith(SPACE_SYMBOL) for piece in self.pieces])
        # with byte fallback, encoded text has no <unk>, so an <unk> is a blank or a mask, which stands for words
        self.begins_word[UNK] = tokenizer.source.facts.byte_fallback

    def id_of(self, *symbols: str, flag: str) -> int:
        """Returns the id of the first symbol that is a piece. Raises ValueError with `flag` if no symbol is a piece."""
        for piece in (piece for symbol in symbols for piece in (symbol, SPACE_SYMBOL + symbol)):
            if piece in self.pieces:
                return self.pieces.index(piece)
        raise ValueError(f"{flag} {symbols[0]} is not a piece of the source vocabulary; give a piece, such as <unk>")

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
        self.blank = self.id_of(config.word_blank_symbol, flag="--word-blank-symbol")

    def noised(self, ids: Ids, words: Words, generator: np.random.Generator) -> Ids:
        blank = (generator.random(words.count) < self.probability)[words.index]
        return np.where(blank, self.blank, ids)[words.begins | ~blank].astype(ids.dtype)


@dataclass(frozen=True, kw_only=True)
class WordShuffleConfig(Config):
    word_shuffle: int = option(3, "Largest number of positions by which a source word moves.", min=1)


@TRANSFORMS.register("word_shuffle", WordShuffleConfig())
class WordShuffle(WordNoise):
    """Moves source words by at most k places (Lample et al. 2018, section 2.3: k = 3).

    Words are sorted by their position plus a uniform random number from 0 to k + 1.
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


@dataclass(frozen=True, kw_only=True)
class SpanMaskingConfig(Config):
    mask_share: float = option(0.35, "Share of words that are masked.", above=0, below=1)
    mask_length: float = option(3.5, "Mean length of a masked span in words (Poisson distribution).", min=1, max=1_000)
    mask_symbol: str | None = option(
        None, "Piece that replaces a span; none: <mask> if the vocabulary has this piece, else <unk>."
    )
    mask_permute: bool = option(False, "Also put the sentences of a line into a random order.")


@TRANSFORMS.register("span_masking", SpanMaskingConfig())
class SpanMasking(WordNoise):
    """Masks spans of source words in pairs with the same language on both sides. The model learns to restore the text.

    Source: mBART (Liu et al. 2020, section 2.2), after BART (Lewis et al. 2020). One symbol replaces each span; a span
    of zero words inserts a symbol. Pairs of two languages are translations and do not change.
    """

    monolingual = True

    def __init__(self, config: SpanMaskingConfig, tokenizer: Tokenizer) -> None:
        super().__init__(tokenizer)
        self.share, self.length, self.permute = config.mask_share, config.mask_length, config.mask_permute
        wanted = ("<mask>", "<unk>") if config.mask_symbol is None else (config.mask_symbol,)
        self.mask = self.id_of(*wanted, flag="--mask-symbol")
        self.ends_sentence = np.array([piece.endswith(tuple(SENTENCE_ENDS)) for piece in self.pieces])

    def noised(self, ids: Ids, words: Words, generator: np.random.Generator) -> Ids:
        starts = np.flatnonzero(words.begins)
        parts = np.split(ids, starts[1:])
        if self.permute:
            ends = [index for index, part in enumerate(parts[:-1], 1) if self.ends_sentence[part[-1]]]
            bounds = list(zip([0, *ends], [*ends, len(parts)], strict=True))
            parts = [part for index in generator.permutation(len(bounds)) for part in parts[slice(*bounds[index])]]
        masked = int(self.share * len(parts) + generator.random())  # rounds up or down at random, so the mean is exact
        spans: list[int] = []
        while sum(spans) < masked:
            spans.append(min(int(generator.poisson(self.length)), masked - sum(spans)))
        kept = len(parts) - masked
        is_span = np.zeros(kept + len(spans), np.bool_)
        is_span[generator.choice(len(is_span), len(spans), replace=False)] = True
        noised, position = [], 0
        for span in is_span.tolist():
            noised.append(np.array([self.mask], ids.dtype) if span else parts[position])
            position += spans.pop(0) if span else 1
        return np.concatenate(noised)


# --- casing, tags, segmentation ---------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class CasingConfig(Config):
    casing_lower: float = option(0.05, "Share of pairs in lower case.", min=0, max=1)
    casing_upper: float = option(0.05, "Share of pairs in capitals.", min=0, max=1)
    casing_title: float = option(0.05, "Share of pairs in title case (each word begins with a capital).", min=0, max=1)
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
class RandomCasing(Transform):
    """Changes given shares of the pairs to lower case, to upper case, or to title case.

    Training on such pairs helps to translate headlines and text with irregular case.
    """

    level = "text"

    def __init__(self, config: CasingConfig, tokenizer: Tokenizer) -> None:
        self.bounds = np.cumsum([config.casing_lower, config.casing_upper, config.casing_title])
        self.both = config.casing_sides == "both"
        self.source_only = not self.both

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
class SourceTag(Transform):
    """Puts a tag before a given share of the source sentences (Johnson et al. 2017, section 3)."""

    source_only = True

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
        self.source = SubwordSampler(tokenizer.source, config.bpe_dropout, "source")
        self.target = self.source
        if not tokenizer.one_model:  # two models can share a table of ids, but they segment text differently
            self.target = SubwordSampler(tokenizer.target, config.bpe_dropout, "target")

    def transform(self, source: Ids, target: Ids, generator: np.random.Generator) -> tuple[Ids, Ids]:
        return np.array(self.source(source, generator), np.int64), np.array(self.target(target, generator), np.int64)


# --- typing errors, lines of noise, ends without punctuation ----------------------------------------------------------
# These transforms come from OpusTrainer (github.com/hplt-project/OpusTrainer). Mozilla trains student models with the
# default shares.

END_PUNCTUATION = (*SENTENCE_ENDS, *",;:、，；：؛۔॥")
REMOVED = "".join(END_PUNCTUATION) + " \u00a0\u202f"  # French has a space before some punctuation
KEYBOARD = ("qwertyuiop", "asdfghjkl", "zxcvbnm")
NEIGHBOURS = {key: row[max(0, at - 1) : at] + row[at + 1 : at + 2] for row in KEYBOARD for at, key in enumerate(row)}


@dataclass(frozen=True, kw_only=True)
class TyposConfig(Config):
    typos: float = option(0.05, "Share of source sentences with typing errors.", above=0, max=1)
    typos_words: float = option(
        0.1,
        "Share of words with a typing error, in sentences with errors. At least one word has an error.",
        above=0,
        max=1,
    )


@TRANSFORMS.register("typos", TyposConfig())
class Typos(Transform):
    """Puts typing errors into a given share of the source sentences.

    An error swaps two letters, leaves out or repeats a letter, replaces a letter by a neighbour on the keyboard, or
    removes the space after the word.
    """

    level = "text"
    source_only = True

    def __init__(self, config: TyposConfig, tokenizer: Tokenizer) -> None:
        self.share, self.words = config.typos, config.typos_words

    def transform(self, source: str, target: str, generator: np.random.Generator) -> tuple[str, str]:
        words = source.split(" ")
        if generator.random() >= self.share or not source:
            return source, target
        wrong = generator.random(len(words)) < self.words
        wrong[generator.integers(len(words))] = True
        ends = [" "] * (len(words) - 1) + [""]
        for index in np.flatnonzero(wrong).tolist():
            words[index], ends[index] = mistyped(words[index], ends[index], generator)
        return "".join(word + end for word, end in zip(words, ends, strict=True)), target


def mistyped(word: str, end: str, generator: np.random.Generator) -> tuple[str, str]:
    """Makes a random typing error. Returns the new word and the new `end`. `end` is the text after the word: " " or "".

    Nothing changes if the word does not allow the error: for example, the only letter of a word is not left out.
    """
    kind, at = int(generator.integers(5)), int(generator.integers(max(1, len(word))))
    letter = word[at : at + 1]
    if kind == 0:
        return word[:at] + word[at + 1 : at + 2] + letter + word[at + 2 :], end
    if kind == 1 and len(word) > 1:
        return word[:at] + word[at + 1 :], end
    if kind == 2:
        return word[:at] + letter + word[at:], end
    if kind == 3 and letter.lower() in NEIGHBOURS:
        keys = NEIGHBOURS[letter.lower()]
        key = keys[int(generator.integers(len(keys)))]
        return word[:at] + (key.upper() if letter.isupper() else key) + word[at + 1 :], end
    return (word, "") if kind == 4 else (word, end)


# first and last letter of each script: Latin, Latin with accents, Greek, Cyrillic, Hebrew, Hiragana, Chinese
SCRIPTS = ("az", "ßö", "αω", "ая", "את", "ぁゖ", "一龥")


@dataclass(frozen=True, kw_only=True)
class NoiseLinesConfig(Config):
    noise_lines: float = option(
        0.0005, "Share of pairs replaced by the same random letters on both sides.", above=0, max=1
    )


@TRANSFORMS.register("noise_lines", NoiseLinesConfig())
class NoiseLines(Transform):
    """Replaces a given share of the pairs by two to five random words, the same on both sides.

    The model learns to copy text that it cannot translate. A word has one to four letters of one script.
    """

    level = "text"

    def __init__(self, config: NoiseLinesConfig, tokenizer: Tokenizer) -> None:
        self.share = config.noise_lines

    def transform(self, source: str, target: str, generator: np.random.Generator) -> tuple[str, str]:
        if generator.random() >= self.share:
            return source, target
        first, last = map(ord, SCRIPTS[int(generator.integers(len(SCRIPTS)))])
        lengths = generator.integers(1, 5, int(generator.integers(2, 6))).tolist()
        words = ["".join(map(chr, generator.integers(first, last + 1, length).tolist())) for length in lengths]
        return (" ".join(words),) * 2


@dataclass(frozen=True, kw_only=True)
class EndPunctuationConfig(Config):
    end_punctuation: float = option(
        0.2, "Share of pairs without the punctuation at the end, if both sides end in punctuation.", above=0, max=1
    )


@TRANSFORMS.register("end_punctuation", EndPunctuationConfig())
class EndPunctuation(Transform):
    """Removes the punctuation at the end of both sides in a given share of the pairs.

    A pair does not change if a side has no punctuation at the end. With such pairs, the model learns to translate
    titles and labels of buttons without adding a full stop.
    """

    level = "text"

    def __init__(self, config: EndPunctuationConfig, tokenizer: Tokenizer) -> None:
        self.share = config.end_punctuation

    def transform(self, source: str, target: str, generator: np.random.Generator) -> tuple[str, str]:
        drawn = generator.random() < self.share
        if drawn and source.endswith(END_PUNCTUATION) and target.endswith(END_PUNCTUATION):
            sides = source.rstrip(REMOVED), target.rstrip(REMOVED)
            return sides if all(sides) else (source, target)
        return source, target
