"""Glossaries that clients create: a folder for each glossary, with a file of terms for each of its language pairs.

The files of terms have the format of `--glossary`, so the workers read them with the same code.
"""

import asyncio
import csv
import io
import json
import re
import secrets
import shutil
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TypeVar

from nmtkit.config.files import new_folder, parse_json, write_atomically
from nmtkit.serving.refusal import Refusal
from nmtkit.text import glossary

MAX_GLOSSARIES = 1000  # maximum number of glossaries of an account
FACTS = "glossary.json"

Languages = tuple[str, str]  # source and target language without script and region, such as ("en", "de")
Terms = Mapping[str, str]
T = TypeVar("T")

_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029]")
_ID = re.compile(r"[0-9a-f]{32}")


@dataclass(frozen=True)
class StoredGlossary:
    id: str
    account: str
    name: str
    creation_time: str
    counts: Mapping[Languages, int]  # number of terms of each language pair

    @property
    def facts(self) -> bytes:
        counts = {"-".join(languages): count for languages, count in self.counts.items()}
        return json.dumps({**vars(self), "counts": counts}, ensure_ascii=False, indent=1).encode()


class GlossaryStore:
    """The glossaries of all accounts. Without a `folder`, `create` makes a temporary folder.

    Raises ValueError for a damaged file in the folder.
    """

    def __init__(self, folder: Path | None) -> None:
        self.folder, self.temporary = folder, folder is None
        self.writing = asyncio.Lock()
        self.glossaries: dict[str, StoredGlossary] = {}
        # folders whose names begin with a dot are glossaries that an earlier server did not complete
        for path in folder.glob(f"[!.]*/{FACTS}") if folder is not None else ():
            try:
                facts = parse_json(path.read_text(encoding="utf-8"))
                counts = {tuple(pair.split("-")): int(count) for pair, count in facts.pop("counts").items()}
                stored = StoredGlossary(counts=counts, **facts)
                assert _ID.fullmatch(stored.id) and stored.id == path.parent.name
            except (ValueError, TypeError, KeyError, AttributeError, AssertionError) as error:
                raise ValueError(f"{path} is damaged; restore or remove {path.parent}") from error
            self.glossaries[stored.id] = stored

    def close(self) -> None:
        if self.temporary and self.folder is not None:
            shutil.rmtree(self.folder, ignore_errors=True)

    def listed(self, account: str) -> list[StoredGlossary]:
        mine = (stored for stored in self.glossaries.values() if stored.account == account)
        return sorted(mine, key=lambda stored: (stored.creation_time, stored.id))

    def get(self, account: str, id: str) -> StoredGlossary:
        """Returns a glossary of an account. Raises Refusal 404 if the account does not have this glossary."""
        stored = self.glossaries.get(id)
        if stored is None or stored.account != account:
            raise Refusal(404, "this glossary does not exist")
        return stored

    def path(self, stored: StoredGlossary, languages: Languages) -> Path:
        """Returns the file of terms of a language pair. Raises Refusal 404 if the glossary lacks the pair."""
        if languages not in stored.counts:
            raise Refusal(404, f"this glossary has no terms from {languages[0]} to {languages[1]}")
        assert self.folder is not None
        return self.folder / stored.id / _file_name(languages)

    def terms(self, stored: StoredGlossary, languages: Languages) -> str:
        """Returns the terms of a language pair as lines of a source term, a tab and a target term."""
        return self.path(stored, languages).read_text(encoding="utf-8")

    async def write(self, change: Callable[..., T], *arguments: object, **settings: object) -> T:
        """Runs a function that changes glossaries, such as `create`, in a thread, after all earlier changes.

        Raises Refusal 507 if a file cannot be written.
        """
        async with self.writing:
            try:
                return await asyncio.to_thread(change, *arguments, **settings)
            except OSError as error:
                raise Refusal(507, f"the server cannot write glossaries: {error.strerror or error}") from error

    def create(self, account: str, *, name: str, dictionaries: Mapping[Languages, Terms]) -> StoredGlossary:
        """Creates a glossary. Raises Refusal 456 if the account has too many glossaries."""
        if len(self.listed(account)) >= MAX_GLOSSARIES:
            raise Refusal(456, f"an account has at most {MAX_GLOSSARIES} glossaries; delete some")
        time = datetime.now(UTC).isoformat(timespec="microseconds").replace("+00:00", "Z")
        counts = {languages: len(terms) for languages, terms in dictionaries.items()}
        stored = StoredGlossary(secrets.token_hex(16), account, name, time, counts)
        if self.folder is None:
            self.folder = Path(tempfile.mkdtemp(prefix="nmtkit-glossaries-"))
        with new_folder(self.folder / stored.id) as folder:
            for languages, terms in dictionaries.items():
                (folder / _file_name(languages)).write_bytes(_lines(terms))
            (folder / FACTS).write_bytes(stored.facts)
        self.glossaries[stored.id] = stored
        return stored

    def change(
        self, account: str, id: str, dictionaries: Mapping[Languages, Terms], limit: int | None, name: str | None = None
    ) -> StoredGlossary:
        """Changes dictionaries (the terms of a pair of languages) of a glossary, and its name if `name` is given.

        With a `limit`, adds the terms to the stored dictionaries. Without a limit, replaces the stored dictionaries. If
        a source term has an old and a new target term, the new target term is kept. Raises Refusal 413, without a
        change, if a dictionary would have more than `limit` characters.
        """
        stored, files, counts = self.get(account, id), {}, {}
        assert self.folder is not None
        for languages, terms in dictionaries.items():
            if limit is not None and languages in stored.counts:
                terms = {**read_terms(self.terms(stored, languages), "tsv"), **terms}
            files[languages], counts[languages] = _lines(terms), len(terms)
            if limit is not None and len(files[languages].decode()) > limit:
                raise Refusal(413, f"the dictionary would have more than {limit} characters")
        for languages, lines in files.items():
            write_atomically(self.folder / id / _file_name(languages), lines)
        return self._replace(replace(stored, counts={**stored.counts, **counts}, name=name or stored.name))

    def remove(self, account: str, id: str, languages: Languages) -> StoredGlossary:
        """Removes a dictionary. Raises Refusal 404 if the glossary lacks the dictionary."""
        stored = self.get(account, id)
        path = self.path(stored, languages)
        counts = {pair: count for pair, count in stored.counts.items() if pair != languages}
        stored = self._replace(replace(stored, counts=counts))
        path.unlink(missing_ok=True)
        return stored

    def _replace(self, stored: StoredGlossary) -> StoredGlossary:
        assert self.folder is not None
        write_atomically(self.folder / stored.id / FACTS, stored.facts)
        self.glossaries[stored.id] = stored
        return stored

    def delete(self, account: str, id: str) -> None:
        self.get(account, id)
        assert self.folder is not None
        (self.folder / id / FACTS).unlink(missing_ok=True)  # without this file, the folder is not a glossary
        del self.glossaries[id]
        shutil.rmtree(self.folder / id, ignore_errors=True)


def _file_name(languages: Languages) -> str:
    return f"{'-'.join(languages)}.tsv"


def _lines(terms: Terms) -> bytes:
    return "".join(f"{source}\t{target}\n" for source, target in terms.items()).encode()


def read_terms(entries: str, format: str) -> Terms:
    """Returns the terms in the lines that a client has sent. `format` is "tsv" or "csv".

    A line of CSV may have two more fields, which name the languages.

    Raises Refusal, with the number of the line or the row of CSV, for a line that is not a term and for a repeated
    term. The target terms may be alternatives, separated by |, as in the file of --glossary. A byte order mark at the
    beginning is ignored.
    """
    terms: dict[str, str] = {}
    entries = entries.removeprefix("\ufeff")
    lines = (line.removesuffix("\r").split("\t") for line in entries.split("\n"))
    try:
        for number, row in enumerate(csv.reader(io.StringIO(entries)) if format == "csv" else lines, 1):
            place = f"{'row' if format == 'csv' else 'line'} {number} of the glossary"
            fields = [field.strip() for field in row]
            if not any(fields):
                continue
            if len(fields) != 2 and (format == "tsv" or len(fields) != 4):
                raise Refusal(400, f"{place} is not a source term and a target term")
            source, target = fields[:2]
            if any(map(_CONTROL.search, fields[:2])):
                raise Refusal(400, f"{place} contains a control character")
            if source in terms:
                raise Refusal(400, f"{place} repeats a source term")
            glossary.parse_term(f"{source}\t{target}", place)
            terms[source] = target
    except (csv.Error, ValueError) as error:
        raise Refusal(400, str(error)) from error
    if not terms:
        raise Refusal(400, "the glossary has no terms")
    return terms
