"""Renders HTML pages from the Jinja templates in this folder. Pages saved as files contain the style sheet."""

import importlib.resources
from functools import cache
from typing import Any

import jinja2
from markupsafe import Markup

Html = Markup  # HTML text; templates insert it without escaping


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
    """Returns a template of this folder, filled with `values`. Values are escaped unless they are `Html`."""
    return _environment().get_template(template).render(**values)


def visible(text: str) -> str:
    """Replaces control characters, which HTML does not allow, by their visible symbols (U+2400 …)."""
    return "".join(chr(0x2400 + ord(c)) if c < " " else "\u2421" if "\x7f" <= c < "\xa0" else c for c in text)
