"""The folder of a run: writes and removes checkpoints, and finds the checkpoint to resume from."""

import contextlib
import logging
import math
import os
import platform
import re
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

from nmtkit.config.files import sync_folder
from nmtkit.data import checkpoint_file
from nmtkit.jobs import distributed
from nmtkit.jobs.folder_lock import FolderLock
from nmtkit.training.metrics import Objective, conditions_of

log = logging.getLogger("nmtkit")

NUMBERED = re.compile(r"update_(\d{8,})\.pt")
VISIBLE_SECONDS = 5.0  # a new file must be visible on all machines within this time
RESUMABLE = 2  # number of checkpoints that keep their training state, so that a run can resume if the newest is damaged


def file_name(update: int) -> str:
    """Returns the name of the checkpoint that a run writes after update number `update`."""
    return f"update_{update:08d}.pt"


def numbered(folder: Path) -> list[Path]:
    """Returns the checkpoints of a run, oldest first, or an empty list if the folder does not exist."""
    paths = folder.iterdir() if folder.is_dir() else ()
    by_update = [(int(match[1]), path) for path in paths if (match := NUMBERED.fullmatch(path.name))]
    return [path for _, path in sorted(by_update)]


@dataclass(eq=False)
class CheckpointManager:
    """Writes checkpoints into `folder`. Removes checkpoints that are neither among the last nor among the best.

    `keep_last` counts only the checkpoints that were saved at the intervals of the run, if there are any. The newest
    `RESUMABLE` checkpoints are always kept.
    """

    folder: Path
    keep_last: int | None
    keep_best: int
    objective: Objective
    objectives: dict[str, float] = field(default_factory=dict)  # file name -> validation score, lower is better
    scheduled: set[str] = field(default_factory=set)  # names of the files that were saved at the intervals of the run
    locked: FolderLock | None = None

    def open(self) -> None:
        """Prepares the folder of a run: locks it, removes incomplete files, and reads scores of intact checkpoints.

        Does nothing if the folder does not exist. Raises ValueError if the folder contains files, but no run.
        """
        if not self.folder.is_dir():
            return
        contents = [path for path in self.folder.iterdir() if not path.name.startswith(".")]
        run_files = ("config.toml", "log.jsonl")
        if contents and not any(NUMBERED.fullmatch(path.name) or path.name in run_files for path in contents):
            raise ValueError(f"--save-dir {self.folder} holds something other than a run; give an empty or new folder")
        self.lock()
        for path in self.folder.glob(".*.tmp"):
            path.unlink(missing_ok=True)
        for path in numbered(self.folder):
            with contextlib.suppress(ValueError, OSError):  # the file is damaged; `newest` warns about it
                self._note(path, checkpoint_file.read(path, mmap=True))
        # Only the checksums of the best checkpoints are verified, which saves time: the other scores have no effect.
        while damaged := next((name for name in self._best() if not is_intact(self.folder / name)), None):
            del self.objectives[damaged]

    def lock(self) -> None:
        """Locks the folder for this process. Raises ValueError if another process has locked the folder."""
        if self.locked is None:
            lock = FolderLock(self.folder)
            lock.acquire()
            self.locked = lock

    def unlock(self) -> None:
        if self.locked:
            self.locked.release()
            self.locked = None

    def _note(self, path: Path, contents: checkpoint_file.Checkpoint) -> None:
        scores, name = contents.get("scores", {}), self.objective.name
        settings = contents.get("run", {}).get("settings", {})
        comparable = name in scores and conditions_of(name, settings) == self.objective.conditions
        if comparable and math.isfinite(scores[name]):
            self.objectives[path.name] = self.objective.value(scores)
        if contents.get("scheduled"):
            self.scheduled.add(path.name)

    def check_shared(self) -> None:
        """Raises ValueError if the processes see different folders. Creates the folder if there are several processes.

        Rank 0 writes a file, which the other ranks must find.
        """
        if distributed.world_size() == 1:
            return
        token = None
        if distributed.is_rank_zero():
            self.folder.mkdir(parents=True, exist_ok=True)
            handle, token = tempfile.mkstemp(prefix=".shared.", suffix=".tmp", dir=self.folder)
            os.close(handle)
        name = Path(distributed.broadcast(token)).name
        end = time.monotonic() + VISIBLE_SECONDS
        while not (visible := (self.folder / name).exists()) and time.monotonic() < end:
            time.sleep(0.1)
            distributed.heartbeat()
        owner = f"{self.folder.absolute()} on {platform.node()}"
        folders = distributed.all_gather_object((visible, owner))
        if distributed.is_rank_zero():
            (self.folder / name).unlink(missing_ok=True)
        for rank, (has_seen, folder) in enumerate(folders):
            if not has_seen:
                raise ValueError(
                    f"--save-dir {folder} of process {rank} is not the folder of process 0, {folders[0][1]}; give a "
                    "folder that all machines share"
                )

    def newest(self) -> tuple[Path, checkpoint_file.Checkpoint] | None:
        """Returns the newest checkpoint from which a run can resume, or None if there are no checkpoints.

        Skips damaged files with a warning. Raises ValueError if there are checkpoints, but no run can resume from them.
        """
        paths = numbered(self.folder)
        for path in reversed(paths):
            try:
                contents = checkpoint_file.read(path)
            except (ValueError, OSError) as error:
                log.warning("%s; trying the previous checkpoint", error)
                continue
            if "training" in contents:
                return path, contents
        if paths:
            raise ValueError(
                f"no checkpoint in {self.folder} can be resumed; give a different --save-dir; to start from the "
                "weights of a checkpoint, add --finetune-from"
            )
        return None

    def resume_point(self) -> tuple[Path, checkpoint_file.Checkpoint] | None:
        """Opens the folder on rank 0 and returns the `newest` checkpoint of rank 0 on every rank."""
        newest = None
        if distributed.is_rank_zero():
            self.open()
            newest = self.newest()
        path = distributed.broadcast(newest[0] if newest else None)
        return newest if path is None or newest else (path, checkpoint_file.read(path))

    def is_best(self, value: float) -> bool:
        """Returns whether a checkpoint with this objective value would be one of the best. Lower is better.

        A value that is not finite is never one of the best.
        """
        best = self._best()
        better = len(best) < self.keep_best or any(value < self.objectives[name] for name in best)
        return better and math.isfinite(value)

    def _best(self) -> list[str]:
        """Returns the names of the best checkpoints, best first. Among equal checkpoints, the oldest is first."""
        return sorted(self.objectives, key=lambda name: (self.objectives[name], name))[: self.keep_best]

    def save(self, contents: checkpoint_file.Checkpoint) -> Path:
        """Writes `update_N.pt`, updates `last.pt` and `best.pt`, and removes old checkpoints. Raises OSError."""
        path = self.folder / file_name(contents["update"])
        checkpoint_file.save(path, contents)
        self._note(path, contents)
        replace_link(self.folder / "last.pt", path.name)
        best = self._best()
        if best:
            replace_link(self.folder / "best.pt", best[0])
        self._prune(best)
        return path

    def _prune(self, best: list[str]) -> None:
        paths = numbered(self.folder)
        counted = [path for path in paths if path.name in self.scheduled] or paths
        last = paths if self.keep_last is None else counted[-self.keep_last :]
        for path in paths[:-RESUMABLE]:
            if path in last or path.name in best:
                drop_training_state(path)
            else:
                path.unlink()
                self.objectives.pop(path.name, None)


def is_intact(path: Path) -> bool:
    """Returns whether the checksum of a checkpoint is correct. Otherwise, logs a warning."""
    try:
        checkpoint_file.check_values(checkpoint_file.read(path, mmap=True), path)
    except (ValueError, OSError) as error:
        log.warning("%s; its validation score does not count", error)
        return False
    return True


def drop_training_state(path: Path) -> None:
    """Removes the training state from a checkpoint file, if the file has any. Does not change a damaged file."""
    try:
        contents = checkpoint_file.read(path, mmap=True)
        if "training" in contents:
            checkpoint_file.check_values(contents, path)  # without this check, the new checksum would hide damage
            del contents["training"]
            checkpoint_file.save(path, contents)
    except ValueError as error:
        log.warning("%s", error)


def replace_link(path: Path, target: str) -> None:
    """Makes `path` a symbolic link to `target`. At every moment, either the old or the new link exists.

    On file systems without symbolic links, `path` becomes a hard link.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    temporary.unlink(missing_ok=True)
    try:
        temporary.symlink_to(target)
    except (OSError, NotImplementedError):
        os.link(path.with_name(target), temporary)
    os.replace(temporary, path)
    sync_folder(path.parent)
