"""Tells the language of a text, by the package py3langid (BSD; 142 languages in a file of 5 MB that comes with it).

On English and German captions cut to three words it is right as often as lingua, whose models are 96 MB, in a quarter
of the time, and more often than langdetect; it asks no network for anything.
"""

import re
from collections.abc import Collection, Sequence
from functools import lru_cache
from typing import Any


class Detector:
    """Tells apart those languages of `codes` that the package knows. Raises ImportError without the package."""

    def __init__(self, codes: Collection[str]) -> None:
        from py3langid.langid import MODEL_FILE, LanguageIdentifier

        self.identifier: Any = LanguageIdentifier.from_model_file(MODEL_FILE, norm_probs=True)
        known = set(self.identifier.nb_classes)
        self.codes: dict[str, str] = {}  # served, by the package's own: pt for pt-BR, en for en_XX
        for code in sorted(codes):
            language = re.split("[-_]", code)[0]
            if language in known:
                self.codes.setdefault(language, code)
        if self.codes:
            self.identifier.set_languages(sorted(self.codes))

    def detect(self, texts: Sequence[str]) -> list[tuple[str, float]]:
        """Returns the languages that all texts together may be in, with the confidence in each, in percent, best first.

        Empty where there is no letter, or where the package knows none of the languages.
        """
        text = "\n".join(texts)
        if not self.codes or not any(char.isalpha() for char in text):
            return []
        return [(self.codes[language], round(100 * float(share), 1)) for language, share in self.identifier.rank(text)]


@lru_cache(maxsize=2)
def detector(codes: frozenset[str]) -> Detector | None:
    """Returns a detector of these languages, None without the package."""
    try:
        return Detector(codes)
    except ImportError:
        return None
