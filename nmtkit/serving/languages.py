"""Lists of language pairs for messages, and detection of languages.

py3langid (BSD license) detects the language of a text. The package contains a model of 142 languages (5 MB). On English
and German captions cut to three words, py3langid is more accurate than langdetect. It is as accurate as lingua, and
four times as fast. The models of lingua take 96 MB. py3langid needs no network.
"""

from collections.abc import Collection, Iterable, Sequence
from functools import lru_cache
from typing import Any

from nmtkit.text.languages import subtags

MAX_LISTED = 20  # a longer list of pairs is shortened in messages


def described(pairs: Sequence[tuple[str, str]]) -> str:
    """Returns language pairs as text for a message. A list of more than MAX_LISTED pairs is summarized."""
    if len(pairs) <= MAX_LISTED:
        return ", ".join(f"{source} to {target}" for source, target in pairs)
    codes = sorted({code for pair in pairs for code in pair})
    return f"{len(pairs):,} pairs of {', '.join(codes)}"


def served_code(code: str, served: Iterable[str]) -> str:
    """Returns `code` if it is served, else a served code that differs only in case, `-` or `_`, else `code`."""

    def simplified(code: str) -> str:
        return code.lower().replace("_", "-")

    codes = list(served)
    return code if code in codes else next((each for each in codes if simplified(each) == simplified(code)), code)


class Detector:
    """A detector for the languages in `codes` that py3langid knows. Raises ImportError without py3langid."""

    def __init__(self, codes: Collection[str]) -> None:
        from py3langid.langid import MODEL_FILE, LanguageIdentifier

        self.identifier: Any = LanguageIdentifier.from_model_file(MODEL_FILE, norm_probs=True)
        known = set(self.identifier.nb_classes)
        self.codes: dict[str, str] = {}  # py3langid's code -> served code, such as pt -> pt-BR, en -> eng_Latn
        for code in sorted(codes):
            language = subtags(code)[0]
            if language in known:
                self.codes.setdefault(language, code)
        if self.codes:
            self.identifier.set_languages(sorted(self.codes))

    def detect(self, texts: Sequence[str]) -> list[tuple[str, float]]:
        """Detects the language of all texts together. Returns served codes and confidences in percent, best first.

        Returns an empty list if the texts have no letters, or if py3langid knows none of the served languages.
        """
        text = "\n".join(texts)
        if not self.codes or not any(char.isalpha() for char in text):
            return []
        return [(self.codes[language], round(100 * float(share), 1)) for language, share in self.identifier.rank(text)]


@lru_cache(maxsize=2)
def detector_of(codes: frozenset[str]) -> Detector | None:
    """Returns a detector of these languages, or None without py3langid."""
    try:
        return Detector(codes)
    except ImportError:
        return None
