"""Terms of a glossary as phrases that a search requires: every way in which pieces spell them in a sentence."""

import re
from collections.abc import Sequence
from functools import lru_cache

from nmtkit.data.spm_model import FOREIGN
from nmtkit.data.tokenizer import SPACE_SYMBOL, SPECIALS, UNK, Tokenizer
from nmtkit.search.constraints import Phrase, PieceEdges, RequiredPhrase
from nmtkit.text.alignment import UNSPACED, is_letter
from nmtkit.text.glossary import forms

# What a term may follow: nothing or a space; what has no space after it; and, where a tokenizer spells the two
# otherwise, what has one.
CONTEXTS = ("", "(", "( ")


def piece_edges(tokenizer: Tokenizer) -> PieceEdges:
    """Returns masks of the target pieces that begin and end with a letter. A byte of a long character is no letter."""
    pieces = [_surface(piece) for piece in tokenizer.target_pieces(range(tokenizer.target_size))]
    begins, ends = [_inside(piece[:1]) for piece in pieces], [_inside(piece[-1:]) for piece in pieces]
    for special in SPECIALS:
        begins[special] = ends[special] = False
    return PieceEdges(begins, ends)


def _surface(piece: str) -> str:
    byte = re.fullmatch("<0x([0-7][0-9A-F])>", piece)
    return chr(int(byte[1], 16)) if byte else piece.removeprefix(FOREIGN)


def _inside(char: str) -> bool:
    return char not in ("", SPACE_SYMBOL) and is_letter(char) and not UNSPACED.match(char)


@lru_cache(maxsize=8)
def term_phrases(tokenizer: Tokenizer) -> "TermPhrases":
    """Returns the phrases of a tokenizer, so that lines that come one by one share them."""
    return TermPhrases(tokenizer)


class TermPhrases:
    """Target terms as required phrases, each made once."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self.phrases: dict[tuple[str, ...], RequiredPhrase | None] = {}
        # the last context is spelt without its space, which is the term's own
        self.contexts = [ids[:-1].tolist() for ids in tokenizer.encode_target(CONTEXTS).split()]

    def phrase(self, targets: Sequence[str]) -> RequiredPhrase | None:
        """Returns the phrase of these alternatives, None where the vocabulary can spell none of them."""
        key = tuple(targets)
        if key not in self.phrases:
            texts = [form for target in key for form in forms(target)]
            spelt = dict.fromkeys(ids for text in texts for ids in self.spellings(text))
            self.phrases[key] = RequiredPhrase(tuple(spelt), whole_words=True) if spelt else None
        return self.phrases[key]

    def spellings(self, text: str) -> list[Phrase]:
        """Returns the pieces of a text at the beginning, after a space, and after an opening bracket."""
        encoded = self.tokenizer.encode_target([context + text for context in CONTEXTS]).split()
        found = []
        for ids, context in zip(encoded, self.contexts, strict=True):
            tokens = ids[:-1].tolist()
            if tokens[: len(context)] == context and UNK not in tokens[len(context) :]:
                found.append(tuple(tokens[len(context) :]))
        return found
