"""Cleans corpora in shards: `clean --output-dir`, and `merge` of the folder.

    input.pairs         the blocks of all pairs, before mending
    job.pickle          the settings, the fitted filters and the names of the models (`StoredJob`)
    shard-000007.pairs  the mended blocks of a shard, each with its scores and keys (hashes, to find duplicates)

The filters are fitted once, before the shards, on the same sample as without shards. The blocks are also the
same, so all digits of the scores are the same as without shards. Steps that need all pairs belong to the merge: the
probability, duplicates, and the report. Pickled files can run code, so do not merge a folder that you do not trust.
"""

import os
import pickle
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

import nmtkit
from nmtkit.cleaning.blocks import BlockScorer, Scored, ScratchTable, StoredBlock
from nmtkit.cleaning.clean import PairSample, check_files, fit, inputs_of, make_filters, read_blocks, write_outputs
from nmtkit.cleaning.config import CleanConfig
from nmtkit.cleaning.decision import CleanReport
from nmtkit.cleaning.filters.interface import Filter, first_limits
from nmtkit.cleaning.filters.text_block import Scores
from nmtkit.cleaning.probability import PairScorer
from nmtkit.config import flag_of
from nmtkit.config.files import atomic_write
from nmtkit.config.plugins import load_plugins, source_digests
from nmtkit.data.corpora.corpus import Corpus, Pairs
from nmtkit.data.corpora.dropping import RowNumbers
from nmtkit.jobs import progress
from nmtkit.jobs.shard_options import ShardOptions
from nmtkit.jobs.shard_plan import Plan, Shard, check_regular, merge, open_plan
from nmtkit.jobs.shard_processes import ShardResults, shard_processes
from nmtkit.jobs.threads import usable_cores
from nmtkit.jobs.workers import Shared

INPUT, JOB = "input.pairs", "job.pickle"
FILES = ("exclude", "domain", "lid_model", "forward", "backward")  # settings that are files, compared by their contents
MERGE_ONLY = ("output", "dropped", "scores", "from_scores", "report", "workers")  # settings that do not change shards


@dataclass(frozen=True)
class StoredJob:
    """The settings and the fitted objects of a job, which all shards share."""

    config: CleanConfig
    corpora: Sequence[Corpus]
    filters: dict[str, Filter]
    scorer: PairScorer | None


def prepare(folder: Path, job: StoredJob, shard_lines: int) -> list[Shard]:
    """Copies the pairs of all corpora to the folder, fits the filters, and writes the job. Returns the shards.

    A shard has whole blocks: as many blocks as `shard_lines` pairs allow, and at least one block.
    """
    sample = PairSample(job.config.sample, job.config.seed)
    shards: list[Shard] = []
    with atomic_write(folder / INPUT) as file:
        for index, block in read_blocks(job.corpora, sample):
            last = shards[-1] if shards else Shard(-1, 0, 0, ())
            if shards and last.lines + len(block) <= shard_lines:
                shards[-1] = replace(last, lines=last.lines + len(block))
            else:
                shards.append(Shard(last.index + 1, last.first + last.lines, len(block), (file.tell(),)))
            pickle.dump((index, block), file, pickle.HIGHEST_PROTOCOL)
    fit(job.filters, sample, job.config.mend)
    with atomic_write(folder / JOB) as file:
        try:
            pickle.dump(job, file, pickle.HIGHEST_PROTOCOL)
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            raise ValueError(f"--output-dir cannot save a fitted filter for the other processes: {error}") from None
    return shards


def read_job(folder: Path) -> StoredJob:
    """Reads the job of a folder. Raises ValueError if the file is damaged, or has filters of a missing plug-in."""
    try:
        with (folder / JOB).open("rb") as file:
            job: StoredJob = pickle.load(file)
    except (pickle.UnpicklingError, EOFError, AttributeError, ImportError) as error:
        raise ValueError(
            f"{folder / JOB} cannot be read: {error}; if the command had --plugin, give the same --plugin"
        ) from None
    return job


def load_cleaner(folder: Path, plugins: Sequence[str], threads: int | None = None) -> "ShardCleaner":
    """Loads the filters and the models of the job in `folder`.

    `threads` is ignored, because Ray sets the number of threads of an actor.
    """
    load_plugins(plugins)
    return ShardCleaner(folder / INPUT, read_job(folder))


class ShardCleaner:
    """Mends and scores the pairs of shards."""

    def __init__(self, pairs: Path, job: StoredJob) -> None:
        self._pairs, self._job = pairs, job
        if job.scorer is not None:
            job.scorer.fit([], [])

    def output(self, shard: Shard, counts: Counter[str]) -> Iterator[bytes]:
        """Yields two pickled objects for each block: the mended pairs, then a tuple (corpus index, scores, keys).

        Adds to `counts` how many pairs each filter drops, and how many lines are mended.
        """
        filters = self._job.filters
        worker = BlockScorer(list(filters.values()), self._job.config.mend)
        done = 0
        with self._pairs.open("rb") as file:
            file.seek(shard.starts[0])
            while done < shard.lines:
                corpus, block = pickle.load(file)
                block, scores, keys = worker.score_pairs(block)
                first = first_limits(filters.values(), scores)
                for index, name in enumerate(filters):
                    counts[f"dropped: {name}"] += int((first == index).sum())
                if self._job.scorer is not None:
                    models = self._model_scores(self._job.scorer, block, np.flatnonzero(first < 0))
                    scores = np.column_stack((scores, models))
                yield pickle.dumps(block, pickle.HIGHEST_PROTOCOL)
                yield pickle.dumps((corpus, scores, keys), pickle.HIGHEST_PROTOCOL)
                done += len(block)
        assert done == shard.lines, f"{done} pairs of {shard}"
        counts.update({f"mended: {name}": count for name, count in worker.mended().items()})

    def _model_scores(self, scorer: PairScorer, block: Pairs, rows: RowNumbers) -> Scores:
        """Returns the model scores of a block [pairs]. `rows` are the kept pairs; the other pairs have NaN."""
        result = np.full(len(block), np.nan, np.float32)
        if len(rows):
            sides = ([side[row] for row in rows.tolist()] for side in (block.sources, block.targets))
            with progress.muted():  # the caller counts shards
                result[rows] = scorer.score(*sides)
        return result


def sharded_cleaning(
    options: ShardOptions,
    config: CleanConfig,
    configs: dict[str, Any],
    names: Sequence[str],
    scorer: PairScorer | None,
    plugins: Sequence[str],
    command: str,
) -> tuple[Plan, Callable[[Sequence[Shard]], ShardResults]]:
    """Returns the plan of the shards of the corpora `names`, and a function that mends and scores shards.

    Reads the plan in `options.output_dir`, or makes a plan if the folder has none. `configs` has the config of each
    filter. `command` is the command line that makes all shards. The returned function yields each finished shard with
    its record.
    """
    assert options.output_dir is not None
    folder, workers = options.output_dir, config.workers or usable_cores()
    processes = shard_processes(options, workers)
    corpora, context = inputs_of(config, names)
    files = files_of("corpus", corpora) | files_of("--exclude", context.exclude) | files_of("--domain", context.domain)
    check_regular(files.values())
    models = {"--lid-model": config.lid_model, "--forward": config.forward, "--backward": config.backward}
    files |= {flag: path for flag, path in models.items() if path is not None}
    settings = {"command": "clean", "version of nmtkit": nmtkit.__version__, "plug-ins": source_digests(plugins)}
    for part in (config, *configs.values()):
        compared = (field for field in fields(part) if field.name not in (*FILES, *MERGE_ONLY))
        settings |= {flag_of(field): getattr(part, field.name) for field in compared}

    def shards() -> list[Shard]:
        job = StoredJob(config, corpora, make_filters(configs, context), scorer)
        return prepare(folder, job, options.shard_lines)

    plan = open_plan(folder, settings, files, ".pairs", options.shard_lines, command, shards)
    modules = [str(Path(name).absolute()) if name.endswith(".py") else name for name in plugins]
    load = partial(load_cleaner, folder.absolute(), modules)
    is_local = options.executor == "local"
    if is_local and scorer is not None and workers > 1:
        import torch

        torch.set_num_threads(1)

    def run(shards: Sequence[Shard]) -> ShardResults:
        # all processes of this machine share the memory of the models
        return processes.run(Shared(load(), load) if is_local else load, plan, shards)

    return plan, run


def files_of(title: str, corpora: Sequence[Corpus]) -> dict[str, Path]:
    """Returns the files of corpora, by names such as "corpus 2, file 1". A folder stands for all files inside it."""
    files = {}
    for number, corpus in enumerate(corpora, 1):
        paths = [file for path in corpus.paths() for file in (sorted(path.rglob("*")) if path.is_dir() else [path])]
        for index, path in enumerate(path for path in paths if not path.is_dir()):
            files[f"{title} {number}" if len(paths) == 1 else f"{title} {number}, file {index + 1}"] = path
    return files


def merge_cleaned(plan: Plan, job: StoredJob, config: CleanConfig) -> CleanReport:
    """Writes the outputs of `clean` that `config` names, from all shards.

    Raises ValueError if shards are missing or damaged, or if an output would overwrite a corpus or another output.
    """
    others = (corpus for each in job.filters.values() for corpus in (*each.context.exclude, *each.context.domain))
    check_files(config, [*job.corpora, *others])
    with Path(os.devnull).open("wb") as nothing:
        _, counts = merge(plan, nothing)
    prefix = "mended: "
    mended = {name.removeprefix(prefix): count for name, count in counts.items() if name.startswith(prefix)}

    def read_shards(scratch: Path, columns: Sequence[str]) -> Scored:
        table, blocks = ScratchTable(scratch), []
        progress.begin("Reading", "pairs", sum(shard.lines for shard in plan.shards))
        for shard in plan.shards:
            with plan.output(shard).open("rb") as file:
                left = shard.lines
                while left > 0:
                    position, block = file.tell(), pickle.load(file)
                    corpus, matrix, keys = pickle.load(file)
                    table.append(matrix, keys)
                    blocks.append(StoredBlock(corpus, plan.output(shard), position))
                    left -= len(block)
                    progress.advance(len(block))
        return table.scored(blocks, mended)

    return write_outputs(config, job.corpora, job.filters, read_shards, job.scorer)
