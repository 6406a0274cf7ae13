"""Decides whether a run may resume from a checkpoint, and describes the settings that the resumed run changes."""

import logging
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from nmtkit.config import setting_text
from nmtkit.config.tables import settings_table
from nmtkit.data.checkpoint_file import Checkpoint
from nmtkit.data.dataset.binarized import Dataset
from nmtkit.data.dataset.dataset_files import counts_language_token
from nmtkit.training.config import JobConfig, Tables, flat_settings, kind_of
from nmtkit.training.lr_schedulers import learning_rate
from nmtkit.training.trainer import Trainer

log = logging.getLogger("nmtkit")

Change = tuple[str, Any, Any]  # name of the setting, value before, value now

# settings that often change when a run is resumed; their changes are not reported
EXPECTED_CHANGES = (
    *("max_update", "max_epoch", "save_dir", "data", "device", "threads", "nproc_per_node", "callbacks"),
    *("reset_optimizer", "reset_lr_scheduler", "stop_time_hours"),
)


def resume_requirements(job: JobConfig, dataset: Dataset, adapters: dict[str, Any] | None) -> dict[str, Any]:
    """Returns, by name, the facts that must not change when a run is resumed."""
    settings = job.tables()["architecture"]
    # These facts are only for datasets of many directions (language pairs). Old checkpoints have one direction and do
    # not contain these facts.
    sampling = {
        "directions": [str(direction) for direction in dataset.directions],
        "sampling temperature": job.run.sampling_temperature,
        "sampling weights": list(job.run.sampling_weights),
    }
    return {
        "architecture": settings.pop("name"),
        **settings,
        "tokenizer": dataset.tokenizer.fingerprint[:12],
        "dataset": dataset.fingerprint[:12],
        "languages": [dataset.source_lang, dataset.target_lang],
        "optimizer": job.components["optimizer"].name,
        "seed": job.run.seed,
        "batch tokens": job.run.batch_tokens,
        **{f"adapters: {name}": (adapters or {}).get(name) for name in ("rank", "alpha", "layers", "fingerprint")},
        "overfit batches": job.run.overfit_batches,
        **(sampling if dataset.directions else {}),
        **({} if counts_language_token(dataset.manifest) else {"loss of language tokens": False}),
    }


def check_resumable(contents: Checkpoint, requirements: Mapping[str, Any], path: Path) -> None:
    """Raises ValueError if the run of a checkpoint had other values of the `requirements` (the dataset, the seed, …).

    The message shows all differences. Also raises ValueError for the training state of an old version of nmtkit, which
    stored the state by position instead of parameter name.
    """
    if "groups" not in contents["training"]["optimizer"]:
        raise ValueError(
            f"{path} holds the training state of an older version of nmtkit, which this version cannot resume; give a "
            f"different --save-dir, and --finetune-from {path} to start from its weights"
        )
    differing = changes(contents["training"]["identity"], requirements)
    if differing:
        resettable = " (or --reset-optimizer)" if [name for name, _, _ in differing] == ["optimizer"] else ""
        raise ValueError(
            f"--save-dir {path.parent} holds a run that cannot continue with these changes:\n{table(differing)}\n"
            f"resume it with its own settings{resettable}; or give a different --save-dir, and --finetune-from {path} "
            "to start from its weights"
        )


def warn_of_changes(
    before: Mapping[str, Any], now: Mapping[str, Any], trainer: Trainer, folder: Path, ended: bool
) -> None:
    """Warns about settings, sources of plug-ins and a learning rate that a resumed run changes.

    `before` and `now` are the facts of the run in the checkpoint and in this process. If the run has `ended`, the
    changed settings and sources have no effect.
    """
    update = trainer.done
    if changed := changed_settings(before["settings"], now["settings"]):
        effect = (
            "is trained to its end, so these settings change nothing" if ended else "continues with different settings"
        )
        log.warning("%s %s:\n%s", folder, effect, table(changed))
    old, new = (facts.get("plugin_sources", {}) for facts in (before, now))
    for plugin in (name for name in new if name in old and old[name] != new[name]):
        effect = "; the run is trained to its end, so the new source changes nothing" if ended else ""
        log.warning("the source of plug-in %s has changed since update %d was saved%s", plugin, update, effect)
    if ended:
        return
    made = update - trainer.schedule_start  # number of updates that have used this schedule
    rate = learning_rate(trainer.scheduler, made) if made else None
    if trainer.lr is not None and rate is not None and not math.isclose(rate, trainer.lr):
        log.warning(
            f"the learning rate jumps: update {update} had {trainer.lr:.3g}, but the schedule of this run gives "
            f"{rate:.3g}"
        )


def changed_settings(before: Tables, now: Tables) -> list[Change]:
    """Returns the settings that a resumed run changes, without `EXPECTED_CHANGES`.

    Settings of callbacks and of added components are left out. For added components, the setting that
    lists the components of the run already shows the change.
    """
    shared = {table: after for table, after in now.items() if table in before and kind_of(table) != "callbacks"}
    changed = changes(flat_settings(before), flat_settings(shared))
    return [change for change in changed if change[0] not in EXPECTED_CHANGES]


def changes(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[Change]:
    """Returns the entries of `now` that are missing or different in `before`."""
    return [(name, before.get(name), value) for name, value in now.items() if before.get(name) != value]


def table(changed: Sequence[Change]) -> str:
    """Returns a text table of three columns with headings."""
    rows = [(name, setting_text(old), setting_text(new)) for name, old, new in changed]
    return settings_table(("setting", "before", "now"), rows)
