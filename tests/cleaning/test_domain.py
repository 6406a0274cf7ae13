"""The filter `domain` against cross-entropies computed one by one, and on a corpus of two domains."""

import math
import random
from collections import Counter
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from nmtkit.cleaning.filters import FilterContext, TextBlock
from nmtkit.cleaning.filters.domain import Domain, DomainConfig
from nmtkit.cleaning.mending import mended_pairs
from nmtkit.cli import main
from nmtkit.data.corpora.corpus import locate

Lines = list[list[str]]


def lines(words: str, seed: int, count: int = 1100) -> Lines:
    generator = random.Random(seed)
    return [generator.choices(words, range(1, len(words) + 1), k=generator.randint(3, 9)) for _ in range(count)]


def written(folder: Path, name: str, source: Lines, target: Lines) -> Path:
    for language, side in (("en", source), ("de", target)):
        (folder / f"{name}.{language}").write_text("".join(f"{' '.join(line)}\n" for line in side), encoding="utf-8")
    return folder / name


def cross_entropy(line: list[str], text: Lines, words: set[str]) -> float:
    """Returns the mean of -log p(word | previous word), with absolute discounting of 0.75, over known bigrams."""
    known = [bigram for bigram in pairwise(["<", *line, "<"]) if words.issuperset(bigram)]
    counts = Counter(bigram for each in text for bigram in pairwise(["<", *each, "<"]) if words.issuperset(bigram))
    entries = len(words) + 1  # and an id for rare words
    total = 0.0
    for first, second in known:
        alone = sum(count for bigram, count in counts.items() if bigram[1] == second) + 0.5
        alone /= counts.total() + 0.5 * entries
        before = sum(count for bigram, count in counts.items() if bigram[0] == first)
        followers = sum(bigram[0] == first for bigram in counts)
        seen = max(counts[first, second] - 0.75, 0) / before if before else 0
        total -= math.log(seen + (0.75 * followers / before if before else 1) * alone)
    return total / len(known)


def test_scores_equal_differences_of_cross_entropies_computed_one_by_one(tmp_path: Path) -> None:
    corpus, domain = (lines("abcdefgh", 1), lines("jklmn", 2)), (lines("cdefghi", 3), lines("nopq", 4))
    path = written(tmp_path, "domain", *domain)
    found = Domain(DomainConfig(), FilterContext("en", "de", domain=(locate(str(path), "en", "de"),)))
    found.fit(TextBlock(*([" ".join(line) for line in side] for side in corpus)))
    rows = [0, 1, 2, 1099]
    scores = found.score(TextBlock(*([" ".join(side[row]) for row in rows] for side in corpus)))
    for row, score in zip(rows, scores.tolist(), strict=True):
        expected = 0.0
        for side in (0, 1):
            words = {"<", *(word for line in (*corpus[side], *domain[side]) for word in line)}
            expected += cross_entropy(corpus[side][row], corpus[side], words)
            expected -= cross_entropy(corpus[side][row], domain[side], words)
        assert score == pytest.approx(expected, abs=1e-5)


def test_pairs_of_the_domain_stay_and_pairs_of_another_domain_go(tmp_path: Path) -> None:
    inside, outside = (lines("abcdef", 1), lines("pqrstu", 2)), (lines("fedcba", 3), lines("utsrqp", 4))
    corpus = written(tmp_path, "corpus", inside[0] + outside[0], inside[1] + outside[1])
    domain = written(tmp_path, "domain", lines("abcdef", 5), lines("pqrstu", 6))
    arguments = ["clean", "-s", "en", "-t", "de", str(corpus), "--filters", "domain", "--domain", str(domain)]
    arguments += ["--duplicates", "none", "--no-mend", "--workers", "1", "--output", str(tmp_path / "out")]
    finished = CliRunner().invoke(main, arguments)
    assert finished.exit_code == 0, finished.output
    kept = Counter((tmp_path / "out.en").read_text(encoding="utf-8").splitlines())
    shares = [sum(kept[" ".join(line)] > 0 for line in side) / len(side) for side in (inside[0], outside[0])]
    assert shares[0] > 0.8 and shares[1] < 0.2


def test_without_domain_scores_are_zero_and_a_small_corpus_is_refused(tmp_path: Path) -> None:
    block = TextBlock(["a b c"] * 5, ["p q r"] * 5)
    filter = Domain(DomainConfig(), FilterContext("en", "de"))
    filter.fit(block)
    np.testing.assert_array_equal(filter.score(block), 0)
    path = written(tmp_path, "domain", lines("abc", 1, 5), lines("pqr", 2, 5))
    filter = Domain(DomainConfig(), FilterContext("en", "de", domain=(locate(str(path), "en", "de"),)))
    with pytest.raises(ValueError, match=r"5 pairs .*--domain.*1,000"):
        filter.fit(block)


def test_the_text_of_the_domain_is_mended_like_the_corpus(tmp_path: Path) -> None:
    (tmp_path / "domain.en").write_text("a &amp; b\n")
    (tmp_path / "domain.de").write_text("SchÃ¶n\n")
    corpora = (locate(str(tmp_path / "domain"), "en", "de"),)
    for mend, expected in ((mended_pairs, ("a & b", "Schön")), (None, ("a &amp; b", "SchÃ¶n"))):
        (part,) = FilterContext("en", "de", domain=corpora, mend=mend).pairs(corpora)
        assert (*part.sources, *part.targets) == expected
