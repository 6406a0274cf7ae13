"""Corpora of OPUS (https://opus.nlpl.eu): a client of its API, and its archives in the format Moses.

The API answers in JSON: `corpora` is a list of files with url, size in KiB, number of pairs, languages and version.
The languages of a file are in alphabetical order. The API finds only equal codes: "pt" does not find "pt_BR".
"""

import logging
import os
import re
import shutil
import zipfile
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

from nmtkit.config import suggestion
from nmtkit.data.corpora.corpus import Corpus
from nmtkit.data.corpora.pairs import pairs, zip_members
from nmtkit.data.fetch.downloads import DownloadError, HttpClient, printable
from nmtkit.data.fetch.text import FetchedText
from nmtkit.text.languages import best_match, includes

API = "https://opus.nlpl.eu/opusapi/"
API_VARIABLE = "NMTKIT_OPUS_API"  # environment variable with the address of a different server
LARGEST_RATIO = 250  # largest ratio of unpacked to compressed size; text has ratios around 4
SMALL = 1 << 26  # texts of up to this many bytes may have any ratio
LICENSE_CHARACTERS = 2000

log = logging.getLogger("nmtkit")


@dataclass(frozen=True, kw_only=True)
class OpusFile:
    """An archive of OPUS. `languages` are OPUS's codes of source and target, in the order that the user gave."""

    corpus: str
    version: str
    languages: tuple[str, str]
    url: str
    kilobytes: int
    pairs: int


class OpusApi:
    def __init__(self, client: HttpClient) -> None:
        self.client = client
        self.address = os.environ.get(API_VARIABLE) or API

    def ask(self, key: str, **parameters: str) -> list[Any]:
        """Sends a request. Returns the list `key` of the answer. Raises DownloadError if the answer lacks this list."""
        url = f"{self.address}?{urlencode(parameters)}"
        answer = self.client.json(url)
        found = answer.get(key) if isinstance(answer, dict) else None
        if not isinstance(found, list):
            raise DownloadError(f"{url}: the answer has no list {key!r}, so this is not the API of OPUS")
        return [printable(each) if isinstance(each, str) else each for each in found]

    def files(self, languages: tuple[str, str], **parameters: str) -> list[OpusFile]:
        """Returns the archives for two languages. `languages` are codes of OPUS. Raises DownloadError."""
        source, target = languages
        rows = self.ask("corpora", source=source, target=target, preprocessing="moses", **parameters)
        try:
            return [
                OpusFile(
                    corpus=printable(row["corpus"]), version=printable(row["version"]), languages=languages,
                    url=printable(row["url"]), kilobytes=int(row["size"] or 0), pairs=int(row["alignment_pairs"] or 0),
                )
                for row in rows
            ]  # fmt: skip
        except (LookupError, TypeError, ValueError):
            fault = "the answer describes a corpus without the expected fields"
            raise DownloadError(f"{self.address}: {fault}") from None

    def languages(self, **parameters: str) -> list[str]:
        """Returns the codes of the languages of a corpus, or of the target languages of a source language."""
        return [code for code in self.ask("languages", languages="True", **parameters) if isinstance(code, str)]

    def find(self, corpus: str, version: str | None, languages: tuple[str, str]) -> OpusFile:
        """Returns the archive of a corpus. If `version` is None, returns the latest version.

        Raises ValueError if OPUS lacks the corpus, the version or the languages. The message lists the alternatives.
        """
        wanted = version or "latest"
        found = self.files(languages, corpus=corpus, version=wanted)
        if not found:
            languages = self.related(languages, corpus)
            found = self.files(languages, corpus=corpus, version=wanted)
        if not found:
            versions = sorted({each.version for each in self.files(languages, corpus=corpus)})
            wanted = f"version {version!r}" if version else "archive"
            raise ValueError(
                f"OPUS has no {wanted} of {corpus} for {'-'.join(languages)}; it has "
                f"{', '.join(versions) or 'none in the format Moses'}"
            )
        return found[-1]

    def related(self, languages: tuple[str, str], corpus: str | None = None) -> tuple[str, str]:
        """Returns OPUS's codes for languages, such as pt_BR for pt-BR.

        Raises ValueError if OPUS lacks the corpus or a language.
        """
        of_corpus = {} if corpus is None else {"corpus": corpus}
        where = "OPUS" if corpus is None else f"the corpus {corpus} of OPUS"
        codes = self.languages(**of_corpus)
        if not codes:
            names = [name for name in self.ask("corpora", corpora="True") if isinstance(name, str)]
            raise ValueError(f"OPUS has no corpus {corpus!r}; {suggestion(corpus or '', sorted(names))}")
        source, target = languages
        first = matching(source, codes)
        if first is None:
            raise ValueError(f"{where} has no text in {source!r}; {suggestion(source, codes)}")
        targets = [code for code in self.languages(source=first, **of_corpus) if code != first]
        second = matching(target, targets)
        if second is None:
            raise ValueError(
                f"{where} has no pairs {first}-{target}; for pairs with {first}, {suggestion(target, targets)}"
            )
        for code, wanted in ((first, source), (second, target)):
            if code != wanted:
                log.info("OPUS has the code %s for the language %s", code, wanted)
        return first, second


def matching(wanted: str, codes: Sequence[str]) -> str | None:
    index = best_match(wanted, codes)
    return None if index is None else codes[index]


def listed(languages: tuple[str, str], client: HttpClient) -> tuple[list[OpusFile], list[str]]:
    """Returns the latest archives of a pair, the largest first, and the codes of variants of the target language."""
    api = OpusApi(client)
    found = api.files(languages, version="latest")
    if not found:
        languages = api.related(languages)
        found = api.files(languages, version="latest")
    variants = [code for code in api.languages(source=languages[0]) if includes(languages[1], code)]
    return sorted(found, key=lambda each: -each.pairs), [code for code in variants if code != languages[1]]


@contextmanager
def opened(
    corpus: str, version: str | None, languages: tuple[str, str], archive: Path, client: HttpClient
) -> Iterator[FetchedText]:
    """Downloads the archive of a corpus to the file `archive`, and opens its pairs. At the end, removes the archive.

    An interrupted download stays, so that the next call resumes it.
    """
    file = OpusApi(client).find(corpus, version, languages)
    downloaded = client.download(file.url, archive, title=f"{file.corpus} {file.version}")
    try:
        text = Corpus(archive, archive, format="zip", languages=file.languages)
        license_text = check_archive(text)
        facts = {
            "source": "OPUS", "corpus": file.corpus, "version": file.version, "opus_languages": list(file.languages),
            "url": downloaded.url, "page": f"https://opus.nlpl.eu/{file.corpus}", "bytes": downloaded.bytes,
            "sha256": downloaded.sha256, "license": license_text,
        }  # fmt: skip
        yield FetchedText(pairs=pairs(text), facts=facts)
    except ValueError as error:  # also raised while the caller reads the pairs
        raise ValueError(str(error).replace(str(archive), file.url)) from error
    finally:
        archive.unlink(missing_ok=True)


def check_archive(corpus: Corpus) -> str | None:
    """Returns the shortened text of the file LICENSE of an archive, or None if the file is missing or too large.

    Raises ValueError if the archive lacks the two texts, or if their compression ratio is too high for text. Raises
    OSError if the texts are larger than the free space of the disk.
    """
    try:
        with zipfile.ZipFile(corpus.source) as archive:
            members = [archive.getinfo(name) for name in zip_members(archive.namelist(), corpus)]
            size, packed = (sum(getattr(each, name) for each in members) for name in ("file_size", "compress_size"))
            if size > max(SMALL, LARGEST_RATIO * packed):
                raise ValueError(
                    f"{corpus.source}: {packed:,} compressed bytes hold {size:,} bytes; no text compresses so well"
                )
            if size > shutil.disk_usage(corpus.source.parent).free:
                raise OSError(f"the text has {size:,} bytes, more than the free space of {corpus.source.parent}")
            names = [name for name in archive.namelist() if re.fullmatch(r"(?i)(.*/)?LICEN[CS]E(\.txt)?", name)]
            if not names or archive.getinfo(names[0]).file_size > 1 << 20:
                return None
            return archive.read(names[0]).decode(errors="replace").strip()[:LICENSE_CHARACTERS] or None
    except (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError, RuntimeError) as error:
        raise ValueError(f"{corpus.source} is damaged or is not a ZIP archive: {error}") from None
