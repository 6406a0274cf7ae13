"""Makes the training set of a student from the n-best translations of a teacher.

    python choose.py CANDIDATES REFERENCES OUTPUT.SOURCE OUTPUT.TARGET [--keep 0.95]

CANDIDATES is the JSON Lines file of `nmtkit generate --nbest N --format jsonl`, and REFERENCES has the translation of
each line. The candidate with the highest sentence chrF against the reference is kept (sequence-level interpolation,
Kim and Rush 2016, section 3.3). With --keep, only this share of the pairs is written: the pairs whose candidate has the
highest score of the teacher. Pairs stay in their order.
"""

import argparse
import json
import math
from pathlib import Path

from sacrebleu.metrics.chrf import CHRF


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("candidates", "references", "source", "target"):
        parser.add_argument(name, type=Path)
    parser.add_argument("--keep", type=float, default=1.0, help="share of the pairs that is written")
    given = parser.parse_args(arguments)
    if not 0 < given.keep <= 1:
        parser.error(f"--keep is {given.keep}; it must be above 0 and at most 1")
    chrf = CHRF()
    pairs: list[tuple[str, str, float]] = []
    empty = 0
    with given.candidates.open(encoding="utf-8") as lines, given.references.open(encoding="utf-8") as references:
        for line, reference in zip(lines, references, strict=True):
            entry = json.loads(line)
            candidates = [hypothesis for hypothesis in entry["hypotheses"] if hypothesis["text"].strip()]
            if not candidates:
                empty += 1
                continue
            scores = [chrf.sentence_score(hypothesis["text"], [reference.strip()]).score for hypothesis in candidates]
            best = candidates[scores.index(max(scores))]
            pairs.append((entry["source"], best["text"], best["score"]))
    ranked = sorted(range(len(pairs)), key=lambda index: -pairs[index][2])
    kept = sorted(ranked[: math.ceil(given.keep * len(pairs))])
    for path, side in ((given.source, 0), (given.target, 1)):
        path.write_text("".join(f"{pairs[index][side]}\n" for index in kept), encoding="utf-8")
    print(f"{len(kept):,} pairs written; {len(pairs) - len(kept):,} dropped by score, {empty:,} without a translation")


if __name__ == "__main__":
    main()
