"""Renders HTML pages from Jinja templates in this folder. A page is one file, or a server sends its style sheet."""

import importlib.resources
from collections.abc import Sequence
from functools import cache
from typing import Any

import jinja2
from markupsafe import Markup

Html = Markup  # HTML text; templates insert it without escaping
Cell = str | int | float


@cache
def asset(name: str) -> str:
    """Returns the text of a file of this package."""
    return importlib.resources.files("nmtkit.pages").joinpath(name).read_text(encoding="utf-8")


@cache
def _environment() -> jinja2.Environment:
    environment = jinja2.Environment(
        loader=jinja2.FunctionLoader(asset), autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True,
        lstrip_blocks=True, keep_trailing_newline=True,
    )  # fmt: skip
    environment.globals["asset"] = lambda name: Markup(asset(name))
    environment.tests["html"] = lambda value: isinstance(value, Markup)
    return environment


def render(template: str, **values: Any) -> str:
    """Returns a template of this folder, filled with `values`, which are escaped unless they are `Html`."""
    return _environment().get_template(template).render(**values)


def document(title: str, *body: str, lead: str = "") -> str:
    """Returns a page that contains its style sheet and scripts. `title` is also the heading; `body` is HTML."""
    parts = [Html(part) for part in body if part]
    return render("document.html", title=title, lead=lead, body=parts)


def table(head: Sequence[str], rows: Sequence[Sequence[Cell]], wide: bool = False) -> str:
    """Returns the HTML of a table. Columns of numbers are right-aligned. A `wide` table scrolls sideways."""
    numeric = [not isinstance(value, str) for value in rows[0]] if rows else [False] * len(head)
    module: Any = _environment().get_template("macros.html").module
    return str(module.table(head, rows, numeric, wide))
