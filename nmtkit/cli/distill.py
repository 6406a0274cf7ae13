"""`nmtkit distill`: stores the probabilities of a teacher, to train a student with them."""

import dataclasses
import logging
from pathlib import Path
from typing import Any

import click

from nmtkit.cli import imports
from nmtkit.cli.command import Command, stderr
from nmtkit.cli.flags import CHECKPOINT, PATH, flags, given_flags, on_command_line, plugin_option
from nmtkit.config import COMMAND_LINE, FlagRule, check_flags, derive, flag_of, split_settings
from nmtkit.config.files import checkpoint_of
from nmtkit.jobs import progress
from nmtkit.jobs.shard_options import SHARD_RULES, ShardOptions
from nmtkit.translation.server_config import ServerConfig

log = logging.getLogger("nmtkit")

SHARDS = ShardOptions(shard_lines=500)  # a server translates some lines in a second
SHARD_FIELDS = ("output_dir", "shard_lines", "shard")
SERVER_FLAGS = [flag_of(field) for field in dataclasses.fields(ServerConfig) if field.name != "from_server"]
SERVER_RULES = (
    *(FlagRule(flag, needs=("--from-server",)) for flag in SERVER_FLAGS),
    *(FlagRule(flag, needs=("--from-server",)) for flag in ("--output-dir", "--source-lang", "--target-lang")),
    FlagRule(
        "--from-server",
        excludes=("--path", "--output", "--top-k", "--subset", "--pairs-per-file", "--max-tokens", "--device"),
        reason="these flags are for the probabilities of a checkpoint",
    ),
)


COMMON = {
    "--path RUN|FILE": "teacher; repeat it for an ensemble",
    "--output FOLDER": "folder to write (default: the folder teacher in DATA)",
    "--top-k N": "pieces to store for each target token (default: 8)",
    "--device NAME": "cpu, cuda, cuda:1, … (default: cpu)",
    "--from-server URL": "translate a text file with this server instead",
    "--server-model NAME": "name of its model",
    "-s, --source-lang LANG": "language of DATA, with --from-server",
    "-t, --target-lang LANG": "language of the translations",
    "--output-dir DIR": "folder of the shards, with --from-server",
}


@click.command(cls=Command, common=COMMON)
@click.argument("data", type=PATH)
@click.option(
    "--path",
    "paths",
    type=CHECKPOINT,
    multiple=True,
    metavar="RUN|FILE",
    help="Checkpoint of the teacher; repeat the flag for an ensemble, whose probabilities are averaged.",
)
@click.option("--output", type=PATH, metavar="FOLDER", help="Folder to write.  [default: the folder teacher in DATA]")
@click.option(
    "--top-k",
    type=click.IntRange(1, 10_000),
    default=8,
    metavar="N",
    help="Number of most probable pieces to store for each target token.  [default: 8]",
)
@click.option("--subset", default="train", metavar="NAME", help="Subset of DATA.  [default: train]")
@click.option(
    "--pairs-per-file",
    type=click.IntRange(1, 100_000_000),
    default=100_000,
    metavar="N",
    help="Pairs in each file. If you repeat a command, it continues after the last complete file.  [default: 100000]",
)
@click.option(
    "--max-tokens",
    type=click.IntRange(1, 100_000_000),
    default=4096,
    metavar="N",
    help="Maximum tokens of a batch.  [default: 4096]",
)
@click.option("--device", default="cpu", metavar="NAME", help="cpu, cuda, cuda:1, …  [default: cpu]")
@click.option("--threads", type=click.IntRange(1, 1024), metavar="N", help="CPU threads.")
@click.option("-s", "--source-lang", metavar="LANG", help="Language of DATA, with --from-server.")
@click.option("-t", "--target-lang", metavar="LANG", help="Language of the translations, with --from-server.")
@plugin_option
def command(
    data: Path,
    paths: tuple[Path, ...],
    output: Path | None,
    top_k: int,
    subset: str,
    pairs_per_file: int,
    max_tokens: int,
    device: str,
    threads: int | None,
    source_lang: str | None,
    target_lang: str | None,
    plugins: tuple[str, ...],
    **settings: Any,
) -> None:
    """Store the most probable pieces for each target token of DATA, with the probabilities that a teacher gives them.
    A student then trains on these probabilities without running the teacher (word-level distillation).

    \b
    nmtkit distill data-bin --path averaged.pt
    nmtkit distill data-bin --path one.pt --path two.pt --top-k 16
    nmtkit train data-bin --criterion kd_cross_entropy \\
        --teacher-probabilities data-bin/teacher

    With --from-server, another translation server translates DATA, a text file, and the student trains on the
    translations (sequence-level distillation).

    \b
    nmtkit distill mono.en -s en -t de --from-server http://localhost:8000/v1 \\
                   --server-model NAME --candidates 4 --choose mbr \\
                   --output-dir shards
    nmtkit merge shards --output mono.jsonl
    nmtkit clean -s en -t de mono.jsonl --output synthetic
    """
    check_flags((*SERVER_RULES, *SHARD_RULES), given_flags(), given_flags())
    if settings["from_server"] is not None:
        translate_by_server(data, source_lang, target_lang, settings)
        return
    if not paths:
        raise ValueError("give --path FILE, the checkpoint of the teacher, or --from-server URL")
    with imports():
        import torch

        from nmtkit.config.plugins import load_plugins
        from nmtkit.data import checkpoint_file
        from nmtkit.data.dataset.binarized import Dataset
        from nmtkit.data.dataset.teacher_file import TeacherFile
        from nmtkit.jobs.distributed import usable_device
        from nmtkit.models import checkpoint
        from nmtkit.training.criterions.distillation import load_teacher, teacher_rows

    load_plugins(plugins)
    paths = tuple(checkpoint_of(path) for path in paths)
    if threads is not None:
        torch.set_num_threads(threads)
    dataset = Dataset.open(data)
    split, folder = dataset[subset], output or data / "teacher"
    teachers = [load_teacher(path, dataset.tokenizer).to(usable_device(device)) for path in paths]
    stored = TeacherFile.create(
        folder,
        split.target.lengths[:],
        {
            "subset": subset,
            "dataset": dataset.fingerprint,
            "tokenizer": dataset.tokenizer.fingerprint,
            "vocabulary": dataset.tokenizer.target_size,
            "teachers": [checkpoint_file.fingerprint(checkpoint.load(path, mmap=True)) for path in paths],
            "candidates": min(top_k, dataset.tokenizer.target_size),
            "pairs_per_file": pairs_per_file,
        },
    )
    missing = list(stored.missing())
    if 0 < len(missing) < stored.count:
        log.info("%s: continuing, %s of %s files left", folder, len(missing), stored.count)
    progress.begin("Distilling", "pairs", sum(len(pairs) for _, pairs in missing))
    for number, pairs in missing:
        stored.write(number, teacher_rows(teachers, split, pairs, stored, max_tokens))
    size = sum(path.stat().st_size for path in folder.iterdir())
    stderr.print(
        f"{folder}: {stored.candidates} pieces for each of {int(stored.lengths.sum()):,} target tokens of {subset}, "
        f"{size / 1e6:,.1f} MB", markup=False,
    )  # fmt: skip


command.params += flags(ServerConfig)
command.params += [flag for flag in flags(SHARDS) if flag.name in SHARD_FIELDS]


def translate_by_server(text: Path, source_lang: str | None, target_lang: str | None, settings: dict[str, Any]) -> None:
    """Makes the shards of a job whose lines a server translates. Prints the next commands."""
    with imports():
        from nmtkit.cli.shards import run_shards, this_command
        from nmtkit.translation.server_teacher import ServerWorker, TranslationServer, open_job, write_shards

    typed = on_command_line(settings)
    config: ServerConfig = derive(ServerConfig, split_settings(typed, ServerConfig)[0], COMMAND_LINE)
    shards: ShardOptions = derive(SHARDS, split_settings(typed, ShardOptions)[0], COMMAND_LINE)
    if source_lang is None or target_lang is None:
        raise ValueError("--from-server needs the languages; give -s and -t")
    if shards.output_dir is None:
        raise ValueError("--from-server needs a folder for its shards; give --output-dir DIR")
    languages = source_lang, target_lang
    plan = open_job(config, text, languages, shards.output_dir, shards.shard_lines, this_command())
    texts = [text] if config.references is None else [text, config.references]
    worker = ServerWorker(TranslationServer(config, languages), texts)
    run_shards(shards, plan, lambda unfinished: write_shards(plan, worker, unfinished))
    counts = plan.counts()
    for name in ("empty lines", "lines without a translation"):
        if counts[name]:
            log.warning("%s of %s: %s; they give no pair", f"{counts[name]:,}", f"{counts['lines']:,} lines", name)
