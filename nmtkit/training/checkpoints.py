"""The folder of a run: numbered checkpoints, `last.pt` and `best.pt`, which of them stay, and where to resume."""

import logging
import math
import os
import platform
import tempfile
import time
from pathlib import Path
from typing import Any

from nmtkit import checkpoint, distributed
from nmtkit.checkpoint import NUMBERED, badness, file_name, numbered

log = logging.getLogger("nmtkit")

VISIBLE_SECONDS = 5.0  # until a file that one machine makes must be seen by the others
RESUMABLE = 2  # newest checkpoints that keep the training state: should the newest be damaged, there is another


def score_of(path: Path, metric: str) -> float | None:
    """A checkpoint's score at the validation it was written after, lower is better; None without one."""
    scores = checkpoint.load(path, mmap=True).get("scores", {})
    if metric not in scores:
        return None
    return badness(metric, scores[metric])


class CheckpointManager:
    """Writes checkpoints into `folder` and removes what is neither among the last nor among the best."""

    def __init__(self, folder: Path, keep_last: int | None, keep_best: int, metric: str) -> None:
        self.folder = folder
        self.keep_last = keep_last
        self.keep_best = keep_best
        self.metric = metric
        self.badness: dict[str, float] = {}  # file name -> score, lower is better

    def open(self) -> None:
        """Removes half-written files and reads the scores of what is there, if there is a folder yet.

        Raises ValueError for a folder that holds something else than a run.
        """
        if not self.folder.is_dir():
            return
        contents = [path for path in self.folder.iterdir() if not path.name.startswith(".")]
        ours = ("config.toml", "log.jsonl")
        if contents and not any(NUMBERED.fullmatch(path.name) or path.name in ours for path in contents):
            raise ValueError(f"--save-dir {self.folder} holds something else than a run; give an empty or a new folder")
        for path in self.folder.glob(".*.tmp"):
            path.unlink(missing_ok=True)
        for path in numbered(self.folder):
            try:
                score = score_of(path, self.metric)
            except (ValueError, OSError):
                continue  # a damaged one; `newest` says so
            if score is not None:
                self.badness[path.name] = score

    def check_shared(self) -> None:
        """Raises ValueError when not all processes see the same folder: rank 0 leaves a file for the others to find.

        With several processes it makes the folder.
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
        while not (seen := (self.folder / name).exists()) and time.monotonic() < end:
            time.sleep(0.1)
            distributed.heartbeat()
        own = f"{self.folder.absolute()} on {platform.node()}"
        places = distributed.all_gather_object((seen, own))
        if distributed.is_rank_zero():
            (self.folder / name).unlink(missing_ok=True)
        for rank, (found, place) in enumerate(places):
            if not found:
                raise ValueError(
                    f"--save-dir {place} of process {rank} is not the folder that process 0 writes to, {places[0][1]}; "
                    "all processes resume from one folder: give one that all machines share"
                )

    def newest(self) -> tuple[Path, checkpoint.Checkpoint] | None:
        """The newest checkpoint to resume from, None when there is none at all; damaged ones are passed over.

        Raises ValueError when there are checkpoints and none will do.
        """
        paths = numbered(self.folder) if self.folder.is_dir() else []
        for path in reversed(paths):
            try:
                contents = checkpoint.load(path)
            except (ValueError, OSError) as error:
                log.warning("%s; trying the one before it", error)
                continue
            if "training" in contents:
                return path, contents
        if paths:
            raise ValueError(
                f"{self.folder} holds checkpoints, but none that can be resumed; give another --save-dir, "
                "and --finetune-from one of them to start with its weights"
            )
        return None

    def is_best(self, badness: float) -> bool:
        """Whether a checkpoint of this score would be kept for it."""
        return len(self._best()) < self.keep_best or any(badness < self.badness[name] for name in self._best())

    def _best(self) -> list[str]:
        """Names of the best checkpoints, best first; of equals the older one."""
        return sorted(self.badness, key=lambda name: (self.badness[name], name))[: self.keep_best]

    def save(self, contents: checkpoint.Checkpoint) -> Path:
        """Writes `update_N.pt`, moves the links, removes what is not to stay. Raises OSError, a full disk say."""
        path = self.folder / file_name(contents["update"])
        checkpoint.save(path, contents)
        score = contents.get("scores", {}).get(self.metric)
        if score is not None and math.isfinite(score):
            self.badness[path.name] = badness(self.metric, score)
        link(self.folder / "last.pt", path.name)
        best = self._best()
        if best:
            link(self.folder / "best.pt", best[0])
        self._prune(best)
        return path

    def _prune(self, best: list[str]) -> None:
        paths = numbered(self.folder)
        for path in paths[:-RESUMABLE]:
            kept = self.keep_last is None or path in paths[-self.keep_last :] or path.name in best
            if not kept:
                path.unlink()
                self.badness.pop(path.name, None)
            else:
                strip(path)


def strip(path: Path) -> None:
    """Rewrites a checkpoint without its training state, when it has one."""
    try:
        contents = checkpoint.load(path, mmap=True)
    except ValueError:
        return  # damaged: not ours to hide
    if contents.pop("training", None) is not None:
        del contents["nmtkit"]
        checkpoint.save(path, contents)


def link(path: Path, target: str) -> None:
    """Points a relative symbolic link at `target` in its folder; there is a whole one at every moment."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    temporary.unlink(missing_ok=True)
    temporary.symlink_to(target)
    os.replace(temporary, path)
    checkpoint.sync_folder(path.parent)


def same_run(contents: checkpoint.Checkpoint, expected: dict[str, Any], path: Path) -> None:
    """Raises ValueError when a checkpoint is of another run than `expected`, naming the difference.

    Compares by what both have under `training` -> `identity`, such as the dataset or the seed.
    """
    found = contents["training"]["identity"]
    for name, value in expected.items():
        if found.get(name) != value:
            raise ValueError(
                f"{path} was trained with {name} {found.get(name)}, this run has {value}; "
                "resume with the same, or give another --save-dir"
            )
