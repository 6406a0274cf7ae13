"""Hooks of the site: links to files of the repository that are no pages, and examples in docstrings as code."""

import re
from pathlib import Path
from typing import Any

import griffe

LINK = re.compile(r"\[([^\]]+)\]\((\.\./[^)#\s]+)(?:#[^)]*)?\)")
EXAMPLE = re.compile(r"^>>> .*(?:\n(?!\s*$).+)*", re.MULTILINE)  # up to the next empty line


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Called by mkdocs with the text of every page: its links to files of the repository lead there, or are paths."""

    def link(match: re.Match[str]) -> str:
        title, target = match[1], match[2].removeprefix("../")
        if config["repo_url"]:
            return f"[{title}]({config['repo_url'].rstrip('/')}/blob/main/{target})"
        return f"`{target}`" if title.strip("`") in (target, Path(target).name) else f"{title} (`{target}`)"

    return LINK.sub(link, markdown)


class Examples(griffe.Extension):
    """Shows what follows `>>>` in a docstring as code, and shapes such as `position[b] [B]`, which are no links."""

    def on_object(self, *, obj: Any, **_: Any) -> None:
        if obj.docstring:
            obj.docstring.value = obj.docstring.value.replace("] [", "] \\[")
            obj.docstring.value = EXAMPLE.sub(lambda match: f"```pycon\n{match[0]}\n```", obj.docstring.value)
