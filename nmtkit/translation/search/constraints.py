"""Constraints on the translation of a sentence: a prefix in ids, and texts that it contains or does not contain."""

import re
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from nmtkit.config import changed_flags, check_flags
from nmtkit.data.tokenizers.spm_model import FOREIGN
from nmtkit.data.tokenizers.tokenizer import BOS, EOS, SPACE_SYMBOL, UNK, Tokenizer, normalize
from nmtkit.translation.search.options import CONSTRAINTS_RULE, SearchOptions

Phrase = tuple[int, ...]


class PieceEdges(NamedTuple):
    """Two masks of the target pieces: pieces that begin within a word, and pieces that end within a word.

    Two successive pieces belong to the same word if the first piece ends, and the second piece begins, within a word.
    """

    begins: Sequence[bool]
    ends: Sequence[bool]

    def columns(self, pieces: Sequence[int]) -> "PieceEdges":
        """Returns the edges for a search whose token i stands for `pieces[i]`."""
        begins, ends = [self.begins[piece] for piece in pieces], [self.ends[piece] for piece in pieces]
        return PieceEdges(begins, ends)


@lru_cache(maxsize=8)
def piece_texts(tokenizer: Tokenizer) -> list[str]:
    """Returns the text that each target piece adds to an output, with a space for each space symbol.

    A byte of a character is a surrogate, as with the error handler surrogateescape. <unk> and control pieces have the
    text of their decoding, and eos is a space, because the end of a line ends a word like a space.
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


def text_bytes(text: str) -> bytes:
    return text.encode(errors="surrogateescape")


class PieceTexts:
    """The bytes of the pieces of a vocabulary, with the pieces that contain a text or begin with a text."""

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

    def columns(self, pieces: npt.NDArray[np.int64]) -> "PieceTexts":
        """Returns the texts for a search whose token i stands for `pieces[i]`."""
        return PieceTexts(self.texts[piece] for piece in pieces.tolist())


@lru_cache(maxsize=8)
def target_texts(tokenizer: Tokenizer) -> PieceTexts:
    return PieceTexts(map(text_bytes, piece_texts(tokenizer)))


@dataclass(frozen=True)
class AvoidedText:
    """A text that no translation contains, with the texts of the pieces that can spell it.

    A space at the start or the end of a line counts as part of the line, so " in " avoids a whole word.
    """

    text: bytes
    pieces: PieceTexts

    @staticmethod
    def of(text: str, tokenizer: Tokenizer) -> "AvoidedText":
        """Returns an avoided text in the form that the pieces of the tokenizer spell."""
        return AvoidedText(text_bytes(re.sub("[ \n]+", " ", normalize(text))), target_texts(tokenizer))

    def is_in(self, tokens: Sequence[int]) -> bool:
        """Returns whether the text of `tokens`, without its end, contains the avoided text."""
        text = b" " + b"".join(self.pieces.texts[token] for token in tokens)
        return self.text in re.sub(b" +", b" ", text)

    def forbidden(self, tokens: Sequence[int]) -> list[int]:
        """Returns the tokens after which the text of an output contains the avoided text. `tokens` are the output.

        A token is forbidden if it contains the text, or if the output ends with the beginning of the text and the token
        begins with the rest.
        """
        end, start = b"", len(tokens)
        while start and len(end) <= len(self.text):
            start -= 1
            end = (self.pieces.texts[tokens[start]] + end).replace(b"  ", b" ")
        if not start:
            end = b" " + end.removeprefix(b" ")
        result = list(self.pieces.contains(self.text))
        for size in range(1, len(self.text)):
            if end.endswith(self.text[:size]):
                result += self.pieces.begins(self.text[size:])
                if end.endswith(b" "):  # a second space would not separate the words better
                    result += self.pieces.begins(b" " + self.text[size:])
        return result


@dataclass(frozen=True)
class RequiredPhrase:
    """A phrase that a translation must contain in one of several `alternatives`.

    With `whole_words`, an occurrence within a longer word does not count: "▁Hund e" does not contain "▁Hund".
    """

    alternatives: tuple[Phrase, ...]
    whole_words: bool = False


@dataclass(frozen=True)
class Constraints:
    """The constraints on the translation of one sentence. Phrases are ids of target pieces, without eos."""

    prefix: Phrase = ()  # the translation begins with this phrase
    language_tokens: int = 0  # language tokens at the start of the prefix; lengths and scores exclude them
    after_prefix: Phrase = ()  # tokens that can follow the prefix; (): all tokens
    required: tuple[RequiredPhrase, ...] = ()  # the translation contains all these phrases, without overlap
    avoided: tuple[AvoidedText, ...] = ()  # the translation contains none of these texts, in any segmentation
    source_tokens: int = 0  # tokens before the text of the source: language tokens and a tag; lengths exclude them

    @property
    def needed_tokens(self) -> int:
        """The number of tokens that an output needs to meet the constraints, without eos."""
        phrases = sum(max(map(len, phrase.alternatives)) for phrase in self.required)
        return len(self.prefix) + bool(self.after_prefix) + phrases

    def check(self, options: SearchOptions) -> None:
        """Raises ValueError when the constraints contradict each other or `options`. The message names both."""
        required = [alternative for phrase in self.required for alternative in phrase.alternatives]
        if not all((*required, *(avoided.text.strip() for avoided in self.avoided))):
            raise ValueError("a required or avoided phrase is empty")
        if any(UNK in phrase for phrase in (self.prefix, *required)):
            raise ValueError("a prefix or required phrase has characters that the target vocabulary does not know")
        for avoided in self.avoided:
            if avoided.is_in([*self.prefix, *([EOS] if self.after_prefix else [])]):
                raise ValueError(f"--prefix contains the phrase {avoided.text.decode()!r}, which --avoid forbids")
        if self.required:
            if self.avoided:
                raise ValueError("required phrases and avoided phrases cannot be combined")
            rules = [CONSTRAINTS_RULE]
            check_flags(rules, changed_flags(options), {"--constraints"})


NO_CONSTRAINTS = Constraints()
