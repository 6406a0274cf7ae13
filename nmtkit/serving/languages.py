"""Lists of language pairs for messages, codes of languages, and detection of languages.

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


# --- codes of DeepL ---------------------------------------------------------------------------------------------------

_CHINESE_SCRIPTS = {"cn": "hans", "sg": "hans", "tw": "hant", "hk": "hant", "mo": "hant"}
# languages that need a region as a target language in DeepL's interface -> DeepL's codes
_REGIONS = {"EN": ("EN-GB", "EN-US"), "PT": ("PT-BR", "PT-PT")}


@lru_cache(maxsize=4096)
def code_parts(code: str) -> tuple[str, str, str]:
    """Returns language, script and region of a code, in lower case. Missing parts are empty strings.

    The region gives Chinese its script, such as `hant` for `zh-TW`. The language `no` becomes `nb`.
    """
    language, *rest = subtags(code)
    script = next((part for part in rest if len(part) == 4), "")
    region = next((part for part in rest if len(part) in (2, 3)), "")
    if language == "zh" and not script:
        script = _CHINESE_SCRIPTS.get(region, "")
    return ("nb" if language == "no" else language), script, region


def served_code_for_deepl(code: str, served: Iterable[str]) -> str | None:
    """Returns the served code that a code of DeepL selects, or None.

    The language must be the same. Scripts and regions may be missing on one side: EN-US selects en, and EN selects
    en_US or eng_Latn. The same region is better than no region. If both Chinese scripts match, simplified is chosen.
    """
    codes = list(dict.fromkeys(served))
    if (same := served_code(code, codes)) in codes:
        return same
    language, script, region = code_parts(code)
    candidates = [
        (region != other_region, other_region != "", other_script != "hans", index)
        for index, (other, other_script, other_region) in enumerate(map(code_parts, codes))
        if other == language
        and ("" in (script, other_script) or script == other_script)
        and ("" in (region, other_region) or region == other_region)
    ]
    return codes[min(candidates)[-1]] if candidates else None


def deepl_code(code: str, served: Iterable[str]) -> str:
    """Returns DeepL's code for a served code: the language alone, unless several served codes have this language."""
    language, script, region = code_parts(code)
    others = {other for other in served if code_parts(other)[0] == language}
    parts = [language, script, region] if len(others) > 1 else [language]
    return "-".join(filter(None, parts)).upper()


def deepl_target_codes(code: str, served: Iterable[str]) -> Sequence[str]:
    """Returns DeepL's codes that select a served target language. English and Portuguese always have a region."""
    language, _, region = code_parts(code)
    if region and language.upper() in _REGIONS:
        return [f"{language}-{region}".upper()]
    shown = deepl_code(code, served)
    return _REGIONS.get(shown, [shown])


# --- detection --------------------------------------------------------------------------------------------------------


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
