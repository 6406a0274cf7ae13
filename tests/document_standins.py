"""Translators that stand in for a model: they read and write segments as one does."""

import html
import re


def upper(segment: str) -> str:
    """Puts the text of a segment in capitals."""
    parts = re.split(r"(<[^<>]*>)", segment)
    return "".join(
        part if part.startswith("<") else html.escape(html.unescape(part).upper(), quote=False) for part in parts
    )


def plain(segment: str) -> str:
    """Returns the text of a segment."""
    return html.unescape(re.sub(r"<[^<>]*>", "", segment))
