"""The prompt of `nmtkit generate` at a terminal: translates each line that is typed."""

import itertools
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
    """Yields the translation of each line that is typed. Shows scores and, with --alignment hard, linked pieces."""
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
    for number in itertools.count(1):
        stderr.print("> ", end="", style="bold")
        line = sys.stdin.buffer.readline()
        if not line:
            return
        try:
            yield decode(line.rstrip(b"\r\n"), Path("standard input"), number)
        except ValueError as error:
            print_line(str(error), "dim")


def show(translation: Translation, pipeline: Pipeline) -> None:
    """Shows the score of each hypothesis and, if known, the hard alignment of pieces."""
    source = source_pieces(translation, pipeline) if pipeline.search.alignment == "hard" else []
    for hypothesis in translation.hypotheses:
        facts = []
        if source:
            facts += [f"{source[int(i)]}→{hypothesis.pieces[int(j)]}" for i, j in hypothesis.alignment or []]
        if (again := hypothesis.no_repeat_ngram) is not None:
            facts.append(f"decoded again with --no-repeat-ngram {again}, because of a loop")
        print_line(f"  {hypothesis.score:.3f}  {' '.join(facts)}", "dim")


def source_pieces(translation: Translation, pipeline: Pipeline) -> list[str]:
    """Returns the source pieces of a line, to which a hard alignment refers by index.

    Each part of a long line begins with the same tags and language tokens, which count once.
    """
    (line,) = pipeline.segments([Request(translation.source)], translation.id)
    pieces: list[str] = []
    for part in line.leaves():
        repeated = pipeline.model_input.leading(part.segment) if pieces else 0
        pieces += pipeline.tokenizer.source_pieces(part.input.ids[repeated:-1])
    return pieces
