"""Translators that stand in for a model. They read and write segments like a model."""

import html
import re


def upper(segment: str) -> str:
    """Returns the segment with its text in capitals."""
    parts = re.split(r"(<[^<>]*>)", segment)
    return "".join(
        part if part.startswith("<") else html.escape(html.unescape(part).upper(), quote=False) for part in parts
    )


def plain(segment: str) -> str:
    """Returns the text of a segment."""
    return html.unescape(re.sub(r"<[^<>]*>", "", segment))
