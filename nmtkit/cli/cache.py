"""`nmtkit cache`: lists and removes cached models of the Hugging Face Hub and other cached files."""

from typing import TYPE_CHECKING, Literal

import click

from nmtkit.cli.command import Command, echo, tell
from nmtkit.config.files import HUB_PREFIX, user_cache
from nmtkit.jobs import machine_code

if TYPE_CHECKING:
    from nmtkit.models.model_cache import CacheEntry

Action = Literal["list", "dir", "remove", "prune"]


@click.command(cls=Command)
@click.argument("action", type=click.Choice(["list", "dir", "remove", "prune"]), default="list")
@click.argument("names", nargs=-1, metavar="[NAME…]")
@click.option(
    "--days",
    type=click.IntRange(0, 100_000),
    metavar="N",
    help="With prune: also remove models and files that were not used for N days.",
)
def command(action: Action, names: tuple[str, ...], days: int | None) -> None:
    """List the cached models and files, remove models by NAME, or prune files that are not needed any more.

    \b
    nmtkit cache
    nmtkit cache remove hf:Helsinki-NLP/opus-mt-en-de
    nmtkit cache prune --days 90
    nmtkit cache dir

    list shows the name, the size and the last use of each model of the Hugging Face Hub, and of other files, such as
    the machine code of the compiled search. dir prints the folder, which NMTKIT_CACHE can set. remove takes a name with
    or without @REVISION. prune removes models that other versions of nmtkit have imported, and unfinished imports
    of processes that were killed.

    The files that models were imported from are in the cache of the Hub, which other programs share;
    `hf cache ls` lists the cache of the Hub.
    """
    from nmtkit.models import model_cache

    if bool(names) != (action == "remove"):
        raise ValueError("nmtkit cache remove needs at least one NAME, and other actions take none")
    if days is not None and action != "prune":
        raise ValueError("--days needs the action prune")
    if action == "dir":
        echo(str(user_cache()))
        return
    entries = model_cache.entries()
    if action == "list":
        show(entries)
        return
    chosen = named(entries, names) if action == "remove" else outdated(entries, days)
    for entry in chosen:
        model_cache.remove(entry)
        tell(f"removed {short(entry)}, {size(entry.size)}")
    freed = f"{len(chosen)} removed, {size(sum(entry.size for entry in chosen))} freed"
    tell(f"{user_cache()}: {freed}")


def named(entries: "list[CacheEntry]", names: tuple[str, ...]) -> "list[CacheEntry]":
    """Returns the entries with these names. Raises ValueError for a name without an entry, before any removal."""
    from nmtkit.models import model_cache

    chosen: dict[str, CacheEntry] = {}
    for name in names:
        found = [entry for entry in entries if model_cache.named(entry, name)]
        if not found:
            known = ", ".join(dict.fromkeys(entry.name.partition("@")[0] for entry in entries)) or "nothing"
            raise ValueError(f"{name} is not cached; {user_cache()} holds {known}")
        chosen |= {str(entry.path): entry for entry in found}
    return list(chosen.values())


def outdated(entries: "list[CacheEntry]", days: int | None) -> "list[CacheEntry]":
    """Returns the cache entries to prune: stale entries, and with `days` also entries that were unused for `days` days.

    The machine code of the installed version is never pruned.
    """
    current = machine_code.folder_name() if machine_code.installed() else None
    return [
        entry for entry in entries if entry.stale or (days is not None and entry.days >= days and entry.name != current)
    ]


def show(entries: "list[CacheEntry]") -> None:
    """Prints one line for each entry, in columns, and the number of entries and their total size on stderr."""
    width = max((len(short(entry)) for entry in entries), default=0)
    for entry in entries:
        used = "used today" if entry.days < 1 else f"used {entry.days:.0f} day{'s' * (entry.days >= 1.5)} ago"
        notes = [*entry.revisions, *(["unfinished or of another version: prune removes it"] if entry.stale else [])]
        columns = f"{short(entry):<{width}}  {size(entry.size):>10}  {used:<16}"
        echo(f"{columns}  {', '.join(notes)}".rstrip())
    total = size(sum(entry.size for entry in entries))
    tell(f"{user_cache()}: {len(entries)} {'entry' if len(entries) == 1 else 'entries'}, {total}")


def short(entry: "CacheEntry") -> str:
    """Returns the name of an entry, with a commit cut to 12 digits."""
    name, at, commit = entry.name.partition("@")
    return name + at + commit[:12] if entry.name.startswith(HUB_PREFIX) else entry.name


def size(count: int) -> str:
    return f"{count / 1e6:,.1f} MB"
