"""Makes the training set of a student from translations: of nmtkit, of another toolkit, or of a language model.

    python choose.py CANDIDATES SOURCE TARGET [--source FILE] [--references FILE] [--scores FILE] [--keep 0.95]

Each line of CANDIDATES has the translations of one source line. It is either a JSON object with the fields `source` and
`hypotheses` (a list of texts, or of objects with `text` and `score`), such as `nmtkit generate --nbest N --format
jsonl` writes, or plain text with one translation. Plain text needs --source, the lines that were translated. SOURCE and
TARGET are the files to write. Pairs keep their order.

With --references, the candidate with the highest sentence chrF against the reference is kept (sequence-level
interpolation, Kim and Rush 2016, section 3.3), otherwise the first candidate. With --keep, only this share of the pairs
is written: the pairs with the highest scores. Scores are the `score` of the candidates, or the numbers in the file
--scores, one in each line, for example from a backward model (`nmtkit generate --score-reference`; only the text before
the first tab is read).
"""

import argparse
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from sacrebleu.metrics.chrf import CHRF

Candidate = tuple[str, float | None]  # text and score


def lines_of(path: Path | None, count: int | None = None) -> list[str] | None:
    """Returns the lines of a file, or None without a file. Raises ValueError unless there are `count` lines."""
    if path is None:
        return None
    lines = path.read_text(encoding="utf-8").split("\n")
    lines = lines[:-1] if lines[-1] == "" else lines
    if count is not None and len(lines) != count:
        raise ValueError(f"{path} has {len(lines):,} lines, and the candidates have {count:,}")
    return lines


def entries(lines: list[str], sources: list[str] | None) -> Iterator[tuple[str, list[Candidate]]]:
    """Yields the source of each line, and its candidates that are not empty. Raises ValueError without sources."""
    for number, line in enumerate(lines):
        if not line.startswith("{"):
            if sources is None:
                raise ValueError("candidates in plain text need --source, the lines that were translated")
            entry: dict[str, Any] = {"hypotheses": [line]}
        else:
            entry = json.loads(line)
        given = [each if isinstance(each, dict) else {"text": each} for each in entry["hypotheses"]]
        candidates = [(each["text"], each.get("score")) for each in given if each["text"].strip()]
        yield entry["source"] if sources is None else sources[number], candidates


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("candidates", type=Path)
    parser.add_argument("outputs", type=Path, nargs=2, metavar="output")
    parser.add_argument("--source", type=Path, help="the lines that were translated")
    parser.add_argument("--references", type=Path, help="a reference for each line")
    parser.add_argument("--scores", type=Path, help="a number for each line, instead of the scores of the candidates")
    parser.add_argument("--keep", type=float, default=1.0, help="share of the pairs to write")
    given = parser.parse_args(arguments)
    if not 0 < given.keep <= 1:
        parser.error(f"--keep is {given.keep}; it must be above 0 and at most 1")
    try:
        lines = lines_of(given.candidates) or []
        sources, references, numbers = (
            lines_of(path, len(lines)) for path in (given.source, given.references, given.scores)
        )
        chosen = list(entries(lines, sources))
    except (ValueError, KeyError, OSError) as error:
        parser.error(str(error))
    chrf = CHRF()
    pairs: list[tuple[str, str, float]] = []
    for number, (source, candidates) in enumerate(chosen):
        if not candidates:
            continue
        best = 0
        if references is not None:
            reference = [references[number].strip()]
            values = [chrf.sentence_score(text, reference).score for text, _ in candidates]
            best = values.index(max(values))
        text, score = candidates[best]
        if numbers is not None:
            score = float(numbers[number].split("\t")[0])
        if score is None and given.keep < 1:
            parser.error("--keep needs scores: the candidates have none, so give --scores")
        pairs.append((source, text, 0.0 if score is None else score))
    ranked = sorted(range(len(pairs)), key=lambda index: -pairs[index][2])
    kept = sorted(ranked[: math.ceil(given.keep * len(pairs))])
    for side, path in enumerate(given.outputs):
        path.write_text("".join(f"{pairs[index][side]}\n" for index in kept), encoding="utf-8")
    empty = len(chosen) - len(pairs)
    print(f"{len(kept):,} pairs written; {len(pairs) - len(kept):,} dropped by score, {empty:,} without a translation")


if __name__ == "__main__":
    main()
