"""`nmtkit distill`: stores the probabilities of a teacher, to train a student with them."""

import logging
from pathlib import Path

import click

from nmtkit.cli import imports
from nmtkit.cli.command import Command, stderr
from nmtkit.cli.flags import CHECKPOINT, PATH, plugin_option
from nmtkit.config.files import checkpoint_of
from nmtkit.jobs import progress

log = logging.getLogger("nmtkit")


@click.command(cls=Command)
@click.argument("data", type=PATH)
@click.option(
    "--path",
    "paths",
    type=CHECKPOINT,
    multiple=True,
    required=True,
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
    plugins: tuple[str, ...],
) -> None:
    """Store the most probable pieces for each target token of DATA, with the probabilities that a teacher gives them.
    A student then trains on these probabilities without running the teacher (word-level distillation).

    \b
    nmtkit distill data-bin --path averaged.pt
    nmtkit distill data-bin --path one.pt --path two.pt --top-k 16
    nmtkit train data-bin --criterion kd_cross_entropy \\
        --teacher-probabilities data-bin/teacher
    """
    with imports():
        import torch

        from nmtkit.config.plugins import load_plugins
        from nmtkit.data import checkpoint_file
        from nmtkit.data.dataset.binarized import Dataset
        from nmtkit.data.dataset.teacher_file import TeacherFile
        from nmtkit.models import checkpoint
        from nmtkit.training.criterions.distillation import load_teacher, teacher_rows
        from nmtkit.translation.translator import usable_device

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
