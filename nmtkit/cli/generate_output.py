"""Writes the translations of `nmtkit generate`: as lines, or as a JSON object for each line."""

import dataclasses
import json
import math
import sys
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, BinaryIO

from nmtkit.cli.command import stderr

if TYPE_CHECKING:
    from nmtkit.translation.requests import Translation

# Fields of a hypothesis in --format jsonl; a field without a value is left out.
JSONL_FIELDS = (
    *("text", "pieces", "score", "log_probability", "alignment", "utility", "token_log_probabilities"),
    *("quality", "terms"),
)


def write(translations: Iterable["Translation"], format: str, scores: bool, out: BinaryIO) -> None:
    """Writes and flushes a line for each translation. With `scores`, the line is the score instead of the text."""
    for translation in translations:
        if format == "jsonl":
            line = json.dumps(as_object(translation), ensure_ascii=False, default=dataclasses.asdict)
        else:
            line = f"{translation.hypotheses[0].score:.6f}" if scores else translation.text
        out.write(line.encode() + b"\n")
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


def as_object(translation: "Translation") -> dict[str, Any]:
    """Returns a translation as an object for JSON: `id`, `source`, and `hypotheses` with the fields that have a value.
    With --pivot, `pivot` is the text in the pivot language.

    JSON has no infinity: infinite scores of a hypothesis are null.
    """
    hypotheses = [
        {name: finite(value) for name in JSONL_FIELDS if (value := getattr(hypothesis, name)) is not None}
        for hypothesis in translation.hypotheses
    ]
    pivot = {} if translation.pivot is None else {"pivot": translation.pivot}
    return {"id": translation.id, "source": translation.source, **pivot, "hypotheses": hypotheses}


def finite(value: Any) -> Any:
    """Returns a value, or a list of values, with None for each number that is not finite."""
    if isinstance(value, list):
        return [finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
