"""What a checkpoint or a dataset is, in plain types: for people and for scripts.

Reading a checkpoint this way builds no model and loads no plug-in, so that it works where the architecture is unknown.
"""

import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from nmtkit import checkpoint
from nmtkit.data.binarized import Dataset
from nmtkit.data.tokenizer import Tokenizer
from nmtkit.registry import plain
from nmtkit.training.config import RunConfig

Section = dict[str, Any]


@dataclass
class Description:
    """`sections` map a title to facts by name; `commands` are what to type next, each under what it does."""

    kind: str  # checkpoint or dataset
    path: Path
    sections: dict[str, Section] = field(default_factory=dict)
    commands: dict[str, str] = field(default_factory=dict)


def inspect(path: Path) -> Description:
    """Raises FileNotFoundError, or ValueError for what is neither a checkpoint nor a dataset, or is damaged."""
    if not path.exists():
        raise FileNotFoundError(f"{path}: no such file or folder")
    return of_dataset(path) if path.is_dir() else of_checkpoint(path)


# --- checkpoints ----------------------------------------------------------------------------------------------------


def of_checkpoint(path: Path) -> Description:
    contents = checkpoint.load(path, mmap=True)
    tokenizer = Tokenizer.from_state(contents["tokenizer"])
    training = contents.get("training")
    sections: dict[str, Section] = {
        "Checkpoint": {
            "architecture": contents["architecture"],
            "updates": contents["update"],
            "bytes": path.stat().st_size,
            "training state": "kept: training can go on from here" if training else "none: for translating only",
        },
        "Parameters": parameters(contents["model"]),
        "Vocabulary": vocabulary(tokenizer),
        "Config": dict(contents["config"]),
    }
    if contents["plugins"]:
        sections["Checkpoint"]["plug-ins"] = list(contents["plugins"])
    if contents.get("averaged"):
        sections["Checkpoint"]["averaged from"] = list(contents["averaged"])
    for name, value in contents.get("scores", {}).items():
        sections["Checkpoint"][f"validation {name}"] = value
    if training:
        sections |= of_run(training)
    return Description("checkpoint", path, sections, commands(path, contents))


def parameters(model: Mapping[str, Any]) -> Section:
    """Numbers in each part of the model, a shared matrix counted where it first appears; then all of them."""
    parts: dict[str, int] = {}
    layers: dict[str, set[str]] = {}
    seen: dict[tuple[int, int], str] = {}
    for name, tensor in model.items():
        part, _, rest = name.partition(".")
        place = (tensor.untyped_storage().data_ptr(), tensor.storage_offset())
        parts.setdefault(part, 0)
        if seen.setdefault(place, name) == name:
            parts[part] += tensor.numel()
        number = rest.partition(".")[0]
        if number.isdigit():
            layers.setdefault(part, set()).add(number)
    named = {
        part + (f" ({len(layers[part])} layers)" if part in layers else ""): count or "shared with a part above"
        for part, count in parts.items()
    }
    return {**named, "all": sum(parts.values())}


def vocabulary(tokenizer: Tokenizer) -> Section:
    sizes: Section = (
        {"joint": tokenizer.source_size}
        if tokenizer.joint
        else {"source": tokenizer.source_size, "target": tokenizer.target_size}
    )
    return {**sizes, "fingerprint": tokenizer.fingerprint}


def of_run(training: Mapping[str, Any]) -> dict[str, Section]:
    """How the run was set up: its data and components, and those of its own settings that are not the default."""
    tables = training["run"]
    default = plain(RunConfig())
    run = {name: value for name, value in tables["run"].items() if name not in default or value != default[name]}
    sections: dict[str, Section] = {"Run (where it differs from the defaults)": {"data": training["data"], **run}}
    for table in ("criterion", "optimizer", "lr-scheduler"):
        sections[table.capitalize()] = dict(tables[table])
    return sections


def commands(path: Path, contents: checkpoint.Checkpoint) -> dict[str, str]:
    plugins = [word for plugin in contents["plugins"] for word in ("--plugin", plugin)]
    result = {"translate": shlex.join(["nmtkit", "generate", "--path", str(path), *plugins]) + " < source.txt"}
    training = contents.get("training")
    if training:
        config = Path(training["run"]["run"]["save_dir"]) / "config.toml"
        result["resume"] = shlex.join(["nmtkit", "train", training["data"], "--config", str(config)])
    return result


# --- datasets -------------------------------------------------------------------------------------------------------


def of_dataset(path: Path) -> Description:
    dataset = Dataset.open(path)
    manifest = dataset.manifest
    sections: dict[str, Section] = {
        "Dataset": {"source": dataset.source_lang, "target": dataset.target_lang},
        "Vocabulary": vocabulary(dataset.tokenizer),
    }
    for name, split in dataset.splits.items():
        sections[f"Subset {name}"] = {
            "pairs": len(split),
            "source tokens": int(split.source.lengths.sum()),
            "target tokens": int(split.target.lengths.sum()),
            "longest sentence": max(int(side.lengths.max(initial=0)) for side in (split.source, split.target)),
        }
    for index, corpus in enumerate(manifest.get("report", {}).get("corpora", []), start=1):
        sections[f"Corpus {index}"] = {
            "files": f"{corpus['source']}, {corpus['target']}",
            "pairs read": corpus["read"],
            "pairs written": corpus["written"],
            **{f"dropped: {reason}": count for reason, count in corpus["dropped"].items()},
        }
    if manifest.get("options"):
        sections["Made with"] = dict(manifest["options"])
    use = {"train": f"nmtkit train {shlex.quote(str(path))} --arch transformer_base --save-dir checkpoints"}
    tested = [name for name in dataset.splits if name.startswith("test")]
    if tested:
        use["translate a subset"] = (
            f"nmtkit generate {shlex.quote(str(path))} --gen-subset {tested[0]} --path checkpoints/best.pt"
        )
    return Description("dataset", path, sections, use)
