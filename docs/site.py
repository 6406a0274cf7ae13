"""Hooks of the site: a link to a file of the repository that is no page is shown as its path, without a link."""

import re
from pathlib import Path
from typing import Any

LINK = re.compile(r"\[([^\]]+)\]\((\.\./[^)#\s]+)(?:#[^)]*)?\)")


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Called by mkdocs with the text of every page. With `repo_url` in the config, links lead to the repository."""

    def link(match: re.Match[str]) -> str:
        title, target = match[1], match[2].removeprefix("../")
        if config["repo_url"]:
            return f"[{title}]({config['repo_url'].rstrip('/')}/blob/main/{target})"
        return f"`{target}`" if title.strip("`") in (target, Path(target).name) else f"{title} (`{target}`)"

    return LINK.sub(link, markdown)
