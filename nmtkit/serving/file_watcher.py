"""Loads checkpoints, the glossary, the list of models and API keys again when their files change, without a restart."""

import asyncio
import contextlib
import dataclasses
import logging
from collections.abc import Sequence
from pathlib import Path

from nmtkit.jobs import machine_code
from nmtkit.serving.app import Service
from nmtkit.serving.config import ServeJob
from nmtkit.serving.keys import read_api_keys

WATCH_SECONDS = 2.0  # pause between two checks of the files

FileState = tuple[int, int, int] | None  # inode, size and modification time, or None for a missing file

logger = logging.getLogger("nmtkit")


class FileChanges:
    """Notices changes of `files`.

    A change counts only if two checks in a row see the same state and no file is missing. Otherwise, a file may still
    be incomplete.
    """

    def __init__(self, files: Sequence[Path]) -> None:
        self.files = files
        self.loaded = self.before = {file: state_of(file) for file in files}

    def check(self, requested: bool = False) -> bool:
        """Returns True if the files have changed, or if their loading is `requested`.

        If the result is True, the present state of the files counts as loaded.
        """
        now = {file: state_of(file) for file in self.files}
        is_changed = now != self.loaded and now == self.before and None not in now.values()
        self.before = now
        if is_changed or requested:
            self.loaded = now
        return is_changed or requested


class FileWatcher:
    """Loads models and API keys when their files change, and when `reload_requested` is set."""

    def __init__(self, job: ServeJob, service: Service, reload_requested: asyncio.Event) -> None:
        self.job, self.service, self.reload_requested = job, service, reload_requested
        self.list_changes = FileChanges(given(job.config.models))
        self.model_changes = FileChanges(self.model_files)
        self.key_changes = FileChanges(given(job.config.api_keys))
        self.is_compiled = False  # whether the end of the compilation has been noticed

    @property
    def model_files(self) -> list[Path]:
        """The checkpoints and the glossary, which are loaded together."""
        return [*(model.path for model in self.job.all_paths), *given(self.job.text.glossary)]

    async def run(self) -> None:
        """Watches the files. Also starts the compilation of the search, and reloads the models at its end."""
        while True:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self.reload_requested.wait(), WATCH_SECONDS)
            if self.service.pool.models.facts.waits and not self.is_compiled:
                machine_code.background.start()
                self.is_compiled = machine_code.background.is_ready()
                if self.is_compiled:  # request only one reload; if it fails, SIGHUP or a changed file starts the next
                    self.reload_requested.set()
            requested = self.reload_requested.is_set()
            self.reload_requested.clear()
            if self.key_changes.check(requested):
                self.load_keys()
            if self.list_changes.check(requested):
                if not await self.load_list():
                    continue
                requested = True
            if self.model_changes.check(requested):
                logger.info("reloading the models")
                await self.service.pool.reload(self.job)

    def load_keys(self) -> None:
        for path in self.key_changes.files:
            try:
                self.service.door.keys = read_api_keys(path)
            except (OSError, ValueError) as error:
                logger.warning("could not reload the API keys, so the old ones stay: %s", error)

    async def load_list(self) -> bool:
        """Reads the list of models. If the list is wrong, keeps the old models and returns False.

        A thread reads the list, because reading the list may download models from the Hugging Face Hub.
        """
        try:
            self.job = dataclasses.replace(self.job, listed=await asyncio.to_thread(self.job.config.listed_models))
        except (OSError, ValueError, ImportError) as error:
            self.service.pool.failed_reload(error)
            return False
        self.model_changes.files = self.model_files
        return True


def given(path: Path | None) -> list[Path]:
    return [] if path is None else [path]


def state_of(file: Path) -> FileState:
    with contextlib.suppress(OSError):
        status = file.stat()
        return status.st_ino, status.st_size, status.st_mtime_ns
    return None
