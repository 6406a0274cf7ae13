"""Transforms of training pairs by name (`--transforms a,b`), in the order given: noise, casing, tags, BPE-dropout.

A registered factory is called as `factory(config, tokenizer)`. Transforms see every pair of the training set each time
it is trained on, and never those of a validation. Tags at the beginning of a source sentence stay there: a transform
gets the sentence without them.

Updates and micro-batches are those of the lengths on disk, whatever transforms make of them, so that they are the same
with any number of processes; a micro-batch may thus exceed --max-tokens. Losses are divided by the tokens there are.
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

Side = Any  # one side of a pair: a text, or an array of ids [tokens] without eos, by the `level` of the transform
Ids = npt.NDArray[Any]


class Transform(ABC):
    """Changes a training pair, at random perhaps."""

    level: ClassVar[Literal["text", "ids"]] = "ids"  # the type that `transform` takes and returns

    @abstractmethod
    def transform(self, source: Side, target: Side, generator: np.random.Generator) -> tuple[Side, Side]:
        """Returns the pair to train on. `generator` is seeded by (seed, epoch, sentence) and is the only randomness."""


TRANSFORMS: Registry[Transform] = Registry("transform", "--transforms", several=True)


# --- noise of words ---------------------------------------------------------------------------------------------------


class WordNoise(Transform):
    """Noise of whole source words, which are the pieces from one that begins with a space up to the next such."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        pieces = tokenizer.source_pieces(range(tokenizer.source_size))
        self.begins_word = np.array([piece.startswith(SPACE_SYMBOL) for piece in pieces])

    def transform(self, source: Ids, target: Ids, generator: np.random.Generator) -> tuple[Ids, Ids]:
        if not len(source):
            return source, target
        begins = self.begins_word[source]
        begins[0] = True
        word = np.cumsum(begins) - 1  # of each piece
        return self.noised(source, begins, word, int(word[-1]) + 1, generator), target

    @abstractmethod
    def noised(
        self, ids: Ids, begins: npt.NDArray[np.bool_], word: npt.NDArray[np.int64], words: int,
        generator: np.random.Generator,
    ) -> Ids:  # fmt: skip
        """Returns the noised ids. `begins` marks the first piece of each of the `words`, and `word` numbers them."""


@dataclass(frozen=True, kw_only=True)
class WordDropoutConfig(Config):
    word_dropout: float = option(0.1, "Share of source words left out; one is kept.", above=0, below=1)


@TRANSFORMS.register("word_dropout", WordDropoutConfig())
class WordDropout(WordNoise):
    """Leaves out each source word with a probability (Lample et al. 2018, section 2.3: 0.1)."""

    def __init__(self, config: WordDropoutConfig, tokenizer: Tokenizer) -> None:
        super().__init__(tokenizer)
        self.probability = config.word_dropout

    def noised(
        self, ids: Ids, begins: npt.NDArray[np.bool_], word: npt.NDArray[np.int64], words: int,
        generator: np.random.Generator,
    ) -> Ids:  # fmt: skip
        kept = generator.random(words) >= self.probability
        if not kept.any():
            kept[generator.integers(words)] = True
        return ids[kept[word]]


@dataclass(frozen=True, kw_only=True)
class WordBlankConfig(Config):
    word_blank: float = option(0.2, "Share of source words that a blank takes the place of.", above=0, max=1)
    word_blank_symbol: str = option("<unk>", "The blank: a piece of the source vocabulary.")


@TRANSFORMS.register("word_blank", WordBlankConfig())
class WordBlank(WordNoise):
    """Replaces each source word by a blank with a probability (Xie et al. 2017; 0.2 in Lample et al.'s own code)."""

    def __init__(self, config: WordBlankConfig, tokenizer: Tokenizer) -> None:
        super().__init__(tokenizer)
        self.probability = config.word_blank
        pieces = tokenizer.source_pieces(range(tokenizer.source_size))
        symbol = config.word_blank_symbol
        known = [piece for piece in (symbol, SPACE_SYMBOL + symbol) if piece in pieces]
        if not known:
            raise ValueError(f"--word-blank-symbol {symbol} is no piece of the source vocabulary; <unk> always is")
        self.blank = pieces.index(known[0])

    def noised(
        self, ids: Ids, begins: npt.NDArray[np.bool_], word: npt.NDArray[np.int64], words: int,
        generator: np.random.Generator,
    ) -> Ids:  # fmt: skip
        blank = (generator.random(words) < self.probability)[word]
        return np.where(blank, self.blank, ids)[begins | ~blank].astype(ids.dtype)


@dataclass(frozen=True, kw_only=True)
class WordShuffleConfig(Config):
    word_shuffle: int = option(3, "Words that a source word moves at most.", min=1)


@TRANSFORMS.register("word_shuffle", WordShuffleConfig())
class WordShuffle(WordNoise):
    """Moves source words by at most k places (Lample et al. 2018, section 2.3: k = 3).

    Words are sorted by their position plus a uniform number below k + 1.
    """

    def __init__(self, config: WordShuffleConfig, tokenizer: Tokenizer) -> None:
        super().__init__(tokenizer)
        self.distance = config.word_shuffle

    def noised(
        self, ids: Ids, begins: npt.NDArray[np.bool_], word: npt.NDArray[np.int64], words: int,
        generator: np.random.Generator,
    ) -> Ids:  # fmt: skip
        order = np.argsort(np.arange(words) + generator.random(words) * (self.distance + 1), kind="stable")
        place = np.empty(words, np.int64)
        place[order] = np.arange(words)
        return ids[np.argsort(place[word], kind="stable")]


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
                f"--casing-lower, --casing-upper and --casing-title add up to {total:g}, not to above 0 and at most 1"
            )


@TRANSFORMS.register("casing", CasingConfig())
class Casing(Transform):
    """Writes shares of the pairs in lower case, in capitals, or with capitals at the beginnings of words.

    So that headlines and sloppy text are translated as well as what the corpus is written in.
    """

    level = "text"

    def __init__(self, config: CasingConfig, tokenizer: Tokenizer) -> None:
        self.bounds = np.cumsum([config.casing_lower, config.casing_upper, config.casing_title])
        self.both = config.casing_sides == "both"

    def transform(self, source: str, target: str, generator: np.random.Generator) -> tuple[str, str]:
        change = (str.lower, str.upper, title, str)[int(np.searchsorted(self.bounds, generator.random(), "right"))]
        return change(source), change(target) if self.both else target


def title(text: str) -> str:
    """Returns the text with the first letter of each word a capital, and the others as they are."""
    return " ".join(word[:1].upper() + word[1:] for word in text.split(" "))


@dataclass(frozen=True, kw_only=True)
class TagConfig(Config):
    tag_symbol: str = option("", "The tag: a symbol that preprocess was given with --tag.")
    tag_share: float = option(1.0, "Share of pairs that get it.", above=0, max=1)


@TRANSFORMS.register("tag", TagConfig())
class Tag(Transform):
    """Puts a tag before a share of the source sentences (Johnson et al. 2017, section 3)."""

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
        "Share of merges left out; for a unigram vocabulary, the smoothing of what is drawn from.",
        above=0,
        below=1,
    )


@TRANSFORMS.register("bpe_dropout", BPEDropoutConfig())
class BPEDropout(Transform):
    """Segments both sides anew at random: BPE-dropout (Provilkov et al. 2020), or unigram sampling (Kudo 2018)."""

    def __init__(self, config: BPEDropoutConfig, tokenizer: Tokenizer) -> None:
        self.source = SubwordSampler(tokenizer.source_model, config.bpe_dropout, "source")
        self.target = self.source
        if not tokenizer.joint:
            self.target = SubwordSampler(tokenizer.target_model, config.bpe_dropout, "target")

    def transform(self, source: Ids, target: Ids, generator: np.random.Generator) -> tuple[Ids, Ids]:
        return np.array(self.source(source, generator), np.int64), np.array(self.target(target, generator), np.int64)


# --- all of a job -----------------------------------------------------------------------------------------------------


class TransformPipeline:
    """The transforms of a job, by name and in order. It has no state, so several threads may call it at once.

    A transform's random numbers for a pair follow from (seed, epoch, pair, the transform's name) alone. Raises
    ValueError for transforms of text with a tokenizer that does not decode to the text it encoded.
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
        """Returns the sentences of these pairs, which end in eos, as they are to be trained on in this epoch."""
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
                bits.state = state  # the generator of this pair, at its beginning
                after.append(transform.transform(one, other, generator))
            sides = self._checked(name, transform.level, after, before, sides)
        heads = list(map(_after, languages[0], tags)), languages[1]
        return self._joined(heads[0], sides[0]), self._joined(heads[1], sides[1])

    def _decoded(self, name: str, sides: list[list[Ids]]) -> list[list[str]]:
        if any((ids == UNK).any() for side in sides for ids in side):
            raise ValueError(
                f"--transforms {name} works on text, of which <unk> has none; name it before what makes <unk>, as "
                "word_blank does"
            )
        decoders = self.tokenizer.decode_source, self.tokenizer.decode_target
        return [[decode(ids.tolist()) for ids in side] for decode, side in zip(decoders, sides, strict=True)]

    def _checked(
        self, name: str, level: str, after: list[Any], before: list[list[Any]], ids: list[list[Ids]]
    ) -> list[list[Ids]]:
        """Returns both sides after a transform, as ids. Raises ValueError if a result breaks the contract."""
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
    """Splits each sentence into the ids of `prefixes` at its beginning and the rest. Returns both lists."""
    if not prefixes:
        return [ids[:0] for ids in sentences], sentences
    counts = [next((i for i, id in enumerate(ids.tolist()) if id not in prefixes), len(ids)) for ids in sentences]
    pairs = list(zip(sentences, counts, strict=True))
    return [ids[:count] for ids, count in pairs], [ids[count:] for ids, count in pairs]


def _after(first: Ids, second: Ids) -> Ids:
    """Returns both arrays as one; mostly one of them is empty."""
    return np.concatenate((first, second)) if len(first) else second


def _is_new_text(name: str, text: Any, before: str) -> bool:
    if not isinstance(text, str) or "\n" in text:
        kind = "a text of several lines" if isinstance(text, str) else f"a {type(text).__name__}"
        raise ValueError(f"--transforms {name} works on text and returned {kind}; it must return two lines of text")
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
