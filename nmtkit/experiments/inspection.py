"""Describes a checkpoint or a dataset in plain types.

The module loads no plug-ins, so it also works for architectures that are not installed.
"""

import dataclasses
import shlex
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

from nmtkit.config import derive, to_dict, to_toml
from nmtkit.config.files import HUB_PREFIX, checkpoint_of, portable_name
from nmtkit.config.plugins import plugins_for
from nmtkit.data import checkpoint_file
from nmtkit.data.corpora.provenance import origins
from nmtkit.data.dataset import binarized
from nmtkit.data.dataset.binarized import Dataset
from nmtkit.data.dataset.config import PreprocessConfig
from nmtkit.data.dataset.dataset_files import MANIFEST, read_manifest, shard_folders
from nmtkit.data.dataset.stored_side import StoredSide
from nmtkit.data.tokenizers.tokenizer import Tokenizer
from nmtkit.experiments.comparison import summarize
from nmtkit.experiments.recipes import train_command
from nmtkit.jobs.progress import quantity
from nmtkit.models import checkpoint
from nmtkit.models.architectures import ARCHITECTURES
from nmtkit.models.building import NoInitialisation, reads_source, tokenizer_of, vocabulary_of
from nmtkit.training import averaging
from nmtkit.training.config import REGISTRIES, JobConfig
from nmtkit.training.run import TrainingResult
from nmtkit.training.run_config import RunConfig
from nmtkit.training.run_facts import RESETS, config_text
from nmtkit.training.run_log import shown_scores
from nmtkit.translation.engines import Decoder, LoadedModels
from nmtkit.translation.search.options import SearchOptions

Section = dict[str, Any]

COMPONENTS = ("criterion", "optimizer", "lr-scheduler")  # tables of a run that are sections of the description
AVERAGED = 5  # maximum of `average-checkpoints --last` in the suggested command for a run without --keep-last
SHOWN_LANGUAGES = 6  # languages or directions that the summary names


@dataclass
class Description:
    """A description of a checkpoint or dataset.

    `summary` has the most important facts, `sections` has all facts by title, `commands` has shell commands by purpose,
    `verified` has results of `--verify`. `defaults` has the default settings of some sections.
    """

    kind: str  # checkpoint or dataset
    path: Path
    summary: Section
    sections: dict[str, Section] = field(default_factory=dict)
    commands: dict[str, str] = field(default_factory=dict)
    verified: list[str] = field(default_factory=list)
    defaults: dict[str, Section] = field(default_factory=dict)

    def changed(self, title: str) -> Section:
        """Returns the facts of a section, without settings that equal their defaults."""
        usual, missing = self.defaults.get(title, {}), object()
        return {name: value for name, value in self.sections[title].items() if usual.get(name, missing) != value}


def inspect(path: Path, verify: bool = False) -> Description:
    """Describes a checkpoint or a dataset, and recomputes its checksums if `verify` is true.

    If `path` is the folder of a run, describes the best checkpoint and begins with the state of the run. Raises
    OSError, or ValueError for damaged or unknown files.
    """
    folder, path = path, checkpoint_of(path)
    described = of_dataset(path) if path.is_dir() else of_checkpoint(path)
    if folder != path and (folder / "log.jsonl").is_file():
        run = summarize(folder)
        state = f"{run.state}: {run.reason}" if run.reason else run.state
        described.summary = {"run": state, **described.summary}
    if verify and path.is_dir():
        described.verified = binarized.verify(path)
    elif verify:
        checkpoint.load(path)
        described.verified = ["checksum is correct: weights, tokenizer and settings are as saved"]
        described.verified.append("all weights are finite")
    return described


# --- checkpoints ----------------------------------------------------------------------------------------------------


def of_checkpoint(path: Path) -> Description:
    contents = checkpoint_file.read(path, mmap=True)
    tokenizer = tokenizer_of(contents, path)
    training = contents.get("training")
    shortlist = contents.get("shortlist")
    facts = {
        "architecture": contents["architecture"],
        "updates": contents["update"],
        "bytes": path.stat().st_size,
        "training state": "kept: training can continue" if training else "none: only for translation",
        "plug-ins": list(contents["plugins"]),
        "weights": "8 bits, with a scale for each row" if "scales" in contents else None,
        "averaged from": list(contents.get("averaged") or ()),
        "shortlist": f"{len(shortlist['targets']):,} entries, for --shortlist" if shortlist else None,
    }
    facts = {name: value for name, value in facts.items() if value not in (None, [])}
    facts |= {f"adapters: {name}": value for name, value in contents.get("adapters", {}).items()}
    facts |= {f"validation {name}": value for name, value in contents.get("scores", {}).items()}
    sections: dict[str, Section] = {"Checkpoint": facts, "Parameters": parameters(contents["model"])}
    sections |= {"Vocabulary": vocabulary(tokenizer), "Config": dict(contents["config"])}
    if "origin" in contents:
        sections["Imported from"] = dict(contents["origin"])
    if "run" in contents:
        sections |= of_run(contents["run"])
    summary = summary_of(path, contents, tokenizer, sections["Parameters"]["all"])
    use = commands(path, contents, tokenizer)
    return Description("checkpoint", path, summary, sections, use, defaults=default_settings(contents))


def summary_of(path: Path, contents: checkpoint_file.Checkpoint, tokenizer: Tokenizer, parameters: int) -> Section:
    """Returns the most important facts about a checkpoint, as text."""
    origin, averaged, adapters = (contents.get(name, {}) for name in ("origin", "averaged", "adapters"))
    scores = {name: value for name, value in contents.get("scores", {}).items() if isinstance(value, float)}
    update = f"{contents['update']:,}"
    hub = "{repository}@{revision}, commit {commit:.12}"
    has_engine = reads_source(contents) and contents["architecture"] in ARCHITECTURES
    summary = {
        "languages": language_pairs(origin | contents.get("run", {}), tokenizer),
        "parameters": f"{parameters:,} ({contents['architecture']})",
        "average of": averaged and f"{quantity(len(averaged), 'checkpoints')}, the last at update {update}",
        "update": None if averaged else update,
        "validation": ", ".join(shown_scores(scores)),
        "from": HUB_PREFIX + hub.format(**origin) if "repository" in origin else None,
        "weights": "8 bits" if "scales" in contents else None,
        "adapters": adapters and f"rank {adapters['rank']}, for {adapters['base']}",
        "plug-ins": ", ".join(contents["plugins"]),
        "engine on a CPU": engine_on_cpu(contents, tokenizer, path) if has_engine else None,
        "saved": modified(path),
        "size": megabytes(path) + (", with the training state" if contents.get("training") else ""),
    }
    return {name: text for name, text in summary.items() if text}


def modified(path: Path) -> str:
    return f"{datetime.fromtimestamp(path.stat().st_mtime):%Y-%m-%d %H:%M}"


def megabytes(*paths: Path) -> str:
    return f"{sum(path.stat().st_size for path in paths) / 1e6:,.1f} MB"


def language_pairs(run: Mapping[str, Any], tokenizer: Tokenizer) -> str:
    """Returns the languages of a model as text, such as "en-de": the trained directions, or the known languages."""
    directions = run.get("directions") or ([run["languages"]] if run.get("languages") else [])
    names = ["-".join(map(str, pair)) for pair in directions] or sorted(tokenizer.languages)
    more = f" and {len(names) - SHOWN_LANGUAGES} more" if len(names) > SHOWN_LANGUAGES else ""
    return ", ".join(names[:SHOWN_LANGUAGES]) + more or "unknown"


def default_settings(contents: checkpoint_file.Checkpoint) -> dict[str, Section]:
    """Returns the default settings by section, for the components of a checkpoint that are registered."""
    tables = contents.get("run", {}).get("settings", {})
    components = [("Config", ARCHITECTURES, contents["architecture"])]
    components += [
        (table.capitalize(), REGISTRIES[table], tables[table]["name"]) for table in COMPONENTS if table in tables
    ]
    return {title: to_dict(registry[name].preset) for title, registry, name in components if name in registry}


def engine_on_cpu(contents: checkpoint_file.Checkpoint, tokenizer: Tokenizer, path: Path) -> str:
    """Returns the engine that `--engine auto` chooses for a model in fp32. If PyTorch is chosen, adds the reason."""
    entry = ARCHITECTURES[contents["architecture"]]
    try:
        with NoInitialisation():
            model = entry.factory(derive(entry.preset, contents["config"], str(path)), vocabulary_of(tokenizer))
    except (ValueError, RuntimeError) as error:
        return f"torch ({error})"
    decoder = Decoder(LoadedModels([model.eval()], tokenizer, "cpu", 1, [path]))
    name = decoder.choice(SearchOptions())
    return name if decoder.engine.is_ready() else f"{name}, after nmtkit precompile"


def parameters(model: Mapping[str, Any]) -> Section:
    """Returns the number of parameters of each part and of the model. A tied weight counts only in its first part."""
    parts = Counter[str]()
    layers: dict[str, set[str]] = {}
    for name, first in checkpoint.tied_to(model).items():
        part, *rest = name.split(".")
        parts[part] += model[name].numel() if name == first else 0
        if rest and rest[0].isdigit():
            layers.setdefault(part, set()).add(rest[0])
    titles = {part: f"{part} ({quantity(len(layers[part]), 'layers')})" if part in layers else part for part in parts}
    named = {titles[part]: count or "shared with a part above" for part, count in parts.items()}
    return {**named, "all": parts.total()}


def vocabulary(tokenizer: Tokenizer) -> Section:
    sizes = {"source": tokenizer.source_size, "target": tokenizer.target_size}
    return {**({"joint": tokenizer.source_size} if tokenizer.joint else sizes), "fingerprint": tokenizer.fingerprint}


def of_run(facts: Mapping[str, Any]) -> dict[str, Section]:
    """Returns facts about a run: data, components, and the settings that differ from the defaults."""
    tables = facts["settings"]
    default = to_dict(RunConfig())
    run = {name: value for name, value in tables["run"].items() if name not in default or value != default[name]}
    made_by = {name: value for name, value in facts.items() if name != "settings"}
    for name in facts.keys() & {"directions", "base_directions"}:
        made_by[name] = ", ".join(map("-".join, facts[name])) or "unknown"
    sections: dict[str, Section] = {"Made by": made_by, "Run (settings that differ from the defaults)": run}
    return sections | {table.capitalize(): dict(tables[table]) for table in COMPONENTS if table in tables}


def commands(path: Path, contents: checkpoint_file.Checkpoint, tokenizer: Tokenizer) -> dict[str, str]:
    """Returns shell commands for a checkpoint. The keys describe their purposes, such as "translate"."""
    name = portable_name(path)  # models of the Hub have the same name on every machine
    plugins = [word for plugin in contents["plugins"] for word in ("--plugin", plugin)]
    first = next(iter(contents.get("run", {}).get("directions") or ()), (None, None))
    trained = contents.get("run", {}).get("languages") or first
    known = [language if language in tokenizer.languages else None for language in trained]
    generate = ["nmtkit", "generate", "--path", name, *tokenizer.language_flags(*known), *plugins]
    result = {"translate": shlex.join(generate) + " < source.txt"}
    if not reads_source(contents):
        score = ["nmtkit", "score", "--path", name, *language_model_flags(tokenizer, known[1]), *plugins]
        result = {"perplexity of a text": shlex.join(score) + " < text.txt"}
    if "adapters" in contents:
        merge = ["nmtkit", "average-checkpoints", name, "--output", str(path.with_name("merged.pt"))]
        result["merge the adapters into the base"] = shlex.join(merge)
    if contents.get("training"):
        config = path.parent / "config.toml"  # the folder may have been moved since the start of the run
        if not config.is_file():
            config = Path(contents["run"]["settings"]["run"]["save_dir"]) / "config.toml"
        result["resume"] = shlex.join(["nmtkit", "train", "--config", str(config)])
    if "run" in contents:
        written = shlex.join(["nmtkit", "inspect", name, "--format", "toml"])
        result["repeat the training"] = f"{written} > again.toml && nmtkit train --config again.toml --save-dir again"
    return result


def config_of(path: Path) -> str:
    """Returns the text of a config file that repeats the run of a checkpoint, which may be an averaged checkpoint.

    The config has no save_dir, because the old save_dir contains the original run. The settings that reset the state
    of a resumed run are off. Raises OSError, or ValueError for a checkpoint without facts about its run.
    """
    path = checkpoint_of(path)
    facts = {} if path.is_dir() else checkpoint_file.read(path, mmap=True).get("run", {})
    if not facts:
        raise ValueError(f"{path} has no facts about its run; --format toml needs a checkpoint of `nmtkit train`")
    tables = {table: dict(settings) for table, settings in facts["settings"].items()}
    folder = tables["run"].pop("save_dir")
    tables["run"] |= RESETS
    return config_text(f"The run of {path}, saved in {folder}.", facts, to_toml(tables))


def language_model_flags(tokenizer: Tokenizer, target: str | None) -> list[str]:
    """Returns the flags that choose the language of a text for a language model."""
    return [] if tokenizer.has_target_languages_only else tokenizer.language_flags(None, target)[2:]


def after_training(job: JobConfig, end: TrainingResult) -> tuple[list[str], list[str]]:
    """Returns the closing lines of a finished run (the report and the reason), and the next commands."""
    folder, data = end.save_dir, job.data
    assert data is not None
    # the folder can contain more than --keep-last checkpoints, because --keep-best keeps older checkpoints
    count = min(len(averaging.scheduled(folder)), job.run.keep_last or AVERAGED)
    model = folder / ("averaged.pt" if count > 1 else "last.pt")
    average = ["nmtkit", "average-checkpoints", str(folder), "--last", str(count), "--output", str(model)]
    needed = plugins_for(ARCHITECTURES[job.components["architecture"].name], job.plugins)
    plugins = [word for plugin in needed for word in ("--plugin", plugin)]
    dataset = Dataset.open(data)
    subset = next((name for name in dataset.splits if name.startswith("test")), job.run.valid_subset[0])
    known = [str(data), "--gen-subset", subset] if subset in dataset.splits else []  # if empty, standard input is read
    codes = {"--source-lang": dataset.source_language, "--target-lang": dataset.target_language}
    languages = [word for flag, code in codes.items() if code is not None for word in (flag, code)]
    if dataset.directions and not known:
        languages = dataset.tokenizer.language_flags(dataset.directions[0].source, dataset.directions[0].target)
    use = generate = ["nmtkit", "generate", *known, "--path", str(model), *languages, *plugins]
    if not job.reads_source:
        target = dataset.directions[0].target if dataset.directions else dataset.target_language
        languages = language_model_flags(dataset.tokenizer, target)
        text = f"text.{target or dataset.target_lang}"
        use = ["nmtkit", "score", "--path", str(model), *languages, *plugins, "--sys", text]
    steps = [shlex.join(step) for step in ([average, use] if count > 1 else [use])]
    if use is generate and not known:
        steps[-1] += " < source.txt"
    report = f"curves and translations: {folder / 'report.html'}"
    return [report, f"training is finished: {end.reason} after update {end.updates:,}"], steps


# --- datasets -------------------------------------------------------------------------------------------------------


def of_dataset(path: Path) -> Description:
    dataset = Dataset.open(path)
    manifests = [read_manifest(shard) for shard in shard_folders(path)]
    sections: dict[str, Section] = {"Dataset": {**languages_of(dataset), "shards": len(manifests)}}
    sections["Vocabulary"] = vocabulary(dataset.tokenizer)
    if dataset.directions:
        counts = {name: split.direction_counts() for name, split in dataset.splits.items()}
        sections["Directions"] = {
            str(direction): ", ".join(f"{name} {of[number]:,}" for name, of in counts.items())
            for number, direction in enumerate(dataset.directions)
        }
    for name, split in dataset.splits.items():
        having = [manifest["splits"][name] for manifest in manifests if name in manifest["splits"]]
        tokens = {f"{side} tokens": sum(facts[side]["tokens"] for facts in having) for side in ("source", "target")}
        longest_sentence = max(longest(split.source), longest(split.target))
        sections[f"Subset {name}"] = {"pairs": len(split), **tokens, "longest sentence": longest_sentence}
    sections |= of_corpora(manifests)
    if provenance := manifests[0].get("provenance"):
        sections["Provenance"] = {name: ", ".join(origins(facts)) for name, facts in provenance.items()}
    settings = manifests[0]["settings"]
    sections["Made with"] = {name: value for name, value in settings.items() if value not in (None, "", [])}
    folder = shlex.quote(str(path))
    use = {"train": train_command(path, len(dataset["train"]) if "train" in dataset.splits else 0)}
    for name in (name for name in dataset.splits if name.startswith("test")):
        use[f"translate {name}"] = f"nmtkit generate {folder} --gen-subset {name} --path checkpoints/best.pt"
    languages = sections["Dataset"].get("languages") or [f"{dataset.source_lang}-{dataset.target_lang}"]
    pieces = [value for name, value in sections["Vocabulary"].items() if name != "fingerprint"]
    manifest = path / MANIFEST if (path / MANIFEST).exists() else shard_folders(path)[0] / MANIFEST
    summary = {
        "languages": ", ".join(languages),
        **{name: f"{len(split):,} pairs" for name, split in dataset.splits.items()},
        "vocabulary": f"{' and '.join(f'{count:,}' for count in pieces)} pieces",
        "made": modified(manifest),
        "size": megabytes(*(file for file in path.rglob("*") if file.is_file())),
    }
    defaults = {"Made with": {field.name: field.default for field in dataclasses.fields(PreprocessConfig)}}
    return Description("dataset", path, summary, sections, use, defaults=defaults)


def languages_of(dataset: Dataset) -> Section:
    """Returns the languages of a dataset: of both sides, or of all directions."""
    if not dataset.directions:
        return {"source": dataset.source_lang, "target": dataset.target_lang}
    return {"languages": sorted({code for each in dataset.directions for code in (each.source, each.target)})}


def longest(side: StoredSide) -> int:
    """Returns the number of tokens of the longest sentence. Reads the lengths in parts, which fit into memory."""
    starts = range(0, len(side.lengths), 1 << 20)
    return max((int(side.lengths[start : start + starts.step].max()) for start in starts), default=0)


def of_corpora(manifests: list[dict[str, Any]]) -> dict[str, Section]:
    """Returns the counts of read, written and dropped pairs of each training corpus, summed over all shards."""
    corpora: dict[str, Counter[str]] = {}
    for manifest in manifests:
        for corpus in manifest["report"]["corpora"]:
            files = ", ".join(dict.fromkeys((corpus["source"], corpus["target"])))
            counts = corpora.setdefault(files, Counter())
            counts.update({"pairs read": corpus["read"], "pairs written": corpus["written"]})
            counts.update({f"dropped: {reason}": count for reason, count in corpus["dropped"].items()})
            counts.update({f"kept, but {reason}": count for reason, count in corpus["kept"].items()})
    return {
        f"Training files {index}": {"files": files, **facts} for index, (files, facts) in enumerate(corpora.items(), 1)
    }
