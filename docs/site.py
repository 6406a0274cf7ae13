"""Hooks of the documentation site: rewrite links to files of the repository, and format examples in docstrings."""

import re
from pathlib import Path
from typing import Any

import griffe

LINK = re.compile(r"\[([^\]]+)\]\((\.\./[^)#\s]+)(?:#[^)]*)?\)")
CODE = re.compile(r"<code>[^<]*</code>")
FLAG = re.compile(r"(?<![\w-])--?\w[\w-]*")
EXAMPLE = re.compile(r"^>>> .*(?:\n(?!\s*$).+)*", re.MULTILINE)  # up to the next empty line


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Turns links to files outside docs/ into links to the repository, or into paths if the site has no repository."""

    def link(match: re.Match[str]) -> str:
        title, target = match[1], match[2].removeprefix("../")
        if config["repo_url"]:
            return f"[{title}]({config['repo_url'].rstrip('/')}/blob/main/{target})"
        return f"`{target}`" if title.strip("`") in (target, Path(target).name) else f"{title} (`{target}`)"

    return LINK.sub(link, markdown)


def on_page_content(html: str, **_: Any) -> str:
    """Marks the flags in code, so that a narrow column does not break a line after the hyphens of a flag."""
    return CODE.sub(lambda code: FLAG.sub(r'<span class="flag">\g<0></span>', code[0]), html)


class Examples(griffe.Extension):
    """Formats lines after `>>>` in docstrings as code. Escapes shapes (`x[b] [B]`), which look like links."""

    def on_object(self, *, obj: Any, **_: Any) -> None:
        if obj.docstring:
            obj.docstring.value = obj.docstring.value.replace("] [", "] \\[")
            obj.docstring.value = EXAMPLE.sub(lambda match: f"```pycon\n{match[0]}\n```", obj.docstring.value)
