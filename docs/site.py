"""Hooks of the documentation site: rewrite links to files of the repository, and format examples in docstrings."""

import re
from pathlib import Path
from typing import Any

import griffe

LINK = re.compile(r"\[([^\]]+)\]\((\.\./[^)#\s]+)(?:#[^)]*)?\)")
EXAMPLE = re.compile(r"^>>> .*(?:\n(?!\s*$).+)*", re.MULTILINE)  # up to the next empty line


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Turns links to files outside docs/ into links to the repository, or into paths if the site has no repository."""

    def link(match: re.Match[str]) -> str:
        title, target = match[1], match[2].removeprefix("../")
        if config["repo_url"]:
            return f"[{title}]({config['repo_url'].rstrip('/')}/blob/main/{target})"
        return f"`{target}`" if title.strip("`") in (target, Path(target).name) else f"{title} (`{target}`)"

    return LINK.sub(link, markdown)


class Examples(griffe.Extension):
    """Formats lines after `>>>` in docstrings as code. Escapes shapes (`x[b] [B]`), which look like links."""

    def on_object(self, *, obj: Any, **_: Any) -> None:
        if obj.docstring:
            obj.docstring.value = obj.docstring.value.replace("] [", "] \\[")
            obj.docstring.value = EXAMPLE.sub(lambda match: f"```pycon\n{match[0]}\n```", obj.docstring.value)
