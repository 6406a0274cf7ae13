"""The output formats of `generate` for lines: a line of text, a score, or a JSON object for each translation."""

import dataclasses
import json
import math
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from nmtkit.translation.search.types import Translation

# Fields of a hypothesis in --format jsonl; a field without a value is left out.
JSONL_FIELDS = (
    *("text", "pieces", "score", "log_probability", "alignment", "utility", "token_log_probabilities"),
    *("quality", "terms"),
)


def output_line(translation: "Translation", format: str, score_only: bool) -> bytes:
    """Returns the line that `generate` writes for a translation, in UTF-8, without the line end.

    `format` is "text" or "jsonl". A text line is the best translation, or the score of this translation with
    `score_only`.
    """
    if format == "jsonl":
        line = json.dumps(as_object(translation), ensure_ascii=False, default=dataclasses.asdict)
    else:
        line = f"{translation.hypotheses[0].score:.6f}" if score_only else translation.text
    return line.encode()


def as_object(translation: "Translation") -> dict[str, Any]:
    """Returns a translation as an object for JSON: `id`, `source`, and `hypotheses` with the fields that have a value.

    With --pivot, `pivot` is the text in the pivot language. Infinite scores become null, because JSON has no infinity.
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
