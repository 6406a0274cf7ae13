"""`nmtkit fetch`: downloads parallel text by name, or lists the names."""

import shlex
from typing import Any

import click
from click.shell_completion import CompletionItem

from nmtkit.cli.command import Command, echo, show_next, tell
from nmtkit.cli.flags import completed_name, flags, from_flags, given_flags, published_sets
from nmtkit.config import FlagRule, check_flags
from nmtkit.data.corpora.provenance import origins
from nmtkit.data.fetch.downloads import HttpClient, HttpConfig, printable
from nmtkit.data.fetch.fetching import EXAMPLES, FetchConfig, FetchedCorpus, fetch, listing, parse_name

FETCH_RULES = (
    FlagRule("--columns", needs=("hf: names",)),
    *(FlagRule(flag, needs=("opus: names", "sacrebleu: names"))
      for flag in ("--attempts", "--request-timeout", "--max-download")),
    *(FlagRule("a list", excludes=(flag,), reason="a name without a corpus, such as opus:, lists corpora")
      for flag in ("--output", "--max-lines", "--compress", "--overwrite", "--max-download")),
)  # fmt: skip

COMMON = {
    "-s, --source-lang LANG": "source language, such as en",
    "-t, --target-lang LANG": "target language, such as de",
    "-o, --output DIR": "folder for the corpora (default: .)",
    "--max-lines N": "only the first N pairs",
    "--[no-]overwrite": "fetch again, and replace files",
}


def complete_name(ctx: click.Context, parameter: click.Parameter, incomplete: str) -> list[CompletionItem]:
    sources = [f"{source}:" for source in EXAMPLES]
    sets = [f"sacrebleu:{name}" for name in published_sets()] if incomplete.startswith("sacrebleu:") else []
    return completed_name(sets or sources, incomplete)


@click.command(cls=Command, common=COMMON)
@click.argument("names", nargs=-1, required=True, metavar="NAME…", shell_complete=complete_name)
def command(names: tuple[str, ...], **settings: Any) -> None:
    """Download parallel text by name. A name without a corpus, such as opus:, lists the corpora of two languages.

    \b
    nmtkit fetch opus: -s en -t de
    nmtkit fetch opus:Books opus:TED2020/v1 -s en -t de -o data
    nmtkit fetch sacrebleu:wmt14/full -s en -t de -o data
    nmtkit fetch hf:Helsinki-NLP/opus_books:de-en/train -s en -t de -o data

    opus:CORPUS[/VERSION] is a corpus of OPUS. sacrebleu:NAME is a published test set. hf:ORG/DATASET[@REVISION]
    [:CONFIG][/SPLIT] is a dataset of Hugging Face. A corpus becomes two files of lines, such as Books.en-de.en and
    Books.en-de.de, and a JSON file with its provenance. Standard output has the prefix of each corpus. If a download
    was interrupted, the same command resumes it.
    """
    config: FetchConfig = from_flags(FetchConfig, settings)
    http: HttpConfig = from_flags(HttpConfig, settings)
    corpora = [parse_name(name) for name in names]
    lists = [corpus.source for corpus in corpora if not corpus.corpus]
    if lists and len(corpora) > 1:
        raise ValueError(f"{lists[0]}: lists corpora and must be the only name; leave out the other names")
    prefixes = [corpus.prefix(config) for corpus in corpora]
    for corpus, prefix in zip(corpora, prefixes, strict=True):
        if prefixes.count(prefix) > 1:
            raise ValueError(f"{corpus} and another name would write the same files {prefix}; use different folders")
    facts = given_flags() | ({"a list"} if lists else set())
    check_flags(FETCH_RULES, facts, facts | {f"{corpus.source}: names" for corpus in corpora})
    client = HttpClient(http)
    if lists:
        for line in listing(lists[0], config, client):
            echo(line)
        return
    done = []
    for corpus in corpora:
        done.append(fetch(corpus, config, client))
        echo(str(done[-1].prefix))
        tell(described(done[-1]))
    training = [str(each.prefix) for corpus, each in zip(corpora, done, strict=True) if corpus.source != "sacrebleu"]
    if training:
        pair = ["-s", config.source_lang, "-t", config.target_lang]
        clean = ["nmtkit", "clean", *pair, *training, "--output", str(config.output / "clean")]
        show_next(shlex.join(clean))


command.params[:0] = [*flags(FetchConfig), *flags(HttpConfig)]


def described(corpus: FetchedCorpus) -> str:
    """Returns the facts about a corpus in one line."""
    facts = corpus.facts
    license_text = printable(str(facts.get("license") or ""))[:60]
    texts = [f"{facts['pairs']:,} pairs of {', '.join(origins(facts))}", license_text and f"license: {license_text}"]
    texts += [] if corpus.is_new else [f"fetched already on {facts['fetched'][:10]}"]
    return f"{corpus.prefix}: {'; '.join(filter(None, texts))}"
