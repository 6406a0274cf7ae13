"""HTML documents in the style of all pages."""

import importlib.resources
from collections.abc import Sequence
from functools import cache
from html import escape

Cell = str | int | float


class Html(str):
    """HTML, which is not escaped again."""


@cache
def asset(name: str) -> str:
    """Returns the text of a file of this package."""
    return importlib.resources.files("nmtkit.pages").joinpath(name).read_text(encoding="utf-8")


def document(title: str, *body: str, linked: bool = False) -> str:
    """Returns a page with its title as its heading; `body` is HTML.

    The style sheet and the script of charts are inside, unless a server has it `linked`, as static/style.css.
    """
    links = '<link rel="stylesheet" href="static/style.css"><link rel="icon" href="static/icon.svg">'
    style = links if linked else f"<style>\n{asset('style.css')}</style>"
    script = f"<script>\n{asset('charts.js')}</script>" if any("<polyline" in part for part in body) else ""
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)}</title>\n{style}\n</head>\n<body>\n<main>\n<h1>{escape(title)}</h1>\n"
        + "\n".join(filter(None, body))
        + f"\n</main>\n{script}</body>\n</html>\n"
    )


def table(head: Sequence[str], rows: Sequence[Sequence[Cell]], wide: bool = False) -> str:
    """Returns a table. Text is escaped, unless it is Html; numbers stand right. A `wide` one scrolls sideways."""
    numbers = [bool(rows) and not isinstance(value, str) for value in rows[0]] if rows else []
    titles = "".join(
        f"<th{' class=number' * number}>{escape(title)}</th>"
        for title, number in zip(head, numbers or [False] * len(head), strict=True)
    )
    lines = ["<tr>" + "".join(map(_cell, row)) + "</tr>" for row in rows]
    box = f'<div class="table{" wide" * wide}"><table>\n'
    return box + "\n".join([f"<tr>{titles}</tr>"] * bool(head) + lines) + "\n</table></div>"


def _cell(value: Cell) -> str:
    if isinstance(value, Html):
        return f"<td>{value}</td>"
    if isinstance(value, str):
        return f'<td dir="auto">{escape(value)}</td>'
    return f'<td class="number">{value:,}</td>'
