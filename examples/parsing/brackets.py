"""Bracket scores of parsers, by the rules of evalb (Sekine and Collins 1997) with its parameter file COLLINS.prm.

    python brackets.py gold.mrg parsed.mrg

Both files hold one tree on each line. The rules of COLLINS.prm:

- Labelled brackets count; preterminals and the root TOP do not.
- Words whose preterminal in the gold tree is a punctuation mark (`,` `:` `.` and both quotes) are deleted before
  spans are counted.
- ADVP and PRT count as one label.
- A bracket that occurs n times in one tree matches at most n brackets of the other.
"""

import json
import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from trees import ROOT, TRACE, Tree, read_files

DELETED = {ROOT, TRACE, ",", ":", "``", "''", "."}
EQUAL = {"PRT": "ADVP"}

Bracket = tuple[str, int, int]  # label, first word, last word + 1


@dataclass(frozen=True)
class Counts:
    """Counts of one sentence or of a corpus; `errors` counts trees with words that differ from the gold tree."""

    matched: int = 0
    gold: int = 0
    parsed: int = 0
    exact: int = 0
    sentences: int = 0
    errors: int = 0

    def __add__(self, other: "Counts") -> "Counts":
        values = {name: value + getattr(other, name) for name, value in vars(self).items()}
        return Counts(**values)

    @property
    def recall(self) -> float:
        """Percent of the gold brackets that are matched."""
        return 100 * self.matched / self.gold if self.gold else 0.0

    @property
    def precision(self) -> float:
        return 100 * self.matched / self.parsed if self.parsed else 0.0

    @property
    def f1(self) -> float:
        total = self.gold + self.parsed
        return 200 * self.matched / total if total else 0.0


def brackets(tree: Tree, deleted: Sequence[bool]) -> Counter[Bracket]:
    """Returns the labelled spans of a tree over the words that are not `deleted`.

    A constituent whose words are all deleted keeps an empty span, as in evalb.
    """
    kept = [0]
    for is_deleted in deleted:
        kept.append(kept[-1] + (not is_deleted))
    result: Counter[Bracket] = Counter()
    position = 0
    stack: list[tuple[Tree, int | None]] = [(tree, None)]
    while stack:
        node, start = stack.pop()
        if node.word is not None:
            position += 1
        elif start is None:
            stack.append((node, position))
            stack.extend((child, None) for child in reversed(node.children))
        elif node.label not in DELETED:
            result[EQUAL.get(node.label, node.label), kept[start], kept[position]] += 1
    return result


def score_tree(gold: Tree, parsed: Tree) -> Counts:
    """Returns the counts of one sentence. If the words of the two trees differ, this is an error, as in evalb."""
    if gold.words() != parsed.words():
        return Counts(errors=1)
    deleted = [node.label in DELETED for node in gold.preterminals()]
    of_gold, of_parsed = brackets(gold, deleted), brackets(parsed, deleted)
    matched = sum((of_gold & of_parsed).values())
    return Counts(
        matched=matched,
        gold=sum(of_gold.values()),
        parsed=sum(of_parsed.values()),
        exact=int(of_gold == of_parsed),
        sentences=1,
    )


def score(pairs: Iterable[tuple[Tree, Tree]]) -> Counts:
    return sum((score_tree(gold, parsed) for gold, parsed in pairs), Counts())


def main(gold_path: str, parsed_path: str) -> None:
    gold, parsed = (list(read_files([Path(name)])) for name in (gold_path, parsed_path))
    if len(gold) != len(parsed):
        raise SystemExit(f"{gold_path} has {len(gold)} trees, but {parsed_path} has {len(parsed)}; they must match")
    counts = score(zip(gold, parsed, strict=True))
    result = {name: round(getattr(counts, name), 2) for name in ("f1", "precision", "recall")}
    print(json.dumps(result | {"sentences": counts.sentences, "exact": counts.exact, "errors": counts.errors}))


if __name__ == "__main__":
    main(*sys.argv[1:])
