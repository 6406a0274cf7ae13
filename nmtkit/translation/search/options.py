"""Settings of a search (flags of `nmtkit generate`, keywords in Python) and the rules for combining them."""

from dataclasses import dataclass, field
from typing import Any, Literal

from nmtkit.config import Config, FlagRule, changed_flags, check_flags, option
from nmtkit.scoring.segments import check_segment_metric

LONGEST = 10_000  # largest value of --max-len-b, --min-len and --no-repeat-ngram

SEARCH_RULES = (
    FlagRule("--sampling", excludes=("--beam", "--diverse-groups"), reason="samples are drawn independently"),
    *(FlagRule(flag, needs=("--sampling",)) for flag in ("--temperature", "--top-k", "--top-p", "--seed")),
    FlagRule("--diversity", needs=("--diverse-groups",)),
    FlagRule("--shortlist", excludes=("--logits-processors",), reason="processors need all target pieces"),
    FlagRule(
        "--keep-loops",
        excludes=("--sampling", "--no-repeat-ngram", "--score-reference"),
        reason="no line is decoded again, with or without --keep-loops",
    ),
    FlagRule(
        "--score-reference",
        excludes=(
            "--logits-processors", "--beam", "--nbest", "--max-len-a", "--max-len-b", "--min-len", "--no-repeat-ngram",
            "--diverse-groups", "--sampling", "--ordered-constraints", "--mbr", "--replace-unknown", "--unkpen",
            "--shortlist",
        ),
        reason="there is no search",
    ),
)  # fmt: skip

# CTranslate2 masks forbidden tokens before the softmax, and its samples differ from the samples of nmtkit.
CTRANSLATE2_RULE = FlagRule(
    "--engine ctranslate2",
    excludes=(
        "--logits-processors", "--sampling", "--nbest", "--mbr", "--diverse-groups", "--no-repeat-ngram", "--unkpen",
        "--min-len", "--score-reference", "--source-lang", "--target-lang", "--shortlist",
    ),
    reason="CTranslate2 does not support this option, or gives the option a different meaning",
)  # fmt: skip
CONSTRAINTS_RULE = FlagRule("--constraints", excludes=("--sampling", "--diverse-groups", "--no-repeat-ngram"))


@dataclass(frozen=True, kw_only=True)
class SearchOptions(Config):
    """Settings of a search. Lengths of sources and outputs are in pieces without eos.

    Raises ValueError for a value out of range, and for an option that has no effect with the other options.
    """

    beam: int = option(4, "open hypotheses per sentence; 1 is greedy search", min=1, max=1000)
    source_lang: str | None = option(
        None,
        "source language for a multilingual model: a code such as eng_Latn; a wrong code gives an error with all codes",
        metavar="CODE",
    )
    target_lang: str | None = option(None, "target language for a multilingual model", metavar="CODE")
    nbest: int = option(
        1, "translations per sentence, best first; with --sampling, independent samples", min=1, max=10_000
    )
    lenpen: float = option(
        0.6, "length penalty: score = log probability / ((5 + pieces with eos) / 6) ** lenpen", min=-10, max=10
    )
    max_len_a: float = option(1.0, "maximum length of an output: max-len-a x source pieces + max-len-b", min=0, max=100)
    max_len_b: int = option(50, "constant number of pieces in the maximum length; see --max-len-a", min=0, max=LONGEST)
    min_len: int = option(0, "minimum length of an output in pieces", min=0, max=LONGEST)
    no_repeat_ngram: int = option(
        0, "forbid a second occurrence of the same n successive pieces; 0: off", min=0, max=LONGEST
    )
    keep_loops: bool = option(
        False,
        "keep outputs that repeat a text more than three times in a row, and more often than the source; by default, "
        "such a line is decoded again with --no-repeat-ngram 3",
    )
    diverse_groups: int = option(
        1,
        "number of groups in the beam; each group avoids the tokens of earlier groups (Vijayakumar et al. 2016)",
        min=1,
        max=1000,
    )
    diversity: float = option(
        0.5,
        "penalty for a token: this number times the number of hypotheses in earlier groups with the same token at this "
        "step",
        min=0,
        max=1000,
    )
    sampling: bool = option(
        False, "sample from the distribution of the model instead of searching for the best translation"
    )
    temperature: float = option(1.0, "sample from probabilities ** (1 / temperature)", min=0.01, max=100)
    top_k: int = option(0, "sample from this many most probable tokens; 0: all", min=0, max=10_000_000)
    top_p: float = option(
        1.0, "sample from the smallest set of most probable tokens with this total probability", above=0, max=1
    )
    shortlist: bool = option(
        False,
        "search only the target pieces that the checkpoint's shortlist has for the source pieces (faster on CPUs)",
    )
    logits_processors: tuple[str, ...] = option(
        (), "registered processors that change the log probabilities at each step, in this order", metavar="NAME,…"
    )
    # the config of each processor in `logits_processors`, in the same order; empty: the presets of the processors
    processor_configs: tuple[Any, ...] = field(default=(), metadata={"is_flag": False})
    seed: int = option(
        1, "seed of samples; the samples of a line depend only on the seed and the line number", min=0, max=2**63 - 1
    )
    ordered_constraints: bool = option(False, "required phrases must occur in the given order")
    mbr: str | None = option(
        None,
        "metric that sorts the n-best list or the samples; chrf, bleu, comet, metricx, …: by the mean score of each "
        "translation against the others (minimum Bayes risk); cometkiwi, metricx-qe: by the estimated quality; MODEL "
        "is a folder or hf:ORG/NAME[@REVISION]",
        metavar="METRIC[=MODEL]",
    )
    alignment: Literal["hard", "soft", "words"] | None = option(
        None,
        "add alignments from cross-attention; hard: a source piece for each target piece; soft: the weights of all "
        "source pieces for each target piece; words: character positions of a source word for each target word",
    )
    score_reference: bool = option(False, "score the given reference translations instead of searching")
    quality: bool = option(False, "estimate the confidence of each translation and report anomalies for review")
    unkpen: float | None = option(
        None, "allow <unk> with this penalty on its log probability; none: forbid <unk>", min=0, max=1000
    )
    replace_unknown: bool = option(False, "allow <unk> and replace it by the source piece with the highest attention")

    def __post_init__(self) -> None:
        super().__post_init__()
        changed = changed_flags(self)
        check_flags(SEARCH_RULES, changed, changed)
        if self.nbest > self.beam and not self.sampling:
            raise ValueError(f"--nbest {self.nbest} needs --beam {self.nbest} or more; --beam is {self.beam}")
        if self.beam % self.diverse_groups:
            raise ValueError(f"--beam {self.beam} is not a multiple of --diverse-groups {self.diverse_groups}")
        if self.mbr is not None:
            check_segment_metric(self.mbr, "--mbr")
        if self.mbr is not None and self.nbest < 2:
            raise ValueError(f"--mbr needs --nbest 2 or more; --nbest is {self.nbest}")

    @property
    def processors(self) -> dict[str, Any]:
        """A dict from the name of each logits processor to its config. The config None stands for the preset."""
        configs = self.processor_configs or [None] * len(self.logits_processors)
        return dict(zip(self.logits_processors, configs, strict=True))
