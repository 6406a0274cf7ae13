"""Opens models of the Hugging Face Hub by name: downloads the files, and keeps an imported checkpoint in the cache.

`hf:ORG/NAME` is the main branch of a repository, and `hf:ORG/NAME@REVISION` is a branch, a tag or a commit. A
repository holds a checkpoint of nmtkit (model.pt, or another single .pt file), a safetensors folder of nmtkit, or a
model that `nmtkit import` reads. Only files at the top of the repository are considered.
"""

import glob
import logging
import os
import re
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from nmtkit.config.files import HUB_PREFIX, explained, new_folder, user_cache
from nmtkit.data import checkpoint_file, hub
from nmtkit.data.checkpoint_file import Checkpoint
from nmtkit.data.hub import COMMIT, HubUnreachableError, Listing
from nmtkit.jobs import progress
from nmtkit.models import model_cache
from nmtkit.models.formats import detect, huggingface, safetensors
from nmtkit.models.formats.reading import ModelSettings, read_json

MAIN = "main"
# the weights of transformers, the preferred format first
WEIGHTS = (
    re.compile(r"model(-\d+-of-\d+)?\.safetensors(\.index\.json)?"),
    re.compile(r"pytorch_model(-\d+-of-\d+)?\.bin(\.index\.json)?"),
)
TOKENIZER_FILES = (".spm", ".model", ".vocab", ".txt", ".yml")

log = logging.getLogger("nmtkit")
# (folder of the cache, name) -> checkpoint; a process always uses the same commit for a name
_opened: dict[tuple[Path, str], Path] = {}


def checkpoint(name: str) -> Path:
    """Returns the checkpoint of `hf:ORG/NAME` or `hf:ORG/NAME@REVISION`, which is downloaded at its first use.

    Without a network, a cached commit is used. Raises the errors of `hub.download`, ValueError for a repository without
    a known model, and OSError if the disk is full. An error leaves the cache unchanged.
    """
    key = user_cache(), name
    if key not in _opened or not _opened[key].is_file():
        _opened[key] = _checkpoint(name)
    return _opened[key]


def _checkpoint(name: str) -> Path:
    repository, at, revision = name.removeprefix(HUB_PREFIX).partition("@")
    hub.check_name(repository)
    if at and not revision:
        raise ValueError(f"{name} ends with @; give a branch, a tag or a commit, or leave out @")
    folder = model_cache.folder_of(repository)
    files, commit = None, revision if COMMIT.fullmatch(revision) else None
    if commit is None:
        try:
            files = hub.listing(repository, kind="model", revision=revision or None)
            commit = files.commit
        except (HubUnreachableError, ImportError) as error:
            commit = model_cache.revisions_of(folder).get(revision or MAIN)
            if commit is None or not model_cache.checkpoint_path(repository, commit).is_file():
                raise
            log.warning("%s; the cached commit %s is used", error, commit[:12])
    path = model_cache.checkpoint_path(repository, commit)
    if not path.is_file():
        files = files or hub.listing(repository, kind="model", revision=commit)
        with progress.pause_for(f"Downloading {name}"), model_cache.locked(folder, name):
            if not path.is_file():
                _import(name, repository, revision or MAIN, files, path)
    if files is not None and revision != commit:
        model_cache.note_revision(folder, revision or MAIN, commit)
    with suppress(OSError):  # the cache may be read-only
        os.utime(path.parent)  # `nmtkit cache` shows the time of the last use
    log.info("%s is commit %s, in %s", name, commit[:12], path)
    return path


def _import(name: str, repository: str, revision: str, files: Listing, path: Path) -> None:
    """Writes the checkpoint of a commit to `path`, with facts about its origin, completely or not at all."""
    log.info("%s: downloading commit %s", name, files.commit[:12])
    contents, kind = _contents(name, repository, files)
    origin = {"repository": repository, "revision": revision, "commit": files.commit, "format": kind}
    if files.license is not None:
        origin["license"] = files.license
    contents["origin"] = contents.get("origin", {}) | origin
    try:
        with new_folder(path.parent) as folder:
            checkpoint_file.save(folder / path.name, contents)
    except OSError as error:
        raise OSError(f"{name}: {explained(error)}; set NMTKIT_CACHE to another folder for the cache") from error


def _contents(name: str, repository: str, files: Listing) -> tuple[Checkpoint, str]:
    """Downloads the model of a commit, and returns its checkpoint and the name of its format."""
    top = [file for file in files.hashes if "/" not in file]
    texts = [file for file in top if file.endswith((".json", *TOKENIZER_FILES))]
    texts = [file for file in texts if not any(pattern.fullmatch(file) for pattern in WEIGHTS)]

    def download(chosen: Sequence[str]) -> Path:
        patterns = [glob.escape(file) for file in chosen]
        return hub.download(repository, kind="model", revision=files.commit, patterns=patterns)

    checkpoints = [file for file in top if file.endswith(".pt")]
    has_dictionaries = any(file.startswith("dict.") for file in top)  # then fairseq has written the checkpoint
    try:
        if model_cache.CHECKPOINT in top and not has_dictionaries:
            return checkpoint_file.read(download([model_cache.CHECKPOINT]) / model_cache.CHECKPOINT), "nmtkit"
        if safetensors.CONFIG_FILE in top:
            weights = [file for file in top if file.endswith(".safetensors")]
            return safetensors.load(download([*texts, *weights])), "nmtkit (safetensors)"
        if huggingface.CONFIG_FILE in top:
            # config.json is checked before gigabytes of weights are downloaded
            config = download([huggingface.CONFIG_FILE]) / huggingface.CONFIG_FILE
            kind = ModelSettings(read_json(config), config).one_of("model_type", huggingface.LOADERS)
            weights = next((found for each in WEIGHTS if (found := list(filter(each.fullmatch, top)))), [])
            return detect.load(download([*texts, *weights])), f"transformers ({kind})"
        if len(checkpoints) == 1 and not has_dictionaries:
            return checkpoint_file.read(download(checkpoints) / checkpoints[0]), "nmtkit"
        if len(checkpoints) == 1:
            return detect.load(download([*texts, *checkpoints])), "fairseq"
        if weights := [file for file in top if file.endswith(".npz")]:
            return detect.load(download([*texts, *weights])), "Marian"
    except (ValueError, FileNotFoundError) as error:
        raise error if name in str(error) else ValueError(f"{name}: {error}") from error
    present = ", ".join(sorted(top)[:8]) or "no file"
    raise ValueError(
        f"{name} does not hold a model that nmtkit reads. The top of the repository must contain a model of nmtkit "
        "(model.pt or nmtkit.json), transformers (config.json), Marian (.npz) or fairseq (.pt). It contains "
        f"{present}"
    )
