"""What --glossary and --quality cost and give, with a trained model and references.

    python benchmarks/terms_and_quality.py --path averaged.pt --test test.en test.de --train train.en train.de

The glossary holds words of the source with the nouns that go with them in the training set (Dice), those that are true:
in every line of the test set with the word, the reference has one of the nouns. Times are in turns, of one thread.
"""

import argparse
import random
import re
import statistics
import tempfile
import time
from collections import Counter, defaultdict
from pathlib import Path

import numpy as np
from sacrebleu.metrics.bleu import BLEU
from sacrebleu.metrics.chrf import CHRF
from turns import in_turns

import nmtkit
from nmtkit.text.glossary import Glossary, Term

Pairs = list[tuple[str, str]]


def read(files: list[Path]) -> Pairs:
    return list(zip(*(file.read_text().splitlines() for file in files), strict=True))


def true_terms(train: Pairs, test: Pairs) -> dict[str, list[str]]:
    """Returns target words for source words: what begins as the word that goes with it best, as inflected forms do."""
    sources: Counter[str] = Counter()
    targets: Counter[str] = Counter()
    together: Counter[tuple[str, str]] = Counter()
    for pair in train:
        source, target = (set(re.findall(r"\w+", text)) for text in pair)
        sources.update(source)
        targets.update(target)
        together.update((one, other) for one in source for other in target)
    scores: dict[str, list[tuple[float, str]]] = defaultdict(list)
    for (one, other), count in together.items():
        if count >= 3:
            scores[one].append((2 * count / (sources[one] + targets[other]), other))
    terms = {}
    for source, found in scores.items():
        (best, target), *others = sorted(found, reverse=True)
        if best >= 0.4 and target[0].isupper() and min(len(source), len(target)) >= 4 and source.islower():
            terms[source] = [target, *(other for _, other in others if other[:5] == target[:5])]
    true: dict[str, set[str]] = defaultdict(set)
    false = set()
    for pair in test:
        source_words, reference = (set(re.findall(r"\w+", text)) for text in pair)
        for source in source_words & terms.keys():
            true[source] |= reference & set(terms[source])
            if not reference & set(terms[source]):
                false.add(source)
    return {source: sorted(targets) for source, targets in sorted(true.items()) if source not in false}


def ranks(values: np.ndarray) -> np.ndarray:
    """Returns the rank of each value, from 1 on; equal ones have their mean rank."""
    _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
    return (np.cumsum(counts) - (counts - 1) / 2)[inverse]


def report_ranking(name: str, scores: np.ndarray, chrf: np.ndarray) -> None:
    spearman = np.corrcoef(ranks(scores), ranks(chrf))[0, 1]
    worst = chrf <= np.quantile(chrf, 0.1)
    below = ranks(-scores)[worst].sum() - worst.sum() * (worst.sum() + 1) / 2
    print(f"{name}: Spearman {spearman:.2f}, AUC of the worst tenth {below / (worst.sum() * (~worst).sum()):.2f}")


def report_matching(lines: int = 1000, terms: int = 10_000) -> None:
    draw = random.Random(1)
    words = ["".join(draw.choices("abcdefghijklmnopqrstuvwxyz", k=draw.randint(2, 9))) for _ in range(8000)]
    sources = {" ".join(draw.choices(words, k=draw.randint(1, 3))) for _ in range(terms)}
    glossary = Glossary([Term(source, (source,)) for source in sources])
    texts = [" ".join(draw.choices(words, k=20)) for _ in range(lines)]
    start = time.perf_counter()
    found = sum(len(glossary.find(text)) for text in texts)
    print(f"{len(sources):,} terms x {lines:,} lines: {found:,} found in {time.perf_counter() - start:.3f} s")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--path", required=True)
    parser.add_argument("--test", type=Path, nargs=2, required=True)
    parser.add_argument("--train", type=Path, nargs=2, required=True)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    report_matching()
    test = read(args.test)
    terms = true_terms(read(args.train), test)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "terms.tsv"
        file.write_text("".join(f"{source}\t{'|'.join(targets)}\n" for source, targets in terms.items()))
        model = nmtkit.load(args.path, threads=1)
        sources, references = [source for source, _ in test], [reference for _, reference in test]
        systems = {
            "plain": lambda: model.translate(sources, nbest=1),
            "glossary": lambda: model.translate(sources, nbest=1, glossary=file),
            "quality": lambda: model.translate(sources, nbest=1, quality=True),
        }
        found, seconds = in_turns(systems, args.rounds)
    for name, times in seconds.items():
        texts = [translation.text for translation in found[name]]
        bleu, chrf = (metric().corpus_score(texts, [references]).score for metric in (BLEU, CHRF))
        median = statistics.median(one / other for one, other in zip(times, seconds["plain"], strict=True))
        print(f"{name}: BLEU {bleu:.1f}, chrF {chrf:.1f}, {median:.2f} times plain")
    results = [result for translation in found["glossary"] for result in translation.hypotheses[0].terms]
    lacking = sum(
        not set(term.targets) & set(re.findall(r"\w+", plain.text))
        for plain, other in zip(found["plain"], found["glossary"], strict=True)
        for term in other.hypotheses[0].terms
    )
    print(f"{len(terms)} terms, {len(results)} times; {lacking} were not in the plain translation, "
          f"{sum(result.found is None for result in results)} are not in the other")  # fmt: skip
    outputs = [translation.hypotheses[0] for translation in found["quality"]]
    sentence_scores = np.array(
        [
            CHRF().sentence_score(output.text, [reference]).score
            for output, reference in zip(outputs, references, strict=True)
        ]
    )
    for name in ("score", "mean_probability", "min_probability"):
        report_ranking(name, np.array([getattr(output.quality, name) for output in outputs]), sentence_scores)
    report_ranking(
        "length of the source, the shortest first", np.array([-len(source) for source in sources]), sentence_scores
    )


if __name__ == "__main__":
    main()
