"""The provenance of a corpus: a JSON file beside the corpus that says where its pairs come from.

`nmtkit fetch` writes the file. `nmtkit clean` and `nmtkit preprocess` copy the facts to their outputs.
"""

import json
import logging
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from nmtkit import __version__
from nmtkit.config.files import parse_json, sha256_of, write_atomically
from nmtkit.data.corpora.compression import is_compressed

FORMAT = 1
SUFFIX = ".provenance.json"

log = logging.getLogger("nmtkit")


def corpus_name(paths: Sequence[Path]) -> str:
    """Returns the name of a corpus as users give it: the file, or the prefix of two files such as data/train."""
    if len(set(paths)) == 1:
        return str(paths[0])
    path = paths[0].with_suffix("") if is_compressed(paths[0]) else paths[0]
    return str(path.with_suffix(""))


def provenance_path(paths: Sequence[Path]) -> Path:
    return Path(corpus_name(paths) + SUFFIX)


def write_provenance(paths: Sequence[Path], facts: Mapping[str, Any]) -> None:
    """Writes a JSON file with the origin of a corpus (`facts`) and the sizes of its files.

    The files `paths` must be complete, because their sizes show later if the facts still belong to them.
    """
    contents = {
        "nmtkit_provenance": FORMAT,
        **facts,
        "nmtkit": __version__,
        "files": [{"name": path.name, "bytes": path.stat().st_size, "sha256": sha256_of(path)} for path in paths],
    }
    write_atomically(provenance_path(paths), json.dumps(contents, indent=1, ensure_ascii=False) + "\n")


def read_provenance(paths: Sequence[Path]) -> dict[str, Any] | None:
    """Returns the facts about a corpus, or None if the file of facts is missing.

    Logs a warning and returns None if the file of facts is damaged, or if its sizes differ from the sizes of `paths`.
    """
    path = provenance_path(paths)
    try:
        facts = parse_json(path.read_bytes())
        known = sorted(int(file["bytes"]) for file in facts["files"])
        sizes = sorted(file.stat().st_size for file in dict.fromkeys(paths))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, LookupError, TypeError):
        log.warning("%s is damaged, so the provenance of %s is left out", path, corpus_name(paths))
        return None
    if facts.get("nmtkit_provenance") != FORMAT or known != sizes:
        log.warning("%s has changed since its provenance was written, so %s is left out", corpus_name(paths), path)
        return None
    return dict(facts)


def provenance_of_all(corpora: Iterable[Sequence[Path]]) -> dict[str, dict[str, Any]]:
    """Returns the facts about several corpora by name. Corpora without facts are left out."""
    facts = {corpus_name(paths): read_provenance(paths) for paths in corpora}
    return {name: each for name, each in facts.items() if each is not None}


def origins(facts: Mapping[str, Any]) -> list[str]:
    """Returns the names of the original corpora, such as "OPUS Books v1". Facts may contain facts of other corpora."""
    if "corpora" in facts:
        return [origin for each in facts["corpora"].values() for origin in origins(each)]
    keys = ("source", "corpus", "repository", "version", "config", "split")
    return [" ".join(str(facts[key]) for key in keys if facts.get(key))]
