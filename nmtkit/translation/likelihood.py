"""Computes the log probabilities that a translation model or a language model assigns to given texts."""

import contextlib
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import BinaryIO

from nmtkit.data.corpora.corpus import ColumnNames
from nmtkit.jobs import progress
from nmtkit.models.architectures.interface import TooLongError
from nmtkit.models.building import languages_of
from nmtkit.scoring.report import ScoreReport
from nmtkit.scoring.texts import check_equal_counts, read_side, read_systems
from nmtkit.translation.languages import Codes
from nmtkit.translation.search.options import SearchOptions
from nmtkit.translation.search.types import Request
from nmtkit.translation.translator import WINDOW, Translator


@dataclass(frozen=True)
class Likelihood:
    """The log probability of a text (natural logarithm) and the number of pieces of the text. Both include eos."""

    log_probability: float
    pieces: int


def is_language_model(translator: Translator) -> bool:
    """Returns whether all models of a translator are language models, which ignore the source."""
    return not any(model.reads_source for model in translator.originals)


def likelihoods(
    translator: Translator, sources: Iterable[str] | None, targets: Iterable[str], *, languages: Codes
) -> Iterator[Likelihood]:
    """Yields the likelihood of each target given its source. Without `sources`, all sources are empty.

    `languages` are the codes of the source and the target, for a model of several languages. Raises ValueError for
    languages that the model does not have.
    """
    search = SearchOptions(score_reference=True, source_lang=languages[0], target_lang=languages[1])
    pipeline = translator.pipeline(search)
    if sources is None:
        requests = (Request("", reference=text) for text in targets)
    else:
        requests = (Request(text, reference=other) for text, other in zip(sources, targets, strict=True))
    for translation in translator.run(iter(lambda: list(islice(requests, WINDOW)), []), pipeline):
        (hypothesis,) = translation.hypotheses
        yield Likelihood(hypothesis.log_probability, len(hypothesis.tokens) + 1)


def likelihoods_of_readable(
    translator: Translator, sources: Sequence[str] | None, targets: Sequence[str], *, languages: Codes
) -> list[Likelihood | None]:
    """Returns the same as `likelihoods`, but None for each pair that is too long for the positions of a model.

    Raises the errors of `likelihoods`. An error message gives the number of the pair, counted from 1, as a line
    number.
    """
    models = translator.originals
    if all(model.max_source_positions is None and model.max_target_positions is None for model in models):
        return list(likelihoods(translator, sources, targets, languages=languages))
    sources = [""] * len(targets) if sources is None else sources
    search = SearchOptions(score_reference=True, source_lang=languages[0], target_lang=languages[1])
    pipeline, rows = translator.pipeline(search), []
    for row, (source, target) in enumerate(zip(sources, targets, strict=True)):
        with contextlib.suppress(TooLongError):
            pipeline.check([Request(source, reference=target)], row)
            rows.append(row)
    pairs = [sources[row] for row in rows], [targets[row] for row in rows]
    found = dict(zip(rows, likelihoods(translator, *pairs, languages=languages), strict=True))
    return [found.get(row) for row in range(len(targets))]


def text_likelihoods(
    path: Path,
    systems: Sequence[Path],
    stream: BinaryIO | None,
    source: Path | None,
    columns: ColumnNames | None,
    languages: Codes,
) -> dict[str, list[Likelihood]]:
    """Returns a dict from the name of each file of `systems`, or of `stream`, to the likelihoods of its lines.

    `path` is the checkpoint of the model. `source` is the file of the source texts, or None for a language model. If
    `source` is a corpus, `columns` are the columns of its two sides. `languages` are the source and target language.
    The corpus is read in these languages; None means the language of the checkpoint. Raises ValueError if the source is
    missing or superfluous, or if line counts differ.
    """
    translator = Translator.load(path, engine="torch")
    if is_language_model(translator) and source is not None:
        raise ValueError(f"{path} is a language model, which reads no source; leave out --src")
    if not is_language_model(translator) and source is None:
        raise ValueError(f"{path} is a translation model; give the source text with --src FILE")
    own = languages_of(translator.paths[0]) or (None, None)
    sources = (
        None if source is None else read_side(source, 0, (languages[0] or own[0], languages[1] or own[1]), columns)
    )
    results = {}
    for title, lines in read_systems(systems, stream).items():
        if sources is not None:
            check_equal_counts({str(source): sources, title: lines})
        progress.begin("Scoring", "lines", len(lines))
        results[title] = list(likelihoods(translator, sources, lines, languages=languages))
    return results


def sentences_report(likelihoods: Sequence[Likelihood], width: int) -> ScoreReport:
    """Returns a report with the log probability and the number of pieces of each line.

    The log probability has `width` digits after the decimal point, but at least six.
    """
    rows = [{"log_probability": each.log_probability, "pieces": each.pieces} for each in likelihoods]
    digits = max(6, width)
    return ScoreReport(rows, [f"{each.log_probability:.{digits}f}\t{each.pieces}" for each in likelihoods])


def perplexity_report(texts: Mapping[str, Sequence[Likelihood]], width: int) -> ScoreReport:
    """Returns a report with the perplexity per piece of each text: exp(-log probability / pieces), at most exp(700).

    The perplexity has `width` digits after the decimal point, but at least two.
    """
    rows, lines, digits = [], [], max(2, width)
    for title, each in texts.items():
        total, pieces = math.fsum(line.log_probability for line in each), sum(line.pieces for line in each)
        value = math.exp(min(700.0, -total / max(1, pieces)))
        row = {"system": title, "perplexity": value, "log_probability": total, "pieces": pieces, "lines": len(each)}
        rows.append(row)
        lines.append(
            f"perplexity {value:.{digits}f}  {pieces:,} pieces with eos in {len(each):,} lines, "
            f"log probability {total:.{digits}f}  {title}"
        )
    return ScoreReport(rows, lines)
