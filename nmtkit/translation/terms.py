"""Makes required phrases from glossary terms, in every spelling that the target vocabulary allows."""

import re
from collections.abc import Sequence
from functools import lru_cache

from nmtkit.data.tokenizers.spm_model import FOREIGN
from nmtkit.data.tokenizers.tokenizer import SPACE_SYMBOL, SPECIALS, UNK, Tokenizer
from nmtkit.text.alignment import UNSPACED, is_letter
from nmtkit.text.glossary import forms
from nmtkit.translation.search.constraints import Phrase, PieceEdges, RequiredPhrase

# Contexts before a term: the start of a line, an opening bracket, and a space. Tokenizers may spell a term differently
# in each context.
CONTEXTS = ("", "(", "( ")


def piece_edges(tokenizer: Tokenizer) -> PieceEdges:
    """Returns two masks over the target pieces: pieces that begin with a letter, and pieces that end with a letter.

    Byte pieces of non-ASCII characters count as pieces without letters.
    """
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
    """Returns the phrase cache of a tokenizer. Pipelines with the same tokenizer share the cache."""
    return TermPhrases(tokenizer)


class TermPhrases:
    """Makes required phrases from target terms, and caches the phrases."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self.phrases: dict[tuple[str, ...], RequiredPhrase | None] = {}
        # the space of the last context is encoded with the term
        self.contexts = [ids[:-1].tolist() for ids in tokenizer.encode_target(CONTEXTS).split()]

    def phrase(self, targets: Sequence[str]) -> RequiredPhrase | None:
        """Returns the phrase with the alternatives `targets`, or None if the vocabulary can spell none of them."""
        key = tuple(targets)
        if key not in self.phrases:
            texts = [form for target in key for form in forms(target)]
            spelt = dict.fromkeys(ids for text in texts for ids in self.spellings(text))
            self.phrases[key] = RequiredPhrase(tuple(spelt), whole_words=True) if spelt else None
        return self.phrases[key]

    def spellings(self, text: str) -> list[Phrase]:
        """Returns the pieces of a text in each of the CONTEXTS, without results that contain <unk>."""
        encoded = self.tokenizer.encode_target([context + text for context in CONTEXTS]).split()
        results = []
        for ids, context in zip(encoded, self.contexts, strict=True):
            tokens = ids[:-1].tolist()
            if tokens[: len(context)] == context and UNK not in tokens[len(context) :]:
                results.append(tuple(tokens[len(context) :]))
        return results
