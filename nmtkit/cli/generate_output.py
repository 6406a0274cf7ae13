"""Writes the translations of `nmtkit generate`: as lines, as a JSON object for each line, or as a document."""

import sys
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, nullcontext
from typing import TYPE_CHECKING, BinaryIO

from nmtkit.cli.command import stderr
from nmtkit.cli.generate_config import GenerateJob
from nmtkit.config.files import atomic_write
from nmtkit.translation.output_lines import output_line

if TYPE_CHECKING:
    from nmtkit.translation.search.types import Translation


def write_output(job: GenerateJob, translations: Iterator["Translation"], stack: ExitStack) -> None:
    """Writes the translations and the reports of a job. `stack` closes the files."""
    from nmtkit.translation.line_reports import GlossaryReport, QualityReport

    config, report = job.config, None
    out = stack.enter_context(atomic_write(config.output) if config.output else nullcontext(sys.stdout.buffer))
    if job.text.glossary is not None:
        report = stack.enter_context(GlossaryReport(config.glossary_report))
        translations = report.observe(translations)
    if config.quality_report is not None:
        translations = stack.enter_context(QualityReport(config.quality_report)).observe(translations)
    if job.document is not None:
        out.write(job.document.encoded(job.document.render([translation.text for translation in translations])))
    else:
        write(translations, config.format, job.search.score_reference, out)
    if report is not None:
        stderr.print(report.totals, markup=False, highlight=False)


def write(translations: Iterable["Translation"], format: str, scores: bool, out: BinaryIO) -> None:
    """Writes and flushes a line for each translation. With `scores`, the line is the score instead of the text."""
    for translation in translations:
        out.write(output_line(translation, format, scores) + b"\n")
        out.flush()


def counted(translations: Iterable["Translation"]) -> Iterator["Translation"]:
    """Yields translations, and shows their count in a terminal."""
    with ExitStack() as stack:
        show = stderr.is_terminal and not sys.stdout.isatty()
        status = stack.enter_context(stderr.status("Translating")) if show else None
        for count, translation in enumerate(translations, 1):
            yield translation
            if status is not None and count % 100 == 0:
                status.update(f"{count:,} lines translated")
