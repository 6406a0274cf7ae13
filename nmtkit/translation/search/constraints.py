"""Constraints on the translation of a sentence, as ids."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from nmtkit.config import changed_flags, check_flags
from nmtkit.data.tokenizers.tokenizer import UNK
from nmtkit.translation.search.options import CONSTRAINTS_RULE, SearchOptions

Phrase = tuple[int, ...]


class PieceEdges(NamedTuple):
    """Two masks of the target pieces: pieces that begin within a word, and pieces that end within a word.

    Two successive pieces belong to the same word if the first piece ends, and the second piece begins, within a word.
    """

    begins: Sequence[bool]
    ends: Sequence[bool]


@dataclass(frozen=True)
class RequiredPhrase:
    """A phrase that a translation must contain in one of several `alternatives`.

    With `whole_words`, an occurrence within a longer word does not count: "▁Hund e" does not contain "▁Hund".
    """

    alternatives: tuple[Phrase, ...]
    whole_words: bool = False


@dataclass(frozen=True)
class Constraints:
    """Constraints on a translation, as target ids without eos.

    An avoided phrase is forbidden only as this sequence of pieces; other pieces can spell the same text.
    """

    prefix: Phrase = ()  # the translation begins with this phrase
    language_tokens: int = 0  # language tokens at the start of the prefix; lengths and scores exclude them
    required: tuple[RequiredPhrase, ...] = ()  # the translation contains all these phrases, without overlap
    avoided: tuple[Phrase, ...] = ()  # the translation contains none of these phrases
    source_tokens: int = 0  # tokens before the text of the source: language tokens and a tag; lengths exclude them

    def check(self, options: SearchOptions) -> None:
        """Raises ValueError when the constraints contradict each other or `options`. The message names both."""
        required = [alternative for phrase in self.required for alternative in phrase.alternatives]
        if any(not phrase for phrase in (*required, *self.avoided)):
            raise ValueError("a required or avoided phrase is empty")
        if any(UNK in phrase for phrase in (self.prefix, *required)):
            raise ValueError("a prefix or required phrase has characters that the target vocabulary does not know")
        if self.required:
            if self.avoided:
                raise ValueError("required phrases and avoided phrases cannot be combined")
            rules = [CONSTRAINTS_RULE]
            check_flags(rules, changed_flags(options), {"--constraints"})


NO_CONSTRAINTS = Constraints()
