"""Facts about a run: command, data, settings and versions."""

import dataclasses
import hashlib
import platform
import shlex
import shutil
import subprocess
import sys
from collections.abc import Container, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

import nmtkit
from nmtkit.config.files import sha256_of, write_atomically
from nmtkit.config.plugins import source_digests
from nmtkit.data import checkpoint_file
from nmtkit.data.dataset.binarized import Dataset
from nmtkit.data.dataset.dataset_files import MANIFEST
from nmtkit.models import building, checkpoint
from nmtkit.training.config import JobConfig
from nmtkit.training.plan import RunPlan, trained_directions

# turns off the flags that a user gives for a single resume
RESETS: dict[str, Any] = {"reset_optimizer": False, "reset_lr_scheduler": False}
BASE_FACTS = ("base_origin", "base_directions")  # facts about the base of fine-tuning


def input_fingerprints(job: JobConfig, accesses: Container[str] = ("read", "start")) -> dict[str, str]:
    """Returns, for each setting that names files, 12 hexadecimal digits that identify the contents of these files.

    `accesses` selects the settings: "read" for files that the run reads at each start, "start" for files that the run
    reads only at its first start. A model is identified by its weights, and a folder by its manifest. Settings with
    missing files are left out.
    """
    found = {}
    for config in (job.run, *(component.config for component in job.components.values())):
        for field in dataclasses.fields(config):
            value = getattr(config, field.name)
            if field.metadata.get("access") in accesses and value:
                paths = value if isinstance(value, tuple) else (value,)
                files = [path / MANIFEST if path.is_dir() else path for path in paths]
                if all(file.is_file() for file in files):
                    found[field.name] = _digits(files, models=field.metadata["checkpoint"])
    return found


def _digits(files: Sequence[Path], models: bool) -> str:
    """Returns 12 hexadecimal digits that identify the contents of files, or the models of checkpoints."""
    if not models:
        return sha256_of(*files)[:12]
    fingerprints = [checkpoint_file.fingerprint(checkpoint.load(file, mmap=True)) for file in files]
    return hashlib.sha256(repr(fingerprints).encode()).hexdigest()[:12]


def run_facts(plan: RunPlan, data: Path, dataset: Dataset, before: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Returns the command, data, settings, versions and device of a run, in plain types.

    `before` has the facts of the checkpoint from which the run resumes. Files that only the first start reads, such as
    the base of fine-tuning, may be missing, so the facts about these files are copied from `before`.
    """
    if before is None:
        base, inputs = _base_facts(plan.job.run.finetune_from), input_fingerprints(plan.job)
    else:
        base = {name: before[name] for name in BASE_FACTS if name in before}
        inputs = before.get("inputs", {}) | input_fingerprints(plan.job, ("read",))
    gpu = torch.cuda.get_device_name(plan.device) if plan.device.type == "cuda" else None
    return {
        "command": _command(),
        "data": str(data.absolute()),
        "dataset": dataset.fingerprint[:12],
        **_languages(plan, dataset),
        **base,
        **({"inputs": inputs} if inputs else {}),
        "nmtkit": nmtkit.__version__ + (f" at commit {commit}" if (commit := _commit()) else ""),
        # converted, because __version__ is an instance of a subclass of str, which checkpoints reject
        "torch": str(torch.__version__),
        "python": platform.python_version(),
        "device": gpu or f"{plan.device.type} of {platform.node()}",
        "precision": plan.precision,
        "processes": plan.world_size,
        "plugin_sources": source_digests(plan.job.plugins),
        "settings": plan.job.tables(),
    }


def config_text(heading: str, facts: Mapping[str, Any], toml: str) -> str:
    """Returns the text of a config file: a heading and the facts of a run as comments, then the config."""
    comments = [f"# {name}: {value}" for name, value in facts.items() if name not in ("settings", "data")]
    return "\n".join([f"# {heading}", *comments, "", toml])


def write_config(job: JobConfig, facts: Mapping[str, Any]) -> None:
    """Writes config.toml into the folder of the run. Raises OSError if writing fails.

    In the file, --reset-optimizer and --reset-lr-scheduler are turned off: a user resets the state once, and a later
    resume with this file must not reset the state again.
    """
    folder = job.run.save_dir
    job = replace(job, run=replace(job.run, **RESETS))
    text = config_text("To start or resume this run: nmtkit train --config FILE", facts, job.toml(folder))
    write_atomically(folder / "config.toml", text)


def _languages(plan: RunPlan, dataset: Dataset) -> dict[str, Any]:
    """Returns the languages of a model of one direction, or the trained directions of a model of many directions."""
    if dataset.directions:
        trained = trained_directions(plan.job.run, dataset["train"])
        return {"directions": [[direction.source, direction.target] for direction in trained]}
    names = dataset.source_lang, dataset.target_lang
    codes = dataset.source_language, dataset.target_language
    return {"languages": [code or name for code, name in zip(codes, names, strict=True)]}


def _base_facts(base: Path | None) -> dict[str, Any]:
    """Returns facts about the base of fine-tuning, or nothing for a run from random weights.

    `base_origin` is the origin of an imported base, or of the imported model from which the base was fine-tuned.
    `base_directions` are the directions on which a base with language tokens was trained; empty if they are unknown.
    """
    if base is None:
        return {}
    contents = checkpoint.load(base, mmap=True)
    origin = contents.get("origin") or contents.get("run", {}).get("base_origin")
    facts: dict[str, Any] = {"base_origin": origin} if origin else {}
    if building.tokenizer_of(contents, base).languages:
        facts["base_directions"] = sorted(map(list, building.directions_of(contents)))
    return facts


def _command() -> str:
    """Returns the command line that started this process, or the script that called `nmtkit.train`."""
    program = Path(sys.argv[0])
    # the second condition is true for `python -m nmtkit`
    is_command = program.name == "nmtkit" or program.parent == Path(nmtkit.__file__).parent
    return shlex.join(["nmtkit", *sys.argv[1:]] if is_command else ["python", *sys.argv])


def _commit() -> str | None:
    """Returns the git commit of the source tree of nmtkit, or None if nmtkit is not in a source tree."""
    root = Path(nmtkit.__file__).parent.parent
    if not (root / ".git").exists() or shutil.which("git") is None:
        return None
    result = subprocess.run(["git", "-C", root, "describe", "--always", "--dirty"], capture_output=True, text=True)
    return result.stdout.strip() or None
