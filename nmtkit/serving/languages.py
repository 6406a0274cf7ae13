"""Names of languages for the route /languages, lists of language pairs for messages, and detection of languages.

py3langid (BSD license) detects the language of a text. The package contains a model of 142 languages (5 MB). On English
and German captions cut to three words, py3langid is more accurate than langdetect. It is as accurate as lingua, and
four times as fast. The models of lingua take 96 MB. py3langid needs no network.
"""

from collections.abc import Collection, Iterable, Sequence
from functools import lru_cache
from typing import Any

from nmtkit.text.languages import subtags

MAX_LISTED = 20  # a longer list of pairs is shortened in messages

NAMES = {
    "af": "Afrikaans", "am": "Amharic", "ar": "Arabic", "az": "Azerbaijani", "be": "Belarusian", "bg": "Bulgarian",
    "bn": "Bengali", "bs": "Bosnian", "ca": "Catalan", "cs": "Czech", "cy": "Welsh", "da": "Danish", "de": "German",
    "el": "Greek", "en": "English", "eo": "Esperanto", "es": "Spanish", "et": "Estonian", "eu": "Basque",
    "fa": "Persian", "fi": "Finnish", "fr": "French", "ga": "Irish", "gl": "Galician", "gu": "Gujarati",
    "ha": "Hausa", "he": "Hebrew", "hi": "Hindi", "hr": "Croatian", "hu": "Hungarian", "hy": "Armenian",
    "id": "Indonesian", "ig": "Igbo", "is": "Icelandic", "it": "Italian", "ja": "Japanese", "ka": "Georgian",
    "kk": "Kazakh", "km": "Khmer", "kn": "Kannada", "ko": "Korean", "ky": "Kyrgyz", "la": "Latin",
    "lb": "Luxembourgish",
    "lo": "Lao", "lt": "Lithuanian", "lv": "Latvian", "mk": "Macedonian", "ml": "Malayalam", "mn": "Mongolian",
    "mr": "Marathi", "ms": "Malay", "mt": "Maltese", "my": "Burmese", "nb": "Norwegian Bokmål", "ne": "Nepali",
    "nl": "Dutch", "nn": "Norwegian Nynorsk", "no": "Norwegian", "oc": "Occitan", "pa": "Punjabi", "pl": "Polish",
    "ps": "Pashto", "pt": "Portuguese", "ro": "Romanian", "ru": "Russian", "si": "Sinhala", "sk": "Slovak",
    "sl": "Slovenian", "so": "Somali", "sq": "Albanian", "sr": "Serbian", "sv": "Swedish", "sw": "Swahili",
    "ta": "Tamil", "te": "Telugu", "th": "Thai", "tl": "Tagalog", "tr": "Turkish", "uk": "Ukrainian", "ur": "Urdu",
    "uz": "Uzbek", "vi": "Vietnamese", "xh": "Xhosa", "yi": "Yiddish", "yo": "Yoruba", "zh": "Chinese", "zu": "Zulu",
}  # fmt: skip


def name_of(code: str) -> str:
    """Returns the name of a language, such as English for en, English (eng_Latn) for eng_Latn, and qaa for qaa."""
    if code in NAMES:
        return NAMES[code]
    name = NAMES.get(subtags(code)[0])
    return code if name is None else f"{name} ({code})"


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
