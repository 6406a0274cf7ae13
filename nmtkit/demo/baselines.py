"""What two systems that know no grammar would score: the figures that a model's own has to be read against."""

from collections import Counter, defaultdict
from collections.abc import Sequence
from itertools import pairwise


def nearest_translations(sources: Sequence[str], known: Sequence[tuple[str, str]]) -> list[str]:
    """For each source the translation of the known (source, translation) whose source is most like it.

    Likeness is the share of words and pairs of neighbouring words in common (F1); of equals the first is taken.
    """
    holders: dict[tuple[str, ...], list[tuple[int, int]]] = defaultdict(list)
    sizes = []
    for index, (source, _) in enumerate(known):
        grams = _grams(source)
        sizes.append(grams.total())
        for gram, count in grams.items():
            holders[gram].append((index, count))
    nearest = []
    for source in sources:
        grams = _grams(source)
        shared: Counter[int] = Counter()
        for gram, count in grams.items():
            for index, other in holders[gram]:
                shared[index] += min(count, other)
        size = grams.total()
        best = max(shared, key=lambda index: (shared[index] / (size + sizes[index]), -index), default=0)
        nearest.append(known[best][1])
    return nearest


def _grams(sentence: str) -> Counter[tuple[str, ...]]:
    words = sentence.lower().split()
    return Counter([*((word,) for word in words), *pairwise(words)])
