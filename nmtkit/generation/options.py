"""What a search can be asked for. The fields are the flags of `nmtkit generate` and the keywords of `translate`."""

from dataclasses import dataclass
from typing import Literal

from nmtkit.registry import flag_name, option


@dataclass(frozen=True, kw_only=True)
class SearchOptions:
    """How to search. Lengths are in target pieces without eos; a source's length is in pieces without eos too.

    Raises ValueError for a value out of range and for two modes that cannot be combined, naming both.
    """

    beam: int = option(4, "hypotheses kept open per sentence; 1 is greedy search")
    nbest: int = option(1, "translations found per sentence, best first; with --sampling, independent samples")
    lenpen: float = option(0.6, "length penalty: score = log probability / ((5 + pieces with eos) / 6) ** lenpen")
    max_len_a: float = option(1.0, "no output is longer than max-len-a x source pieces + max-len-b")
    max_len_b: int = option(50, "pieces; see --max-len-a")
    min_len: int = option(0, "no output is shorter than this, in pieces")
    no_repeat_ngram: int = option(0, "no output has the same run of so many pieces twice; 0: it may")
    diverse_groups: int = option(1, "groups of the beam, each kept from what earlier ones do (Vijayakumar et al. 2016)")
    diversity: float = option(0.5, "what a token loses for each earlier group that took it in the same step")
    sampling: bool = option(False, "draw from the model's distribution instead of searching for the best")
    temperature: float = option(1.0, "sample from probabilities ** (1 / temperature)")
    top_k: int = option(0, "sample among so many tokens; 0: all")
    top_p: float = option(1.0, "sample among the fewest tokens that make up this probability")
    seed: int = option(1, "of sampling: a line's samples depend on it, the line's number, and nothing else")
    ordered_constraints: bool = option(False, "required phrases come in the order they are given in")
    mbr: Literal["chrf", "bleu"] | None = option(
        None, "sort the n-best or samples by their mean utility against each other (minimum Bayes risk)"
    )
    alignment: Literal["hard", "soft"] | None = option(
        None, "cross-attention of each translation: for each target piece a source piece, or all weights"
    )
    score_reference: bool = option(False, "score the given reference translations instead of searching")
    replace_unknown: bool = option(False, "let the model produce <unk>, and put the source piece it attends to there")

    def __post_init__(self) -> None:
        for name, least in (("beam", 1), ("nbest", 1), ("max_len_a", 0), ("max_len_b", 0), ("min_len", 0),
                            ("no_repeat_ngram", 0), ("diverse_groups", 1), ("diversity", 0), ("top_k", 0)):  # fmt: skip
            if not getattr(self, name) >= least:
                raise ValueError(f"{flag_name(name)} is {getattr(self, name)}; it must be {least} or more")
        if not self.temperature > 0:
            raise ValueError(f"--temperature is {self.temperature}; it must be more than 0")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"--top-p is {self.top_p}; it must be more than 0 and at most 1")
        if self.nbest > self.beam and not self.sampling:
            raise ValueError(f"--nbest {self.nbest} needs --beam {self.nbest} or more; it is {self.beam}")
        if self.beam % self.diverse_groups:
            raise ValueError(f"--beam {self.beam} is not a multiple of --diverse-groups {self.diverse_groups}")
        if self.sampling and self.diverse_groups > 1:
            raise ValueError("--sampling and --diverse-groups cannot be combined: samples are independent")
        if self.mbr is not None and self.nbest < 2:
            raise ValueError(f"--mbr chooses among --nbest 2 or more; it is {self.nbest}")
        if self.score_reference:
            for name, wanted in (("sampling", self.sampling), ("mbr", self.mbr is not None), ("nbest", self.nbest > 1),
                                 ("replace_unknown", self.replace_unknown)):  # fmt: skip
                if wanted:
                    raise ValueError(f"--score-reference and {flag_name(name)} cannot be combined: nothing is searched")
        if not self.sampling:
            for name in ("temperature", "top_k", "top_p"):
                if getattr(self, name) != getattr(SearchOptions, name):
                    raise ValueError(f"{flag_name(name)} needs --sampling")

    @property
    def rows(self) -> int:
        """Hypotheses of a sentence that are open at a time."""
        return self.nbest if self.sampling else self.beam

    def max_length(self, source_length: int) -> int:
        """The most pieces, without eos, that a source of so many pieces, without eos, may become."""
        return max(self.min_len, int(self.max_len_a * source_length + self.max_len_b))
