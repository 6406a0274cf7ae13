"""Published test sets by name, such as wmt14/full: the list and the readers of sacreBLEU, with our own downloads.

The files are in sacreBLEU's folder (`SACREBLEU`, or else ~/.sacrebleu), which both programs share.
"""

import hashlib
import logging
import os
import re
import shutil
import tarfile
import tempfile
import zipfile
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from nmtkit.config import suggestion
from nmtkit.config.files import disk_full
from nmtkit.data.corpora.lines import line_windows
from nmtkit.data.fetch.downloads import HttpClient
from nmtkit.jobs.folder_lock import lock
from nmtkit.text.languages import best_match

log = logging.getLogger("nmtkit")


@dataclass(frozen=True, kw_only=True)
class PublishedSet:
    """The texts of one or several test sets of a language pair, one after another."""

    pair: str  # such as en-de
    sources: list[str]
    references: list[list[str]]  # all lines of each reference
    downloads: tuple[str, ...]  # addresses of the archives

    @property
    def target_lang(self) -> str:
        return self.pair.partition("-")[2]


def known_sets() -> dict[str, Any]:
    """Returns sacreBLEU's test sets (`sacrebleu.dataset.base.Dataset`) by name."""
    from sacrebleu.dataset import DATASETS

    return dict(DATASETS)


def check_sets(names: Sequence[str], pair: str | None, flag: str) -> None:
    """Raises ValueError if `names` is empty, if a name is unknown or repeated, or if a set lacks the pair.

    The message has the nearest name. Also raises ValueError if `pair` is None. Then the message asks for `flag`.
    """
    sets = known_sets()
    if not names or len(set(names)) < len(names):
        raise ValueError(f"give at least one test set, and give each set once; given: {', '.join(names) or 'none'}")
    for name in names:
        if name not in sets:
            raise ValueError(f"sacreBLEU has no test set {name!r}; {suggestion(name, list(sets))}")
        pairs = list(sets[name].langpairs)
        if pair is None:
            raise ValueError(f"give {flag}: {name} has {', '.join(pairs)}")
        if pair not in pairs:
            raise ValueError(f"the test set {name} has no pair {pair!r}; {suggestion(pair, pairs)}")


def pair_of_languages(names: Sequence[str], source: str, target: str) -> str:
    """Returns a language pair in the codes of the first set. For example, returns en-de for eng_Latn and de.

    Returns the codes unchanged if the set lacks the pair. Raises ValueError for an unknown set.
    """
    sets = known_sets()
    if not names or names[0] not in sets:
        check_sets(names, f"{source}-{target}", "")
    pairs = [tuple(pair.split("-")) for pair in sets[names[0]].langpairs]
    sources = list(dict.fromkeys(first for first, _ in pairs))
    if (index := best_match(source, sources)) is not None:
        targets = [second for first, second in pairs if first == sources[index]]
        if (other := best_match(target, targets)) is not None:
            return f"{sources[index]}-{targets[other]}"
    return f"{source}-{target}"


def sets_of_languages(source: str, target: str) -> list[tuple[str, str]]:
    """Returns the name and the description of each set with this pair of languages."""
    return [
        (name, re.sub(r"\s+", " ", str(each.description or "")))
        for name, each in known_sets().items()
        if pair_of_languages([name], source, target) in each.langpairs
    ]


def source_files(names: Sequence[str], pair: str, client: HttpClient | None = None) -> list[Path]:
    """Returns the file with the source lines of each set. Downloads missing sets.

    Raises the errors of `check_sets`, and ValueError or OSError if the set cannot be read.
    """
    check_sets(names, pair, "")
    return [Path(_files(name, pair, client or HttpClient()).get_source_file(pair)) for name in names]


def read_sets(names: Sequence[str], pair: str, client: HttpClient | None = None) -> PublishedSet:
    """Reads sources and references. Downloads missing sets. Raises the errors of `source_files`."""
    check_sets(names, pair, "")
    sources: list[str] = []
    references: list[list[str]] = []
    downloads: list[str] = []
    for name in names:
        dataset = _files(name, pair, client or HttpClient())
        texts = [_lines(Path(file)) for file in dataset.get_reference_files(pair)]
        if not texts:
            raise ValueError(f"the test set {name} has no references for {pair}")
        references = references or [[] for _ in texts]
        if len(texts) != len(references):
            raise ValueError(f"{names[0]} has {len(references)} references, but {name} has {len(texts)}")
        source = _lines(Path(dataset.get_source_file(pair)))
        for lines, text in zip(references, texts, strict=True):
            if len(text) != len(source):
                sizes = f"the source has {len(source):,} lines, and a reference {len(text):,}"
                raise ValueError(f"the test set {name} is damaged: {sizes}; remove {dataset._outdir}")
            lines += text
        sources += source
        downloads += dataset.data
    return PublishedSet(pair=pair, sources=sources, references=references, downloads=tuple(downloads))


def select(
    texts: Sequence[list[str]], names: Sequence[str], pair: str, *, origlang: str | None, subset: str | None
) -> list[list[str]]:
    """Returns the lines of `texts` whose documents match `origlang` (original language) and `subset` (domain, country).

    Both work like the flags of sacreBLEU. Raises ValueError if no line is left, or if a set lacks this information.
    """
    if origlang is None and subset is None:
        return list(texts)
    from sacrebleu import utils

    chosen = " ".join(f"--{flag} {value}" for flag, value in (("origlang", origlang), ("subset", subset)) if value)
    try:
        filtered: Any = utils.filter_subset
        selected: list[list[str]] = filtered(list(texts), ",".join(names), pair, origlang, subset)
    except Exception as error:  # sacreBLEU raises Exception, KeyError and errors of its readers
        raise ValueError(f"sacreBLEU cannot select {chosen} of {','.join(names)} {pair}: {error}") from None
    if not selected[0]:
        raise ValueError(f"no line of {','.join(names)} {pair} has {chosen}")
    return selected


def _lines(path: Path) -> list[str]:
    return [line.rstrip() for lines in line_windows(path, 1 << 14) for line in lines]  # like sacreBLEU


def _files(name: str, pair: str, client: HttpClient) -> Any:
    """Returns sacreBLEU's object of a set. First makes the text files of the set if they are missing.

    Several processes, such as both processes of `nmtkit generate … | nmtkit score …`, wait for each other.
    """
    dataset = known_sets()[name]
    with _lock_of(Path(dataset._rawdir)):
        try:
            _make_files(dataset, pair, client)
        except OSError as error:
            if reason := disk_full(error):
                raise OSError(f"cannot write to {dataset._outdir}: {reason}") from error
            raise
    return dataset


@contextmanager
def _lock_of(folder: Path) -> Iterator[None]:
    """A context with an exclusive lock on a folder. A folder that this user cannot write needs no lock."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file: IO[str] | None = (folder / ".nmtkit.lock").open("a")
    except OSError:
        file = None
    with file or nullcontext():
        if file is not None:
            lock(file, wait=True)
        yield


def _make_files(dataset: Any, pair: str, client: HttpClient) -> None:
    if not _has_texts(dataset, pair):
        for url, md5 in zip(dataset.data, dataset.md5 or [None] * len(dataset.data), strict=True):
            _add_archive(dataset, url, md5, client)
    written = list(Path(dataset._outdir).glob("*"))
    try:
        dataset.get_files(pair)
    except Exception as error:  # the readers raise errors of many classes for damaged files
        for path in Path(dataset._outdir).glob(f"*.{pair}.*"):
            if path not in written:
                path.unlink(missing_ok=True)
        if isinstance(error, OSError):
            raise
        raise ValueError(f"sacreBLEU cannot read the test set {dataset.name} {pair}: {error}") from error


def _archive(dataset: Any, url: str) -> Path:
    return Path(dataset._rawdir) / dataset._get_tarball_filename(url)


def _has_texts(dataset: Any, pair: str) -> bool:
    """Returns whether the text files exist.

    For a set in XML, checks the archives and the source text only: sacreBLEU finds the names of the other text files in
    the archives.
    """
    from sacrebleu.dataset import wmt_xml

    in_xml: Any = wmt_xml.WMTXMLDataset
    if isinstance(dataset, in_xml):
        if not all(_archive(dataset, url).is_file() for url in dataset.data):
            return False
        return os.path.exists(dataset._get_txt_file_path(pair, "src"))
    return all(os.path.exists(dataset._get_txt_file_path(pair, field)) for field in dataset.fieldnames(pair))


def _add_archive(dataset: Any, url: str, md5: str | None, client: HttpClient) -> None:
    """Downloads and unpacks an archive, unless it is there with the right checksum.

    sacreBLEU assumes that an existing archive is unpacked, so the archive gets its name only after it is unpacked.
    """
    archive = _archive(dataset, url)
    if archive.is_file():
        with archive.open("rb") as file:
            if md5 is None or hashlib.file_digest(file, "md5").hexdigest() == md5:
                return
        log.warning("%s is damaged, so it is downloaded again", archive)
    fresh = archive.with_name(f"new.{archive.name}")
    client.download(url, fresh, title=dataset.name, md5=md5)
    try:
        with tempfile.TemporaryDirectory(prefix="new.", dir=archive.parent) as folder:
            _unpack(fresh, Path(folder))
            shutil.copytree(folder, archive.parent, copy_function=os.replace, dirs_exist_ok=True)
        os.replace(fresh, archive)
    except (tarfile.TarError, zipfile.BadZipFile, zlib.error, EOFError) as error:
        raise ValueError(f"{url} is not the archive of {dataset.name}: {error}") from None
    finally:
        fresh.unlink(missing_ok=True)


def _unpack(archive: Path, folder: Path) -> None:
    if archive.name.endswith((".tar.gz", ".tgz")):
        with tarfile.open(archive) as tar:
            # Python 3.11.3 and older have no filter; there, only the checksum of the archive is checked.
            tar.extraction_filter = getattr(tarfile, "data_filter", None)
            tar.extractall(folder)
    elif archive.suffix == ".zip":
        with zipfile.ZipFile(archive) as archived:
            archived.extractall(folder)  # removes .. and leading slashes from paths
