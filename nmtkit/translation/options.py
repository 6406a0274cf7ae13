"""Settings of a translation except those of the search: text, devices, batches; and rules for combining flags."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from nmtkit.config import Config, FlagRule, changed_flags, option
from nmtkit.search.options import CONSTRAINTS_RULE, CTRANSLATE2_RULE, SEARCH_RULES
from nmtkit.text.sentences import is_language

# The search requires the terms of a glossary as phrases.
GLOSSARY_RULE = FlagRule(
    "--glossary",
    excludes=("--sampling", "--diverse-groups", "--no-repeat-ngram", "--score-reference"),
    reason="its terms are phrases that a beam search requires",
)


# `nmtkit generate` needs rules for more flags than the options of a search.
GENERATE_RULES = (
    *SEARCH_RULES,
    FlagRule("--gen-subset", needs=("DATA",)),
    FlagRule("DATA", excludes=("--input",), reason="give either a dataset or text"),
    FlagRule("DATA", excludes=("--source-tag",), reason="a dataset has its tags already"),
    FlagRule("--reference", needs=("--score-reference",)),
    FlagRule("--ordered-constraints", needs=("--constraints",)),
    CONSTRAINTS_RULE,
    FlagRule(
        "--score-reference",
        excludes=("--prefix", "--constraints", "--avoid", "--long-lines", "--max-source-len"),
        reason="references are scored whole, as they are",
    ),
    FlagRule("--alignment", needs=("--format jsonl",)),
    *(
        FlagRule(flag, excludes=("DATA", "--score-reference", "--alignment"), reason="it rewrites the text of lines")
        for flag in ("--split-sentences", "--markup", "--truecase-caps", "--protect-spans", "--protect")
    ),
    GLOSSARY_RULE,
    FlagRule("--glossary", excludes=("DATA",), reason="its terms are looked for in text; give the raw text"),
    FlagRule(
        "--glossary",
        excludes=("--avoid", "--ordered-constraints"),
        reason="terms are required wherever the translation has them",
    ),
    FlagRule("--glossary-report", needs=("--glossary",)),
    FlagRule("--quality", needs=("--format jsonl", "--quality-report")),
    FlagRule(
        "--split-sentences",
        excludes=("--prefix", "--constraints", "--avoid"),
        reason="these are of whole lines, and sentences are translated",
    ),
    FlagRule("--format jsonl", excludes=("a document",), reason="it comes out as it went in, with one translation"),
    FlagRule(
        "a document",
        excludes=(
            *("DATA", "several --input", "--prefix", "--constraints", "--avoid", "--reference", "--score-reference"),
            *("--markup", "--alignment"),
        ),
        reason="it is one file, whose markup is kept; --input-format text takes the lines of files",
    ),
    FlagRule("--overwrite-translations", needs=("a catalogue (PO or XLIFF)",)),
    FlagRule("--workers", excludes=("--threads",), reason="every worker has one thread"),
    CTRANSLATE2_RULE,
)


@dataclass(frozen=True, kw_only=True)
class TextOptions(Config):
    """Settings for changes of the text before and after the search."""

    split_sentences: str | None = option(
        None,
        "cut lines into sentences by the rules of this language (en, de, zh, …), and put them together again with the "
        "white space between them",
        metavar="LANGUAGE",
    )
    markup: Literal["html"] | None = option(
        None,
        "html: take tags out of a line, and put them around the words that translate those they stood around; entities "
        "are decoded and encoded",
    )
    truecase_caps: bool = option(
        False, "translate a line in capitals as a sentence, and put its translation in capitals again"
    )
    protect_spans: bool = option(
        False,
        "copy URLs, addresses, {placeholders}, %s, numbers with units, and words and emoji unknown to the vocabulary, "
        "each exactly as often as in the source; numbers may take the form of the target language",
    )
    protect: tuple[str, ...] = option(
        (), "copy also what this regular expression matches; repeatable", metavar="REGEX", repeatable=True
    )

    glossary: Path | None = option(
        None,
        "translate these terms so: a line has a source term, a tab, and a target term or several separated by |",
        metavar="FILE",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.split_sentences is not None and not is_language(self.split_sentences):
            raise ValueError(f"--split-sentences {self.split_sentences!r} is no code of a language, as en or zh-Hant")

    @property
    def rewriting(self) -> list[str]:
        """Names of the options that are on and change the text before or after the search."""
        return sorted(flag[2:].replace("-", "_") for flag in changed_flags(self) - {"--glossary"})

    @property
    def active(self) -> bool:
        return bool(self.rewriting) or self.glossary is not None


@dataclass(frozen=True, kw_only=True)
class DeviceOptions(Config):
    """Device, number type and engine of a model."""

    precision: Literal["auto", "fp32", "bf16", "int8"] = option(
        "auto", "type of matrix products; auto is fp32 on a CPU, bf16 on a GPU"
    )
    engine: Literal["torch", "ctranslate2"] = option(
        "torch",
        "ctranslate2: the package of this name does the search, on the CPU, with a model written beside the "
        "checkpoint once: faster for a few lines at a time",
    )
    device: str = option("auto", "cpu, cuda, cuda:1, …; auto is cuda where there is one", metavar="NAME")
    threads: int | None = option(None, "CPU threads of the one process", min=1, max=1024)

    @property
    def named_device(self) -> str:
        """`device`, or the CPU if the engine runs only on the CPU."""
        return "cpu" if self.engine == "ctranslate2" and self.device == "auto" else self.device


@dataclass(frozen=True, kw_only=True)
class TranslatorOptions(Config):
    """How lines become batches. Only the treatment of long lines changes translations."""

    max_source_len: int = option(
        1024, "pieces of the longest line taken whole, if the model can read it; see --long-lines", min=1, max=1_000_000
    )
    long_lines: Literal["split", "cut"] = option("split", "what becomes of a line too long")
    max_tokens: int | None = option(
        None,
        "source tokens searched together; changes speed, not results; none is 2048 on a CPU, 16384 on a GPU",
        min=1,
        max=100_000_000,
    )
