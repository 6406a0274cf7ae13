"""Settings of generation, flags of `nmtkit generate` and keywords in Python, and the table of what goes together."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from nmtkit.registry import Config, FlagRule, changed_flags, check_flags, option
from nmtkit.text.sentences import is_language

LONGEST = 10_000  # pieces; no search goes on for longer

SEARCH_RULES = (
    FlagRule("--sampling", excludes=("--beam", "--diverse-groups"), reason="samples are drawn independently"),
    FlagRule("--temperature", needs=("--sampling",)),
    FlagRule("--top-k", needs=("--sampling",)),
    FlagRule("--top-p", needs=("--sampling",)),
    FlagRule("--seed", needs=("--sampling",)),
    FlagRule("--diversity", needs=("--diverse-groups",)),
    FlagRule(
        "--score-reference",
        excludes=(
            *("--beam", "--nbest", "--max-len-a", "--max-len-b", "--min-len", "--no-repeat-ngram", "--diverse-groups"),
            *("--sampling", "--ordered-constraints", "--mbr", "--replace-unknown", "--unkpen"),
        ),
        reason="nothing is searched",
    ),
)

# CTranslate2 masks forbidden tokens before the softmax, and has no prefixes, constraints or samples of ours.
CTRANSLATE2_RULE = FlagRule(
    "--engine ctranslate2",
    excludes=(
        *("--sampling", "--nbest", "--mbr", "--diverse-groups", "--no-repeat-ngram", "--unkpen", "--min-len"),
        *("--score-reference", "--prefix", "--constraints", "--ordered-constraints", "--avoid"),
        *("--source-lang", "--target-lang", "--glossary"),
    ),
    reason="CTranslate2 does not have it, or means something else by it",
)

# The terms of a glossary are phrases that the search requires.
GLOSSARY_RULE = FlagRule(
    "--glossary",
    excludes=("--sampling", "--diverse-groups", "--no-repeat-ngram", "--score-reference"),
    reason="its terms are phrases that a beam search requires",
)

# `nmtkit generate` has more flags than a search has options.
GENERATE_RULES = (
    *SEARCH_RULES,
    FlagRule("--gen-subset", needs=("DATA",)),
    FlagRule("DATA", excludes=("--input",), reason="give either a dataset or text"),
    FlagRule("DATA", excludes=("--source-tag",), reason="a dataset has its tags already"),
    FlagRule("--reference", needs=("--score-reference",)),
    FlagRule("--ordered-constraints", needs=("--constraints",)),
    FlagRule("--constraints", excludes=("--sampling", "--diverse-groups", "--no-repeat-ngram")),
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
class SearchOptions(Config):
    """How to search. Lengths are in target pieces without eos; a source's length is in pieces without eos too.

    Raises ValueError for a value out of range, and for an option that would do nothing beside the others.
    """

    beam: int = option(4, "hypotheses kept open per sentence; 1 is greedy search", min=1, max=1000)
    nbest: int = option(
        1, "translations found per sentence, best first; with --sampling, independent samples", min=1, max=10_000
    )
    lenpen: float = option(
        0.6, "length penalty: score = log probability / ((5 + pieces with eos) / 6) ** lenpen", min=-10, max=10
    )
    max_len_a: float = option(1.0, "no output is longer than max-len-a x source pieces + max-len-b", min=0, max=100)
    max_len_b: int = option(50, "pieces; see --max-len-a", min=0, max=LONGEST)
    min_len: int = option(0, "no output is shorter than this, in pieces", min=0, max=LONGEST)
    no_repeat_ngram: int = option(
        0, "no output has the same run of this many pieces twice; 0: it may", min=0, max=LONGEST
    )
    diverse_groups: int = option(
        1, "groups of the beam, each kept from what earlier ones do (Vijayakumar et al. 2016)", min=1, max=1000
    )
    diversity: float = option(
        0.5, "what a token loses for each earlier group that took it in the same step", min=0, max=1000
    )
    sampling: bool = option(False, "draw from the model's distribution instead of searching for the best")
    temperature: float = option(1.0, "sample from probabilities ** (1 / temperature)", min=0.01, max=100)
    top_k: int = option(0, "sample among this many tokens; 0: all", min=0, max=10_000_000)
    top_p: float = option(1.0, "sample among the fewest tokens that make up this probability", above=0, max=1)
    seed: int = option(
        1, "of sampling: a line's samples depend on it, the line's number, and nothing else", min=0, max=2**63 - 1
    )
    ordered_constraints: bool = option(False, "required phrases come in the order they are given in")
    mbr: Literal["chrf", "bleu"] | None = option(
        None, "sort the n-best or samples by their mean utility against each other (minimum Bayes risk)"
    )
    alignment: Literal["hard", "soft", "words"] | None = option(
        None,
        "cross-attention of each translation: for each target piece a source piece (hard) or all weights (soft), or "
        "for each target word its source word, both as characters",
    )
    source_lang: str | None = option(
        None,
        "language of the lines, for a model of several: a code, as eng_Latn; an unknown one lists those known",
        metavar="CODE",
    )
    target_lang: str | None = option(None, "language to translate into, for a model of several", metavar="CODE")
    score_reference: bool = option(False, "score the given reference translations instead of searching")
    quality: bool = option(
        False, "tell how sure the model is of each translation, and what is odd about it, so that a person can look"
    )
    unkpen: float | None = option(
        None, "let the model produce <unk>, this much below its log probability; none: never", min=0, max=1000
    )
    replace_unknown: bool = option(False, "let the model produce <unk>, and put the source piece it attends to there")

    def __post_init__(self) -> None:
        super().__post_init__()
        changed = changed_flags(self)
        check_flags(SEARCH_RULES, changed, changed)
        if self.nbest > self.beam and not self.sampling:
            raise ValueError(f"--nbest {self.nbest} needs --beam {self.nbest} or more; it is {self.beam}")
        if self.beam % self.diverse_groups:
            raise ValueError(f"--beam {self.beam} is not a multiple of --diverse-groups {self.diverse_groups}")
        if self.mbr is not None and self.nbest < 2:
            raise ValueError(f"--mbr chooses among --nbest 2 or more; it is {self.nbest}")

    @property
    def rows(self) -> int:
        """Hypotheses of a sentence that are open at a time."""
        return self.nbest if self.sampling else self.beam

    def max_length(self, source_length: int) -> int:
        """Returns the most pieces, without eos, of a translation of `source_length` pieces, without eos."""
        return max(self.min_len, int(self.max_len_a * source_length + self.max_len_b))


@dataclass(frozen=True, kw_only=True)
class TextOptions(Config):
    """Settings of the treatment of text before and after the search."""

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
        "each exactly as often as the source has it",
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
    """Where a model runs, and in which type of numbers."""

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
        """`device`, with the CPU for an engine that runs nowhere else."""
        return "cpu" if self.engine == "ctranslate2" and self.device == "auto" else self.device


@dataclass(frozen=True, kw_only=True)
class TranslatorOptions(Config):
    """How lines become batches. None of it but the treatment of long lines changes a translation."""

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
