"""Settings of text, devices and batches for a translation, and rules for combinations of flags.

Settings of the search are in `search/options.py`.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from nmtkit.config import Config, FlagRule, changed_flags, option
from nmtkit.text.languages import is_code
from nmtkit.translation.search.options import CONSTRAINTS_RULE, CTRANSLATE2_RULE, SEARCH_RULES

# Search options that cannot be combined with a glossary.
GLOSSARY_RULE = FlagRule(
    "--glossary",
    excludes=("--sampling", "--diverse-groups", "--no-repeat-ngram", "--score-reference"),
    reason="the terms become required phrases of a beam search",
)

PIVOT_RULE = FlagRule(
    "--pivot",
    excludes=("--score-reference", "--alignment", "--glossary", "--source-tag"),
    reason="the last step reads the translation into the pivot language, not the source",
)

CPU_ENGINES = ("numba", "ctranslate2")

# Rules for the flags of `nmtkit generate`. They include the rules for search options.
GENERATE_RULES = (
    *SEARCH_RULES,
    FlagRule("--gen-subset", needs=("DATA",)),
    FlagRule("DATA", excludes=("--input",), reason="give either a dataset or text"),
    FlagRule(
        "--test-set",
        excludes=("DATA", "--input", "--input-format"),
        reason="the text is the source of a published test set",
    ),
    FlagRule("--language-pair", needs=("--test-set",)),
    FlagRule("DATA", excludes=("--source-tag",), reason="the sentences of a dataset already have tags"),
    FlagRule("--columns", needs=("--input",), excludes=("--input-format", "a document")),
    FlagRule("--reference", needs=("--score-reference",)),
    FlagRule("--ordered-constraints", needs=("--constraints",)),
    CONSTRAINTS_RULE,
    FlagRule(
        "--score-reference",
        excludes=("--prefix", "--constraints", "--avoid", "--long-lines", "--max-source-len"),
        reason="complete references are scored",
    ),
    FlagRule("--alignment", needs=("--format jsonl", "--alignment hard with typed text")),
    *(
        FlagRule(flag, excludes=("DATA", "--score-reference", "--alignment"), reason=f"{flag} changes lines")
        for flag in ("--split-sentences", "--markup", "--truecase-caps", "--protect-spans", "--protect")
    ),
    GLOSSARY_RULE,
    FlagRule("--glossary", excludes=("DATA",), reason="terms are searched for in raw text; give raw text as input"),
    FlagRule(
        "--glossary",
        excludes=("--avoid", "--ordered-constraints"),
        reason="the terms are required phrases, in any order",
    ),
    FlagRule("--glossary-report", needs=("--glossary",)),
    PIVOT_RULE,
    FlagRule("--pivot-path", needs=("--pivot",)),
    FlagRule("--quality", needs=("--format jsonl", "--quality-report")),
    FlagRule(
        "--split-sentences",
        excludes=("--prefix", "--constraints", "--avoid"),
        reason="constraints apply to whole lines, but each sentence is translated alone",
    ),
    FlagRule(
        "--format jsonl",
        excludes=("a document",),
        reason="a document is written in its own format, with one translation for each segment",
    ),
    FlagRule(
        "a document",
        excludes=(
            *("DATA", "several --input", "--prefix", "--constraints", "--avoid", "--reference", "--score-reference"),
            *("--markup", "--alignment"),
        ),
        reason="a document is one file with its own markup; to translate the lines of a file, add --input-format text",
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
        "split lines into sentences by the rules of this language (en, de, zh, …), and join the translations with "
        "the same white space",
        metavar="LANGUAGE",
    )
    markup: Literal["html"] | None = option(
        None,
        "html: remove the tags of a line, and put each tag around the translations of the words that the tag enclosed; "
        "decode and encode entities",
    )
    truecase_caps: bool = option(
        False, "convert a line in capitals to sentence case, and convert its translation to capitals"
    )
    protect_spans: bool = option(
        False,
        "copy URLs, addresses, {placeholders}, %s, numbers with units, and words and emoji unknown to the vocabulary, "
        "each exactly as often as in the source; numbers may take the form of the target language",
    )
    protect: tuple[str, ...] = option(
        (), "also copy the matches of this regular expression; repeatable", metavar="REGEX", repeatable=True
    )
    glossary: Path | None = option(
        None,
        "file of terms: each line has a source term, a tab, and one or more target terms separated by |",
        metavar="FILE",
        access="read",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.split_sentences is not None and not is_code(self.split_sentences):
            raise ValueError(f"--split-sentences {self.split_sentences!r} is not a language code such as en or zh-Hant")

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
        "auto", "number type of matrix products; auto is fp32 on a CPU and on mps, bf16 on other GPUs"
    )
    engine: str = option(
        "auto",
        "auto: the engine slots on a GPU (torch on mps), numba on a CPU (torch if numba does not support the model or "
        "the options, or is not compiled yet); torch: PyTorch; slots: PyTorch with CUDA graphs on a GPU; numba: a "
        "search that the package numba compiles for this CPU; ctranslate2: the package CTranslate2 on a CPU (writes a "
        "converted model next to the checkpoint); or the name of a plug-in's engine",
        metavar="NAME",
    )
    device: str = option(
        "auto",
        "cpu, cuda, cuda:1, mps (Apple GPU), …; auto is cuda if such a GPU is available, else cpu",
        metavar="NAME",
    )
    threads: int | None = option(None, "number of CPU threads of a single process", min=1, max=1024)

    @property
    def named_device(self) -> str:
        """Name of the device. "auto" becomes "cpu" if the engine runs only on the CPU."""
        return "cpu" if self.engine in CPU_ENGINES and self.device == "auto" else self.device


@dataclass(frozen=True, kw_only=True)
class TranslatorOptions(Config):
    """Settings of long lines and of batches. The settings of batches do not change translations."""

    max_source_len: int = option(
        1024, "maximum pieces of a line that is translated as a whole; see --long-lines", min=1, max=1_000_000
    )
    long_lines: Literal["split", "cut"] = option(
        "split", "split: divide a line that is too long, and join the translations of the parts; cut: cut off its end"
    )
    max_tokens: int | None = option(
        None,
        "maximum source tokens of a batch; changes speed, not results; default: 2048 on a CPU, 16384 on a GPU",
        min=1,
        max=100_000_000,
    )
