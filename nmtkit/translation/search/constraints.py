"""Constraints on the translation of a sentence: a prefix (as ids), required texts and avoided texts."""

import re
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache

import numpy as np
import numpy.typing as npt

from nmtkit.config import changed_flags, check_flags
from nmtkit.data.tokenizers.spm_model import FOREIGN
from nmtkit.data.tokenizers.tokenizer import BOS, EOS, SPACE_SYMBOL, SPECIALS, UNK, Tokenizer, normalize
from nmtkit.text.alignment import UNSPACED
from nmtkit.translation.search.options import CONSTRAINTS_RULE, SearchOptions

Phrase = tuple[int, ...]
IMPOSSIBLE = 1 << 30  # cost (number of pieces) of a text that the pieces cannot spell


@lru_cache(maxsize=8)
def piece_texts(tokenizer: Tokenizer) -> list[str]:
    """Returns the text that each target piece adds to an output, with a space for each space symbol.

    The text of a byte piece is a surrogate, as with the error handler surrogateescape. <unk> and control pieces have
    their decoded text. eos is a space, because the end of a line ends a word like a space.
    """
    texts = [_text(piece) for piece in tokenizer.target_pieces(range(tokenizer.target_size))]
    texts[UNK], texts[BOS], texts[EOS] = " \u2047 ", "", " "
    for language in tokenizer.languages.values():
        if language < len(texts):
            texts[language] = ""
    return texts


def _text(piece: str) -> str:
    byte = re.fullmatch("<0x([0-9A-F]{2})>", piece)
    if byte:
        return bytes([int(byte[1], 16)]).decode(errors="surrogateescape").replace("\n", " ")
    return piece.removeprefix(FOREIGN).replace(SPACE_SYMBOL, " ")


def line_of(text: str) -> str:
    """Returns a text as an output spells it: normalised, with single spaces and no line feeds."""
    return re.sub("[ \n]+", " ", normalize(text))


def text_bytes(text: str) -> bytes:
    return text.encode(errors="surrogateescape")


class PieceTexts:
    """The texts of the pieces of a vocabulary as bytes. Finds pieces that contain, begin with, or equal a text."""

    def __init__(self, texts: Iterable[bytes]) -> None:
        self.texts = list(texts)
        self.order = sorted(range(len(self.texts)), key=self.texts.__getitem__)
        self.sorted = [self.texts[piece] for piece in self.order]
        self.begins = lru_cache(maxsize=4096)(self._begins)
        self.contains = lru_cache(maxsize=1024)(self._contains)

    def _begins(self, text: bytes) -> list[int]:
        """Returns the pieces that begin with `text`."""
        first = last = bisect_left(self.sorted, text)
        while last < len(self.sorted) and self.sorted[last].startswith(text):
            last += 1
        return self.order[first:last]

    def _contains(self, text: bytes) -> list[int]:
        """Returns the pieces that contain `text`."""
        return [piece for piece, own in enumerate(self.texts) if text in own]

    @cached_property
    def equal(self) -> dict[bytes, list[int]]:
        """Maps the text of pieces, as bytes, to the ids of all pieces with this text. Special pieces are left out."""
        pieces: dict[bytes, list[int]] = {}
        for piece, text in enumerate(self.texts):
            if text and piece not in SPECIALS:
                pieces.setdefault(text, []).append(piece)
        return pieces

    @cached_property
    def longest(self) -> int:
        return max(map(len, self.equal), default=0)

    def columns(self, pieces: npt.NDArray[np.int64], number: int) -> "PieceTexts":
        """Returns the texts for a search over `number` tokens, in which token i stands for `pieces[i]`.

        Tokens without a piece have no text. Only hypotheses that are already impossible contain such tokens.
        """
        texts = [self.texts[piece] for piece in pieces.tolist()]
        return PieceTexts([*texts, *[b""] * (number - len(texts))])


@lru_cache(maxsize=8)
def target_texts(tokenizer: Tokenizer, capitals: bool = False) -> PieceTexts:
    """Returns the texts of the target pieces. With `capitals`, texts are in capitals, like the final outputs."""
    texts = piece_texts(tokenizer)
    return PieceTexts(text_bytes(text.upper() if capitals else text) for text in texts)


@dataclass(frozen=True)
class AvoidedText:
    """A text that no translation may contain. `pieces` are the texts of the target pieces.

    A line counts as if it began and ended with a space, so " in " avoids a whole word. A line feed before the first
    space marks the start of the line.
    """

    text: bytes
    pieces: PieceTexts

    @staticmethod
    def of(text: str, tokenizer: Tokenizer) -> "AvoidedText":
        """Returns an avoided text in the form that the pieces of the tokenizer spell."""
        return AvoidedText(text_bytes(line_of(text)), target_texts(tokenizer))

    def is_in(self, tokens: Sequence[int]) -> bool:
        """Returns whether the text of `tokens`, as the beginning of a line, contains the avoided text."""
        text = b"\n " + b"".join(self.pieces.texts[token] for token in tokens)
        return self.text in re.sub(b" +", b" ", text)

    def is_in_line(self, line: str) -> bool:
        """Returns whether a complete line contains the avoided text."""
        return self.text in re.sub(b" +", b" ", text_bytes(f"\n {line_of(line)} "))

    def forbidden(self, tokens: Sequence[int]) -> list[int]:
        """Returns the tokens after which the text of an output contains the avoided text. `tokens`: the output so far.

        A token is forbidden if it contains the text, or if the output ends with the beginning of the text and the token
        begins with the rest.
        """
        end, start = b"", len(tokens)
        while start and len(end) <= len(self.text):
            start -= 1
            end = (self.pieces.texts[tokens[start]] + end).replace(b"  ", b" ")
        if not start:
            end = b"\n " + end.removeprefix(b" ")
        result = list(self.pieces.contains(self.text))
        for size in range(1, len(self.text)):
            if end.endswith(self.text[:size]):
                result += self.pieces.begins(self.text[size:])
                if end.endswith(b" "):  # two spaces count as one
                    result += self.pieces.begins(b" " + self.text[size:])
        return result

    def at_the_start(self) -> "list[AvoidedText]":
        """Returns texts with which a part of a line must not begin: ends of the avoided text.

        The previous part of the line might end with the start of the avoided text. Parts are joined by a space, or
        directly in scripts without spaces.
        """
        text, results = self.text.decode(), []
        for index in range(1, len(text)):
            before, after = text[:index], text[index:]
            if before.strip() and after.strip():
                if after.startswith(" "):
                    results.append(replace(self, text=text_bytes(f"\n{after}")))
                elif UNSPACED.match(before[-1]) or UNSPACED.match(after):
                    results.append(replace(self, text=text_bytes(f"\n {after}")))
        return results


@dataclass(frozen=True)
class SpelledPhrase:
    """A text with tokens that spell it, perhaps after a space. The search may also spell the text with other tokens."""

    text: str
    tokens: Phrase


@dataclass(frozen=True)
class RequiredText:
    """A text that a translation must contain, in one of several `alternatives`. `pieces` are the texts of all pieces.

    A line counts as if it began and ended with a space, so " in " requires a whole word. With
    `whole_words`, an occurrence within a longer word does not count: "Hunde" does not contain "Hund".
    """

    alternatives: tuple[SpelledPhrase, ...]
    pieces: PieceTexts
    whole_words: bool = False

    @staticmethod
    def of(texts: Iterable[str], tokenizer: Tokenizer, whole_words: bool = False) -> "RequiredText":
        """Returns a required text whose alternatives are all `texts` that the pieces of the tokenizer can spell.

        The rules of a vocabulary can change a text. For example, three dots can replace the character "…". The changed
        text is an alternative, too.
        """
        pieces = target_texts(tokenizer)
        spellings: list[SpelledPhrase] = []
        for text in texts:
            line, tokens = line_of(text), tuple(tokenizer.encode_target([text]).ids[:-1].tolist())
            spelt = b"".join(map(pieces.texts.__getitem__, tokens)).decode(errors="replace").strip(" ")
            changed = " " * text[:1].isspace() + spelt + " " * text[-1:].isspace()
            if UNK not in tokens and spelt:
                spellings.append(SpelledPhrase(changed, tokens))
            if UNK in tokens or not spelt or changed != line:
                usual = usual_spelling(line, pieces, whole_words)
                spellings += [SpelledPhrase(line, usual)] if usual or not line.strip() else []
        return RequiredText(tuple(dict.fromkeys(spellings)), pieces, whole_words)

    @property
    def tokens(self) -> set[int]:
        """The tokens that the search needs for the text, at the beginning of a word and inside a word."""
        inside = [shortest_spelling(text_bytes(spelling.text), self.pieces) for spelling in self.alternatives]
        return {token for tokens in (*inside, *(each.tokens for each in self.alternatives)) for token in tokens}


def usual_spelling(text: str, pieces: PieceTexts, whole_words: bool) -> Phrase:
    """Returns the shortest sequence of pieces that spells a text, after a space where this is possible.

    If no sequence spells the text, returns a piece that contains the text, unless the text must be a whole word. ()
    means that the vocabulary cannot spell the text.
    """
    data = text_bytes(text)
    after_space = shortest_spelling(data if data.startswith(b" ") else b" " + data, pieces)
    return after_space or shortest_spelling(data, pieces) or (() if whole_words else tuple(pieces.contains(data)[:1]))


def shortest_spelling(data: bytes, pieces: PieceTexts) -> Phrase:
    """Returns the shortest sequence of pieces that spells `data`, or () if there is none."""
    costs, start = spelling_costs(data, pieces), 0
    tokens: list[int] = []
    while 0 < costs[start] < IMPOSSIBLE:
        ends = range(start + 1, min(len(data), start + pieces.longest) + 1)
        end = next(end for end in ends if costs[end] == costs[start] - 1 and data[start:end] in pieces.equal)
        tokens.append(pieces.equal[data[start:end]][0])
        start = end
    return tuple(tokens)


def spelling_costs(data: bytes, pieces: PieceTexts) -> list[int]:
    """Returns the smallest number of pieces that spell data[i:], for each i from 0 to the length of `data`.

    A space at the end costs nothing, because it belongs to the next word or to the end of the line.
    """
    size = len(data)
    costs = [IMPOSSIBLE] * size + [0]
    for start in range(size - 1, -1, -1):
        if start == size - 1 and data.endswith(b" "):
            costs[start] = 0
            continue
        for end in range(start + 1, min(size, start + pieces.longest) + 1):
            if costs[end] + 1 < costs[start] and data[start:end] in pieces.equal:
                costs[start] = costs[end] + 1
    return costs


@dataclass(frozen=True)
class Constraints:
    """The constraints on the translation of one sentence. Phrases are ids of target pieces, without eos."""

    prefix: Phrase = ()  # the translation begins with this phrase
    language_tokens: int = 0  # language tokens at the start of the prefix; lengths and scores exclude them
    after_prefix: Phrase = ()  # tokens that can follow the prefix; (): all tokens
    required: tuple[RequiredText, ...] = ()  # the translation contains all these texts
    avoided: tuple[AvoidedText, ...] = ()  # the translation contains none of these texts, in any segmentation
    source_tokens: int = 0  # tokens before the text of the source: language tokens and a tag; lengths exclude them

    @property
    def needed_tokens(self) -> int:
        """A number of tokens that is enough to meet the constraints with any alternatives, without eos."""
        phrases = sum(max(len(each.tokens) for each in text.alternatives) for text in self.required)
        return len(self.prefix) + bool(self.after_prefix) + phrases

    @property
    def forbid_tokens(self) -> bool:
        """Whether some tokens are forbidden in some steps: by a prefix or by avoided texts."""
        return bool(self.prefix or self.after_prefix or self.avoided)

    def check(self, options: SearchOptions) -> None:
        """Raises ValueError if a phrase is empty or unspellable, or conflicts with other constraints or `options`."""
        texts = [spelling.text for required in self.required for spelling in required.alternatives]
        if not all(text.strip() for text in (*texts, *(avoided.text.decode() for avoided in self.avoided))):
            raise ValueError("a required or avoided phrase is empty")
        if UNK in self.prefix or not all(required.alternatives for required in self.required):
            raise ValueError("a prefix or required phrase has characters that the target vocabulary does not know")
        for avoided in self.avoided:
            if avoided.is_in([*self.prefix, *([EOS] if self.after_prefix else [])]):
                raise ValueError(f"--prefix contains the phrase {avoided.text.decode()!r}, which --avoid forbids")
        if self.required:
            if self.avoided:
                raise ValueError("required phrases and avoided phrases cannot be combined")
            check_flags((CONSTRAINTS_RULE,), changed_flags(options), {CONSTRAINTS_RULE.flag})

    def in_capitals(self, tokenizer: Tokenizer) -> "Constraints":
        """Returns the constraints for a search whose translation is converted to capitals.

        The case of the pieces does not matter then. Required texts are converted to capitals. An avoided text with
        small letters cannot appear, so it is dropped.
        """
        pieces = target_texts(tokenizer, capitals=True)
        required = []
        for text in self.required:
            alternatives = tuple(replace(each, text=each.text.upper()) for each in text.alternatives)
            required.append(replace(text, alternatives=alternatives, pieces=pieces))
        avoided = [replace(text, pieces=pieces) for text in self.avoided if (own := text.text.decode()) == own.upper()]
        return replace(self, required=tuple(required), avoided=tuple(avoided))

    def after_a_part(self) -> "Constraints":
        """Returns the constraints for a later part of a line. The first part has the prefix and the required texts."""
        starts = [start for text in self.avoided for start in text.at_the_start()]
        return replace(self, prefix=(), after_prefix=(), required=(), avoided=(*self.avoided, *starts))


NO_CONSTRAINTS = Constraints()
