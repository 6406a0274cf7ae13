"""The prompt of `nmtkit generate` at a terminal: translates each line that is typed."""

import sys
from collections.abc import Iterator
from pathlib import Path

from nmtkit.cli.command import print_line, stderr, tell
from nmtkit.data.corpora.lines import decode
from nmtkit.text.sentences import has_several
from nmtkit.translation.pipeline import Pipeline
from nmtkit.translation.search.types import Request, Translation
from nmtkit.translation.translator import Translator


def typed_translations(translator: Translator, pipeline: Pipeline) -> Iterator[Translation]:
    """Yields the translation of each line that is typed. Shows scores and, with --alignment, links."""
    tell("Type a line to translate; Ctrl-D ends.", "dim")
    told = pipeline.text.split_sentences is not None
    for id, line in enumerate(typed_lines()):
        if not told and has_several(line):
            told = True
            tell("This line looks like several sentences: --split-sentences translates each sentence alone.", "dim")
        (translation,) = translator.run([[Request(line)]], pipeline, first=id)
        yield translation
        show(translation, pipeline)


def typed_lines() -> Iterator[str]:
    """Yields the lines that the user types at a prompt. Reports and skips a line that is not UTF-8."""
    number = 0
    while True:
        stderr.print("> ", end="", style="bold")
        line = sys.stdin.buffer.readline()
        if not line:
            return
        number += 1
        try:
            yield decode(line.rstrip(b"\r\n"), Path("standard input"), number)
        except ValueError as error:
            print_line(str(error), "dim")


def show(translation: Translation, pipeline: Pipeline) -> None:
    """Shows the score of each hypothesis and, if known, the hard alignment of pieces."""
    (segment,) = pipeline.segments([Request(translation.source)])
    source = pipeline.source_pieces(segment)
    for hypothesis in translation.hypotheses:
        pairs = ""
        if pipeline.search.alignment == "hard":
            pairs = " ".join(f"{source[int(i)]}→{hypothesis.pieces[int(j)]}" for i, j in hypothesis.alignment or [])
        again = hypothesis.no_repeat_ngram
        pairs += "" if again is None else f"decoded again with --no-repeat-ngram {again}, because of a loop"
        print_line(f"  {hypothesis.score:.3f}  {pairs}", "dim")
