"""Settings of `nmtkit serve`, and which of the search's settings a service has."""

import re
from dataclasses import dataclass
from pathlib import Path

from nmtkit.config import Config, FlagRule, option
from nmtkit.search.options import CTRANSLATE2_RULE, SEARCH_RULES
from nmtkit.translation.options import GLOSSARY_RULE

# Those of SearchOptions that are the same for every request.
SEARCH_FIELDS = (
    *("beam", "lenpen", "max_len_a", "max_len_b", "min_len", "no_repeat_ngram", "diverse_groups", "diversity"),
    *("unkpen", "replace_unknown"),
)

# Those of TextOptions that are not the operator's: each request says its format, and each pair has a language.
OWN_TEXT_FIELDS = ("markup", "split_sentences")

RULES = (
    *(rule for rule in SEARCH_RULES if rule.flag == "--diversity"),
    CTRANSLATE2_RULE,
    GLOSSARY_RULE,
    FlagRule("--workers", excludes=("--threads",), reason="every worker has one thread"),
)

_PAIR = re.compile(r"([A-Za-z]\w*)-([A-Za-z]\w*)")


@dataclass(frozen=True, kw_only=True)
class ServeConfig(Config):
    """Where a service listens, how many processes translate, and what it refuses."""

    host: str = option("127.0.0.1", "address to listen on; 0.0.0.0 is every network", metavar="ADDRESS")
    port: int = option(5000, "port to listen on; 0: any that is free", min=0, max=65_535)
    workers: int | None = option(
        None, "CPU processes of one thread each; none is one per core, or with --threads a single one", min=1, max=1024
    )
    char_limit: int = option(100_000, "characters of a request; more are refused", min=1, max=10**9)
    batch_limit: int = option(1000, "lines of a request, over all texts of its q; more are refused", min=1, max=10**7)
    max_queue: int = option(
        10_000, "lines that wait; a request that would make more of them is answered 429", min=1, max=10**8
    )
    timeout: float = option(60.0, "seconds that a request may take, its upload included", above=0, max=86_400)
    api_keys: Path | None = option(None, "file of keys, one per line, one of which each request must give as api_key")
    split_sentences: bool = option(
        False,
        "cut lines into sentences by the rules of each pair's source language, and put them together again with the "
        "white space between them",
    )
    disable_web_ui: bool = option(False, "no translator at /; the interface and its page /docs stay")
    public_url: str | None = option(
        None,
        "what links in answers begin with, such as https://example.org/translator; none is the Host of each request",
        metavar="URL",
    )
    cors_origin: tuple[str, ...] = option(
        (), "origins of web pages that may read answers, such as https://example.org; * is all", metavar="URL,…"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.public_url is not None and not re.match(r"https?://[^/\s]+", self.public_url):
            raise ValueError(f"--public-url {self.public_url!r} is no address, as https://example.org/translator")


@dataclass(frozen=True)
class ModelPath:
    """A checkpoint to serve; `pair` is None where the checkpoint itself says it."""

    path: str
    pair: tuple[str, str] | None = None

    @staticmethod
    def parse(text: str) -> "ModelPath":
        """Reads `averaged.pt` or `en-de=averaged.pt`."""
        name, equals, path = text.partition("=")
        match = _PAIR.fullmatch(name)
        return ModelPath(path, (match[1], match[2])) if equals and match else ModelPath(text)


def read_api_keys(path: Path) -> list[bytes]:
    """Returns the keys of a file: lines not empty, not beginning with #. Raises ValueError without any."""
    try:
        lines = [line.strip() for line in path.read_text(encoding="utf-8").split("\n")]
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8; write one key per line") from error
    keys = [line.encode() for line in lines if line and not line.startswith("#")]
    if not keys:
        raise ValueError(f"{path} holds no key; write one per line, or leave out --api-keys")
    return keys
