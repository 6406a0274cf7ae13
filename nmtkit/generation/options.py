"""What a search can be asked for. The fields are the flags of `nmtkit generate` and the keywords of `translate`."""

from dataclasses import dataclass

from nmtkit.registry import option


@dataclass(frozen=True, kw_only=True)
class SearchOptions:
    """How to search. Lengths are in target pieces without eos; a source's length is in pieces without eos too.

    Raises ValueError for a value out of range and for two modes that cannot be combined, naming both.
    """

    beam: int = option(4, "hypotheses kept open per sentence; 1 is greedy search")
    nbest: int = option(1, "translations given per sentence, best first; at most the beam")
    lenpen: float = option(0.6, "length penalty: score = log probability / ((5 + pieces with eos) / 6) ** lenpen")
    max_len_a: float = option(1.0, "no output is longer than max-len-a x source pieces + max-len-b")
    max_len_b: int = option(50, "pieces; see --max-len-a")
    min_len: int = option(0, "no output is shorter than this, in pieces")

    def __post_init__(self) -> None:
        self._check(self.beam >= 1, "--beam", self.beam, "1 or more")
        self._check(self.nbest >= 1, "--nbest", self.nbest, "1 or more")
        if self.nbest > self.beam:
            raise ValueError(f"--nbest {self.nbest} needs --beam {self.nbest} or more; it is {self.beam}")
        self._check(self.max_len_a >= 0, "--max-len-a", self.max_len_a, "0 or more")
        self._check(self.max_len_b >= 0, "--max-len-b", self.max_len_b, "0 or more")
        self._check(self.min_len >= 0, "--min-len", self.min_len, "0 or more")

    @staticmethod
    def _check(right: bool, flag: str, value: object, allowed: str) -> None:
        if not right:
            raise ValueError(f"{flag} is {value}; it must be {allowed}")

    def max_length(self, source_length: int) -> int:
        """The most pieces, without eos, that a source of so many pieces, without eos, may become."""
        return max(self.min_len, int(self.max_len_a * source_length + self.max_len_b))
