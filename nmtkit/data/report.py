"""What a preprocess found and did: counts for the manifest and the terminal, and a page to look at."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from nmtkit.data.cleaning import REASONS, Findings

LONGEST_BAR = 256  # the last bar of a length histogram holds all that are longer


@dataclass
class CorpusReport:
    """One pair of training files."""

    source: Path
    target: Path
    read: int = 0  # pairs
    written: int = 0  # distinct rows, before up-sampling
    weight: float = 1.0
    findings: Findings = field(default_factory=Findings)


@dataclass
class SplitReport:
    pairs: int
    tokens: dict[str, int]  # side -> tokens, eos included
    lengths: dict[str, npt.NDArray[np.int64]]  # side -> sentences by length, up to LONGEST_BAR


@dataclass
class Report:
    source_lang: str
    target_lang: str
    vocabulary: dict[str, int]  # side -> entries
    splits: dict[str, SplitReport] = field(default_factory=dict)
    corpora: list[CorpusReport] = field(default_factory=list)
    pieces: dict[str, list[tuple[str, int]]] = field(default_factory=dict)  # side -> the most frequent, and counts
    unused: dict[str, int] = field(default_factory=dict)  # side -> entries no training sentence has

    def findings(self) -> Findings:
        """Those of all corpora."""
        total = Findings()
        for corpus in self.corpora:
            total.add(corpus.findings)
        return total

    def counts(self) -> dict[str, Any]:
        """What the manifest keeps."""
        return {
            "corpora": [
                {
                    "source": str(corpus.source),
                    "target": str(corpus.target),
                    "read": corpus.read,
                    "written": corpus.written,
                    "weight": corpus.weight,
                    "dropped": in_order(corpus.findings.dropped),
                    "kept_but_counted": in_order(corpus.findings.counted),
                }
                for corpus in self.corpora
            ]
        }


def in_order(counts: dict[str, int]) -> dict[str, int]:
    return {reason: counts[reason] for reason in REASONS if counts.get(reason)}


def length_histogram(lengths: npt.NDArray[Any]) -> npt.NDArray[np.int64]:
    """How many sentences have 0, 1, … LONGEST_BAR (or more) tokens."""
    total = np.zeros(LONGEST_BAR + 1, np.int64)
    for start in range(0, len(lengths), 1 << 20):
        total += np.bincount(np.minimum(lengths[start : start + (1 << 20)], LONGEST_BAR), minlength=LONGEST_BAR + 1)
    return total
