"""`nmtkit distill`: stores the probabilities of a teacher, to train a student with them."""

import dataclasses
import logging
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from nmtkit.cli import imports
from nmtkit.cli.command import Command, show_next, tell
from nmtkit.cli.flags import INPUT, flags, from_flags, given_flags, plugin_option
from nmtkit.config import Config, FlagRule, check_flags, flag_of, option
from nmtkit.jobs import progress
from nmtkit.jobs.shard_options import SHARD_RULES, ShardOptions
from nmtkit.translation.server_config import ServerConfig

log = logging.getLogger("nmtkit")

SHARDS = ShardOptions(shard_lines=500)  # a server translates only a few lines per second
SHARD_FIELDS = ("output_dir", "shard_lines", "shard")
SERVER_FLAGS = [flag_of(field) for field in dataclasses.fields(ServerConfig) if field.name != "from_server"]
SERVER_RULES = (
    *(FlagRule(flag, needs=("--from-server",)) for flag in SERVER_FLAGS),
    *(FlagRule(flag, needs=("--from-server",)) for flag in ("--output-dir", "--source-lang", "--target-lang")),
    FlagRule(
        "--from-server",
        excludes=(
            *("--path", "--output", "--top-k", "--subset", "--pairs-per-file", "--max-tokens", "--device", "--threads"),
            "--plugin",
        ),
        reason="the other flag applies only if a checkpoint is the teacher",
    ),
)


@dataclass(frozen=True, kw_only=True)
class DistillConfig(Config):
    """Settings of `nmtkit distill`, without the settings of --from-server."""

    path: tuple[Path, ...] = option(
        (),
        "checkpoint of the teacher; repeat the flag for an ensemble, whose probabilities are averaged",
        metavar="RUN|FILE",
        repeatable=True,
        checkpoint=True,
    )
    output: Path | None = option(None, "folder to write; default: the folder teacher in DATA", metavar="FOLDER")
    top_k: int = option(8, "number of most probable pieces to store for each target token", min=1, max=10_000)
    subset: str = option("train", "subset of DATA", metavar="NAME")
    pairs_per_file: int = option(
        100_000, "pairs in each file; a repeated command continues after the last complete file", min=1, max=100_000_000
    )
    max_tokens: int = option(4096, "maximum tokens of a batch", min=1, max=100_000_000)
    device: str = option("cpu", "cpu, cuda, cuda:1, …", metavar="NAME")
    threads: int | None = option(None, "CPU threads", min=1, max=1024)
    source_lang: str | None = option(
        None, "language of DATA, with --from-server", flag="-s/--source-lang", metavar="LANG"
    )
    target_lang: str | None = option(
        None, "language of the translations, with --from-server", flag="-t/--target-lang", metavar="LANG"
    )


COMMON = {
    "--path RUN|FILE": "teacher; repeat it for an ensemble",
    "--output FOLDER": "folder to write (default: the folder teacher in DATA)",
    "--top-k N": "pieces to store for each target token (default: 8)",
    "--device NAME": "cpu, cuda, cuda:1, … (default: cpu)",
    "--from-server URL": "translate a text file with this server instead",
    "--server-model NAME": "name of the model on the server",
    "-s, --source-lang LANG": "language of DATA, with --from-server",
    "-t, --target-lang LANG": "language of the translations",
    "--output-dir DIR": "folder of the shards, with --from-server",
}


@click.command(cls=Command, common=COMMON)
@click.argument("data", type=INPUT)
@plugin_option
def command(data: Path, plugins: tuple[str, ...], **settings: Any) -> None:
    """Store the most probable pieces for each target token of DATA, with the probabilities that a teacher gives them.
    A student then trains on these probabilities without running the teacher (word-level distillation).

    \b
    nmtkit distill data-bin --path averaged.pt
    nmtkit distill data-bin --path one.pt --path two.pt --top-k 16
    nmtkit train data-bin --criterion kd_cross_entropy \\
        --teacher-probabilities data-bin/teacher

    With --from-server, DATA is a text file. A translation server translates this file, and the student trains on the
    translations (sequence-level distillation).

    \b
    nmtkit distill mono.en -s en -t de --from-server http://localhost:8000/v1 \\
                   --server-model NAME --candidates 4 --choose mbr \\
                   --output-dir shards
    nmtkit merge shards --output mono.jsonl
    nmtkit clean -s en -t de mono.jsonl --output synthetic
    """
    check_flags((*SERVER_RULES, *SHARD_RULES), given_flags(), given_flags())
    config: DistillConfig = from_flags(DistillConfig, settings)
    if settings["from_server"] is not None:
        translate_by_server(data, config, settings)
        return
    if not config.path:
        raise ValueError("give --path FILE, the checkpoint of the teacher, or --from-server URL")
    with imports():
        import torch

        from nmtkit.config.plugins import load_plugins
        from nmtkit.data import checkpoint_file
        from nmtkit.data.dataset.binarized import Dataset
        from nmtkit.data.dataset.teacher_file import TeacherFile
        from nmtkit.jobs.distributed import usable_device
        from nmtkit.models import checkpoint
        from nmtkit.models.building import check_not_reversed
        from nmtkit.training.criterions.distillation import load_teacher, teacher_rows

    load_plugins(plugins)
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    dataset = Dataset.open(data)
    split, folder = dataset[config.subset], config.output or data / "teacher"
    for path in () if dataset.tokenizer.languages else config.path:
        check_not_reversed("--path", path, (dataset.source_lang, dataset.target_lang))
    teachers = [load_teacher(path, dataset.tokenizer).to(usable_device(config.device)) for path in config.path]
    stored = TeacherFile.create(
        folder,
        split.target.lengths[:],
        {
            "subset": config.subset,
            "dataset": dataset.fingerprint,
            "tokenizer": dataset.tokenizer.fingerprint,
            "vocabulary": dataset.tokenizer.target_size,
            "teachers": [checkpoint_file.fingerprint(checkpoint.load(path, mmap=True)) for path in config.path],
            "candidates": min(config.top_k, dataset.tokenizer.target_size),
            "pairs_per_file": config.pairs_per_file,
        },
    )
    missing = list(stored.missing())
    if 0 < len(missing) < stored.count:
        log.info("%s: continuing, %s of %s files left", folder, len(missing), stored.count)
    elif not missing:
        log.info("%s is complete already", folder)
    progress.begin("Distilling", "pairs", sum(len(pairs) for _, pairs in missing))
    for number, pairs in missing:
        stored.write(number, teacher_rows(teachers, split, pairs, stored, config.max_tokens))
    size = sum(path.stat().st_size for path in folder.iterdir())
    tell(
        f"{folder}: {stored.candidates} pieces for each of {int(stored.lengths.sum()):,} target tokens of "
        f"{config.subset}, {size / 1e6:,.1f} MB"
    )
    if config.subset == "train":
        student = ["nmtkit", "train", str(data), "--criterion", "kd_cross_entropy"]
        show_next(shlex.join([*student, "--teacher-probabilities", str(folder)]))


command.params[:0] = flags(DistillConfig)
command.params += flags(ServerConfig)
command.params += [flag for flag in flags(SHARDS) if flag.name in SHARD_FIELDS]


def translate_by_server(text: Path, distill: DistillConfig, settings: Mapping[str, Any]) -> None:
    """Translates the lines of a file with a server, in shards. Warns if lines give no pair."""
    with imports():
        from nmtkit.cli.shards import run_shards, this_command
        from nmtkit.data.corpora.corpus import format_of
        from nmtkit.text.documents import check_text
        from nmtkit.text.documents.recognition import HEAD
        from nmtkit.translation.server_teacher import ServerWorker, TranslationServer, open_job, write_shards

    config: ServerConfig = from_flags(ServerConfig, settings)
    shards: ShardOptions = from_flags(SHARDS, settings)
    if distill.source_lang is None or distill.target_lang is None:
        raise ValueError("--from-server needs the languages; give -s and -t")
    if distill.source_lang == distill.target_lang:
        raise ValueError(
            f"-s and -t are both {distill.source_lang}, but each side of a pair is stored under its language; give "
            "different names"
        )
    if shards.output_dir is None:
        raise ValueError("--from-server needs a folder for its shards; give --output-dir DIR")
    languages = distill.source_lang, distill.target_lang
    texts = [text] if config.references is None else [text, config.references]
    for path in filter(Path.is_file, texts):
        if format_of(path) is not None:
            raise ValueError(
                f"{path} is a corpus, but --from-server sends each line of a text file; extract the sentences of the "
                "source, one on each line"
            )
        with path.open("rb") as file:
            check_text(file.read(HEAD), str(path))
    plan = open_job(config, text, languages, shards.output_dir, shards.shard_lines, this_command())
    worker = ServerWorker(TranslationServer(config, languages), texts)
    run_shards(shards, plan, lambda unfinished: write_shards(plan, worker, unfinished))
    counts = plan.counts()
    for name in ("empty lines", "lines without a translation"):
        if counts[name]:
            log.warning("%s of %s give no pair: %s", f"{counts[name]:,}", f"{counts['lines']:,} lines", name)
