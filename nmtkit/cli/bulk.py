"""Runs a command in shards (`--output-dir`): plans shards, shows progress, stops on signals, says how to continue."""

import dataclasses
import logging
import shlex
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

import nmtkit
from nmtkit.cleaning.config import CleanConfig
from nmtkit.cli.command import stderr
from nmtkit.config import flag_of
from nmtkit.config.files import atomic_write
from nmtkit.config.plugins import source_digests
from nmtkit.data.corpora.compression import is_compressed
from nmtkit.data.corpora.corpus import Columns, Corpus, format_of
from nmtkit.data.corpora.lines import LineDecoder
from nmtkit.jobs import distributed
from nmtkit.jobs.shard_merging import described
from nmtkit.jobs.shard_options import BulkOptions
from nmtkit.jobs.shard_plan import Plan, Shard, divide, open_plan

if TYPE_CHECKING:
    from nmtkit.cleaning.probability import PairScorer
    from nmtkit.translation.shards import TranslationJob

log = logging.getLogger("nmtkit")

Languages = tuple[str | None, str | None]
Start = Callable[[Plan, Sequence[Shard]], Iterator[tuple[Shard, dict[str, Any]]]]  # starts the work on shards

SECONDS_OF_MESSAGES = 30.0  # seconds between two messages about progress, if stderr is not a terminal
SPEED_ONLY = ("max_tokens",)  # settings that do not change the output
# contents of these files are compared, not their paths
CLEAN_FILES = ("exclude", "domain", "lid_model", "forward", "backward")
MERGE_ONLY = ("output", "dropped", "scores", "from_scores", "report", "workers")  # settings that do not change shards


def translate_shards(
    bulk: BulkOptions,
    job: "TranslationJob",
    files: Sequence[Path],
    languages: Languages | None,
    columns: Columns | None,
    workers: int,
) -> Counter[str]:
    """Translates the unfinished shards of `files`. Returns the sums of the counts of all finished shards.

    `job.texts` has the input and a line file for each field of `job.fields`. With `languages`, the source side of a
    corpus such as a .tsv is translated, with the given `columns`. Without `languages`, the lines of the file are
    translated. Raises SystemExit if a signal stops the job.
    """
    assert bulk.output_dir is not None
    folder = bulk.output_dir
    if distributed.launched():
        raise ValueError(
            "--output-dir and torchrun cannot be combined; start a process for each GPU, with --device cuda:0 --shard "
            "1/2, --device cuda:1 --shard 2/2, and so on"
        )
    start: Start
    if bulk.executor == "ray":
        from nmtkit.jobs.ray_cluster import RayCluster

        cluster = RayCluster(workers, bulk.actor_cpus, bulk.actor_gpus)
    else:
        from nmtkit.jobs.shard_workers import run_locally
        from nmtkit.jobs.workers import Shared

        loaded = job.load()
    inputs = {"input" if len(files) == 1 else f"input {number}": path for number, path in enumerate(files, 1)}
    line_files = dict(zip(job.fields, job.texts[1:], strict=True))
    check_regular((*files, *line_files.values()))
    models = {"model" if len(job.models) == 1 else f"model {number}": path for number, path in enumerate(job.models, 1)}
    glossaries = {} if job.text.glossary is None else {"glossary": job.text.glossary}
    is_text = len(files) == 1 and (languages is None or format_of(files[0]) is None) and not is_compressed(files[0])

    def texts(new: bool) -> list[Path]:
        paths = list(files) if is_text else [plain_copy(folder / "input.txt", files, languages, columns, new)]
        for name, path in line_files.items():
            paths.append(plain_copy(folder / f"{name}.txt", [path], None, None, new) if is_compressed(path) else path)
        return paths

    settings = settings_of(job) | ({} if columns is None else {"--columns": columns})
    plan = open_plan(
        folder, settings, models | inputs | line_files | glossaries | processor_files(job),
        ".jsonl" if job.format == "jsonl" else ".txt", bulk.shard_lines, this_command(),
        lambda: divide(texts(True), bulk.shard_lines),
    )  # fmt: skip
    paths = texts(False)
    job = dataclasses.replace(job, texts=paths)
    if bulk.executor == "ray":
        job = dataclasses.replace(
            job, models=[path.absolute() for path in job.models], texts=[path.absolute() for path in paths]
        )
        start = lambda plan, shards: cluster.run(job.load_with_threads, plan, shards)  # noqa: E731
    else:
        loaded.job = job
        start = lambda plan, shards: run_locally(Shared(loaded, job.load), plan, shards, workers)  # noqa: E731
    run_shards(bulk, plan, start)
    counts: Counter[str] = Counter()
    for shard in plan.shards:
        if (record := plan.record(shard)) is not None:
            counts.update(record["counts"], lines=record["lines"])
    for name, path in zip(("source", *job.fields), paths, strict=True):
        LineDecoder(
            path, carriage_returns=counts[f"carriage returns of {name}"],
            has_byte_order_mark=bool(counts[f"byte-order marks of {name}"]),
        ).warn()  # fmt: skip
    return counts


def check_regular(paths: Iterable[Path]) -> None:
    """Raises ValueError if a path is a pipe or a device."""
    for path in paths:
        if path.exists() and not path.is_file():
            raise ValueError(f"{path} is not a regular file; --output-dir reads its input again to continue")


def clean_shards(
    bulk: BulkOptions,
    config: CleanConfig,
    filters: Mapping[str, Any],
    names: Sequence[str],
    scorer: "PairScorer | None",
    plugins: Sequence[str],
) -> None:
    """Mends and scores the unfinished shards of the corpora `names`. `filters` has the config of each filter.

    Raises SystemExit if a signal stops the job.
    """
    from nmtkit.cleaning.clean import corpora_of, domain_corpora, excluded, make_filters
    from nmtkit.cleaning.shards import CleaningJob, StoredJob, prepare

    assert bulk.output_dir is not None
    folder, workers = bulk.output_dir, config.worker_count()
    start: Start
    if bulk.executor == "ray":
        from nmtkit.jobs.ray_cluster import RayCluster

        cluster = RayCluster(workers, bulk.actor_cpus, bulk.actor_gpus)
    corpora = corpora_of(config, names)
    files = files_of("corpus", corpora) | files_of("--exclude", excluded(config))
    files |= files_of("--domain", domain_corpora(config))
    check_regular(files.values())
    models = {"--lid-model": config.lid_model, "--forward": config.forward, "--backward": config.backward}
    files |= {flag: path for flag, path in models.items() if path is not None}
    settings = {"command": "clean", "version of nmtkit": nmtkit.__version__, "plug-ins": source_digests(plugins)}
    for part in (config, *filters.values()):
        for field in dataclasses.fields(part):
            if part is not config or field.name not in (*CLEAN_FILES, *MERGE_ONLY):
                settings[flag_of(field)] = getattr(part, field.name)

    def shards() -> list[Shard]:
        job = StoredJob(config, corpora, make_filters(config, dict(filters)), scorer)
        return prepare(folder, job, bulk.shard_lines)

    plan = open_plan(folder, settings, files, ".pairs", bulk.shard_lines, this_command(), shards)
    modules = [str(Path(name).absolute()) if name.endswith(".py") else name for name in plugins]
    job = CleaningJob(folder.absolute(), modules)
    if bulk.executor == "ray":
        start = lambda plan, shards: cluster.run(job.load, plan, shards)  # noqa: E731
    else:
        from nmtkit.jobs.shard_workers import run_locally
        from nmtkit.jobs.workers import Shared

        if scorer is not None and workers > 1:
            import torch

            torch.set_num_threads(1)

        def start(plan: Plan, shards: Sequence[Shard]) -> Iterator[tuple[Shard, dict[str, Any]]]:
            loaded = job.load()
            return run_locally(Shared(loaded, job.load), plan, shards, workers)

    run_shards(bulk, plan, start)


def files_of(title: str, corpora: Sequence[Corpus]) -> dict[str, Path]:
    """Returns the files of corpora, by names such as "corpus 2, file 1". A folder gives all files inside it."""
    files = {}
    for number, corpus in enumerate(corpora, 1):
        paths = [file for path in corpus.paths() for file in (sorted(path.rglob("*")) if path.is_dir() else [path])]
        for index, path in enumerate(path for path in paths if not path.is_dir()):
            files[f"{title} {number}" if len(paths) == 1 else f"{title} {number}, file {index + 1}"] = path
    return files


def settings_of(job: "TranslationJob") -> dict[str, Any]:
    """Returns the settings that can change the translations, by flag or name. The job's fingerprint contains them."""
    parts = [job.search, job.text, job.translator]
    settings = {
        flag_of(field): getattr(part, field.name)
        for part in parts
        for field in dataclasses.fields(part)
        if field.name not in (*SPEED_ONLY, "glossary")
    }
    files = processor_files(job)
    processors = {
        name: {
            field.name: getattr(config, field.name)
            for field in dataclasses.fields(config)
            if flag_of(field) not in files
        }
        for name, config in job.processors.items()
    }
    return settings | {
        "command": "generate", "version of nmtkit": nmtkit.__version__, "--format": job.format,
        "--source-tag": job.source_tag, "device": job.device.partition(":")[0], "--precision": job.devices.precision,
        "--engine": job.devices.engine, "plug-ins": source_digests(job.plugins), "logits processors": processors,
    }  # fmt: skip


def processor_files(job: "TranslationJob") -> dict[str, Path]:
    """Returns the files that the logits processors read, such as a language model, by their flags."""
    values = {
        flag_of(field): getattr(config, field.name)
        for config in job.processors.values()
        for field in dataclasses.fields(config)
    }
    return {flag: path for flag, path in values.items() if isinstance(path, Path) and not path.is_dir()}


def plain_copy(
    copy: Path, files: Sequence[Path], languages: Languages | None, columns: Columns | None, new: bool
) -> Path:
    """Writes the lines of `files` to the text file `copy`. If the job is not `new`, keeps an existing copy."""
    from nmtkit.translation import inputs
    from nmtkit.translation.translator import WINDOW

    if new or not copy.exists():
        with atomic_write(copy) as out:
            for window in inputs.text_requests(files, None, WINDOW, languages, columns):
                out.writelines(request.source.encode() + b"\n" for request in window)
    return copy


def this_command() -> str:
    """Returns the command line of this process without --shard, as a command that makes all shards."""
    words = iter(sys.argv[1:])
    kept = []
    for word in words:
        if word == "--shard":
            next(words, None)
        elif not word.startswith("--shard="):
            kept.append(word)
    return shlex.join(["nmtkit", *kept])


def run_shards(bulk: BulkOptions, plan: Plan, start: Start) -> None:
    """Makes the unfinished shards of this process. Prints how to continue after a stop, and how to join the shards."""
    unfinished = plan.unfinished(*bulk.part())
    if len(unfinished) < len(plan.shards[bulk.part()[0] - 1 :: bulk.part()[1]]):
        log.info("%s: continuing, %s left", plan.folder, described(unfinished) if unfinished else "no shard is")
    try:
        with stop_on_signals():
            if unfinished:
                show_progress(start(plan, unfinished), sum(shard.lines for shard in unfinished))
    except KeyboardInterrupt as stop:
        number = stop.args[0] if stop.args else signal.SIGINT
        command = shlex.join(["nmtkit", *sys.argv[1:]])
        stderr.print(f"{number.name}. To continue: {command}", markup=False, highlight=False, soft_wrap=True)
        sys.exit(128 + number)
    finally:
        plan.remove_temporary_files(unfinished)
    if missing := plan.unfinished():
        log.info("%s: this part is done; %s of %s left", plan.folder, described(missing), len(plan.shards))
    else:
        log.info("To join the shards: nmtkit merge %s --output FILE", shlex.quote(str(plan.folder)))


@contextmanager
def stop_on_signals() -> Iterator[None]:
    """Raises KeyboardInterrupt, with the signal as its argument, for SIGINT and SIGTERM."""

    def stop(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt(signal.Signals(number))

    earlier = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in earlier.items():
            signal.signal(number, handler)


def show_progress(results: Iterable[tuple[Shard, Mapping[str, Any]]], total: int) -> None:
    """Consumes the results of shards, which have `total` lines together. Shows finished lines and lines per second."""
    began = shown = time.monotonic()
    done = 0
    with ExitStack() as stack:
        status = stack.enter_context(stderr.status("Working")) if stderr.is_terminal else None
        for _, record in results:
            done += record["lines"]
            now = time.monotonic()
            text = f"{done:,} of {total:,} lines, {done / (now - began):,.0f} lines/s"
            if status is not None:
                status.update(text)
            elif now - shown > SECONDS_OF_MESSAGES:
                log.info("%s", text)
                shown = now
