"""Makes required phrases from glossary terms, in every spelling that the target vocabulary allows."""

from collections.abc import Sequence
from functools import lru_cache

from nmtkit.data.tokenizers.tokenizer import UNK, Tokenizer
from nmtkit.text.glossary import forms
from nmtkit.translation.search.constraints import Phrase, RequiredPhrase

# Contexts before a term: the start of a line, an opening bracket, and a space. Tokenizers may spell a term differently
# in each context.
CONTEXTS = ("", "(", "( ")


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
