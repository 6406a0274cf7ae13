"""Settings of generation, flags of `nmtkit generate` and keywords in Python, and the table of what goes together."""

from dataclasses import dataclass
from typing import Literal

from nmtkit.config import Config, FlagRule, changed_flags, check_flags, option

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
            *(
                "--logits-processors",
                "--beam",
                "--nbest",
                "--max-len-a",
                "--max-len-b",
                "--min-len",
                "--no-repeat-ngram",
                "--diverse-groups",
            ),
            *("--sampling", "--ordered-constraints", "--mbr", "--replace-unknown", "--unkpen"),
        ),
        reason="nothing is searched",
    ),
)

# CTranslate2 masks forbidden tokens before the softmax, and has no prefixes, constraints or samples of ours.
CTRANSLATE2_RULE = FlagRule(
    "--engine ctranslate2",
    excludes=(
        *(
            "--logits-processors",
            "--sampling",
            "--nbest",
            "--mbr",
            "--diverse-groups",
            "--no-repeat-ngram",
            "--unkpen",
            "--min-len",
        ),
        *("--score-reference", "--prefix", "--constraints", "--ordered-constraints", "--avoid"),
        *("--source-lang", "--target-lang", "--glossary"),
    ),
    reason="CTranslate2 does not have it, or means something else by it",
)


CONSTRAINTS_RULE = FlagRule("--constraints", excludes=("--sampling", "--diverse-groups", "--no-repeat-ngram"))


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
    logits_processors: tuple[str, ...] = option(
        (), "registered processors that change the log probabilities at each step, in this order", metavar="NAME,…"
    )
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
