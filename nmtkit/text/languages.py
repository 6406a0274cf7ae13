"""Compares language codes (BCP 47): `en` includes `en-GB`, `EN` and `eng_Latn`."""

import re
from collections.abc import Iterable, Sequence

USUAL = ("en", "de", "fr", "es", "zh")  # languages that examples of commands prefer, if a model has them

# Each word is a three-letter code (ISO 639-3), followed by the two-letter code (ISO 639-1) that BCP 47 prefers.
_SHORT = """
aaraa abkab afraf akaak amham araar argan asmas avaav aveae aymay azeaz bakba bambm belbe benbn bisbi bodbo bosbs brebr
bulbg catca cescs chach chece chucu chvcv corkw cosco crecr cymcy danda deude divdv dzodz ellel engen epoeo estet euseu
eweee faofo fasfa fijfj finfi frafr fryfy fulff glagd glega glggl glvgv grngn gujgu hatht hauha hebhe herhz hinhi hmoho
hrvhr hunhu hyehy iboig idoio iiiii ikuiu ileie inaia indid ipkik islis itait javjv jpnja kalkl kankn kasks katka kaukr
kazkk khmkm kikki kinrw kirky komkv konkg korko kuakj kurku laolo latla lavlv limli linln litlt ltzlb lublu luglg mahmh
malml marmr mkdmk mlgmg mltmt monmn mrimi msams myamy nauna navnv nblnr ndend ndong nepne nldnl nnonn nobnb norno nyany
ocioc ojioj orior ormom ossos panpa plipi polpl porpt pusps quequ rohrm ronro runrn rusru sagsg sansa sinsi slksk slvsl
smese smosm snasn sndsd somso sotst spaes sqisq srdsc srpsr sswss sunsu swasw swesv tahty tamta tattt telte tgktg tgltl
thath tirti tonto tsntn tsots tuktk turtr twitw uigug ukruk urdur uzbuz venve vievi volvo wlnwa wolwo xhoxh yidyi yoryo
zhaza zhozh zulzu
""".split()  # noqa: SIM905
SHORT_CODES = {codes[:3]: codes[3:] for codes in _SHORT}

# languages that are written from right to left, and scripts (ISO 15924)
_RIGHT_TO_LEFT = frozenset("ar arb arc arz ckb dv fa he iw ks pbt pes prs ps sd syr ug ur yi".split())  # noqa: SIM905
_RIGHT_TO_LEFT_SCRIPTS = frozenset("adlm arab hebr nkoo rohg syrc thaa".split())  # noqa: SIM905

# Individual languages of macrolanguages (ISO 639-3): `individual-macrolanguage`. Codes are short, as in `subtags`.
_PAIRS = """
acm-ar acq-ar aeb-ar ajp-ar als-sq apc-ar arb-ar ars-ar ary-ar arz-ar azb-az azj-az ckb-ku cmn-zh ekk-et fuv-ff gaz-om
hak-zh khk-mn kmr-ku lvs-lv nan-zh nb-no nn-no npi-ne ory-or pbt-ps pes-fa plt-mg prs-fa quy-qu swh-sw uzn-uz wuu-zh
ydd-yi yue-zh zsm-ms
""".split()  # noqa: SIM905
_MACROLANGUAGES = dict(pair.split("-") for pair in _PAIRS)
_CODE = re.compile(r"[A-Za-z]{2,3}(?:[-_][A-Za-z0-9]{1,8})*")


def subtags(code: str) -> list[str]:
    """Splits a language code at hyphens and underscores, in lower case: "deu_AT" becomes ["de", "at"].

    A language code of three letters becomes the code of two letters if ISO 639 has one.
    """
    first, *rest = code.lower().replace("_", "-").split("-")
    return [SHORT_CODES.get(first, first), *rest]


def is_right_to_left(code: str) -> bool:
    """Returns whether the language of a code is written from right to left.

    If the code names a script, as in snd_Arab, the script decides.
    """
    language, *rest = subtags(code)
    script = next((part for part in rest if len(part) == 4), None)
    return language in _RIGHT_TO_LEFT if script is None else script in _RIGHT_TO_LEFT_SCRIPTS


def is_code(text: str) -> bool:
    """Returns whether a text has the form of a language code."""
    return _CODE.fullmatch(text) is not None


def includes(wanted: str, code: str) -> bool:
    """Returns whether `code` is the language `wanted` or a more specific code (RFC 4647, section 3.3.2).

    The parts of `wanted` must occur in `code` in the same order: `zh-TW` includes `zh-Hant-TW`.
    """
    first, *rest = subtags(wanted)
    language, *parts = subtags(code)
    if language != first:
        return False
    remaining = iter(parts)
    return all(part in remaining for part in rest)


def same_language(first: str, second: str) -> bool:
    """Returns whether two codes have the same language, or a language and its macrolanguage, such as nb and no.

    Scripts and regions are not compared.
    """
    one, other = subtags(first)[0], subtags(second)[0]
    return other in (one, _MACROLANGUAGES.get(one)) or one == _MACROLANGUAGES.get(other)


def best_match(wanted: str, codes: Sequence[str]) -> int | None:
    """Returns the index of the code that matches `wanted` best, or None if no code matches.

    An equal code is the best match, then the first code that `wanted` includes, then `wanted` without its last parts
    (RFC 4647, section 3.4). For example, if there is no text in `en-US`, the text in `en` is used.
    """
    wanted_parts = subtags(wanted)
    parts = [subtags(code) for code in codes]
    if wanted_parts in parts:
        return parts.index(wanted_parts)
    for index, code in enumerate(codes):
        if includes(wanted, code):
            return index
    for length in range(len(wanted_parts) - 1, 0, -1):
        if wanted_parts[:length] in parts:
            return parts.index(wanted_parts[:length])
    return None


# --- names ------------------------------------------------------------------------------------------------------------

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
    """Returns the name of a language: English for en, English (eng_Latn) for eng_Latn.

    Returns an unknown code unchanged.
    """
    if code in NAMES:
        return NAMES[code]
    name = NAMES.get(subtags(code)[0])
    return code if name is None else f"{name} ({code})"


def example_codes(codes: Iterable[str], source: str | None = None, target: str | None = None) -> tuple[str, str]:
    """Returns a source and a target language for an example of a command: the given codes, or two of `codes`.

    Codes of the languages in USUAL are preferred. If there are not enough codes, a missing language is "".
    """

    def order(code: str) -> tuple[int, str]:
        language = subtags(code)[0]
        return USUAL.index(language) if language in USUAL else len(USUAL), code

    known = sorted(codes, key=order)
    source = source or next((code for code in known if code != target), "")
    return source, target or next((code for code in known if code != source), "")
