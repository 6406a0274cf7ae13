"""`nmtkit serve`: translation over HTTP."""

import importlib
from typing import Any

import click

from nmtkit.cli.flags import flags, from_flags, given_flags, plugin_option
from nmtkit.cli.generate import GenerateCommand, chosen_processors
from nmtkit.cli.generate_config import flags_in_effect
from nmtkit.config import check_flags, to_dict
from nmtkit.config.files import check_readable
from nmtkit.jobs import progress
from nmtkit.serving.config import (
    CPU_MAX_TOKENS,
    OWN_TEXT_FIELDS,
    RULES,
    SEARCH_FIELDS,
    ModelPath,
    ServeConfig,
    ServeJob,
)
from nmtkit.translation.options import DeviceOptions, TextOptions, TranslatorOptions
from nmtkit.translation.search.options import SearchOptions

COMMON = {
    "--path [SRC-TGT=]RUN|FILE": "checkpoint, or the folder of a run; repeatable",
    "--models FILE": "list of checkpoints, which may change without a restart",
    "--host ADDRESS": "0.0.0.0 listens on all networks (default: 127.0.0.1)",
    "--port N": "port to listen on (default: 5000)",
    "--workers N": "processes on a CPU; one per core is the default",
    "--precision auto|fp32|bf16|int8": "number type of matrix products; int8 is fastest on CPUs",
    "--engine NAME": "implementation of the search (default: auto)",
    "--device NAME": "cpu, cuda, cuda:1, … (default: auto)",
    "--beam N": "width of the search; 1 is greedy (default: 4)",
    "--pivot CODE": "also serve other pairs, through this language",
    "--glossary FILE": "terms and their translations",
    "--api-keys PATH": "file of API keys and their quotas; requests need a key",
    "--state FOLDER": "folder for the usage of API keys, and for glossaries",
    "--[no-]split-sentences": "translate each sentence of a line alone",
}


@click.command(cls=GenerateCommand, common=COMMON)
@click.option(
    "--path",
    "paths",
    multiple=True,
    metavar="[SRC-TGT=]RUN|FILE",
    help="Checkpoint. Repeat the flag for more language pairs; several checkpoints of one pair are an ensemble.",
)
@plugin_option
def command(paths: tuple[str, ...], plugins: tuple[str, ...], **settings: Any) -> None:
    """Translate over HTTP, with the interface of LibreTranslate.

    \b
    nmtkit serve --path averaged.pt
    nmtkit serve --path en-de=en-de.pt --path de-en=de-en.pt --precision int8
    curl localhost:5000/translate -d 'q=A dog runs.' -d source=en -d target=de

    Without SRC-TGT, the languages are read from the checkpoint. SIGTERM stops the server after the running requests.
    The server reloads the models on SIGHUP, and when a checkpoint file or the list of --models has changed. Needs
    nmtkit[serve].
    """
    config: ServeConfig = from_flags(ServeConfig, settings)
    search: SearchOptions = from_flags(SearchOptions, settings)
    devices: DeviceOptions = from_flags(DeviceOptions, settings)
    check_combination(config, search, devices)
    if not paths and config.models is None:
        raise click.UsageError("give --path FILE, or --models FILE with a list of checkpoints")
    try:
        for package in ("prometheus_client", "pydantic", "python_multipart", "starlette", "uvicorn"):
            importlib.import_module(package)
    except ImportError as error:
        raise ImportError(f"nmtkit serve needs {error.name}; install it: pip install 'nmtkit[serve]'") from error
    from nmtkit.serving.server import run

    processors = chosen_processors(search.logits_processors, settings)
    job = ServeJob(
        config=config,
        paths=[ModelPath.parse(path) for path in paths],
        listed=config.listed_models(),
        plugins=plugins,
        search=search,
        devices=devices,
        translator=from_flags(TranslatorOptions, settings),
        text=from_flags(TextOptions, {name: value for name, value in settings.items() if name not in OWN_TEXT_FIELDS}),
        processors={name: to_dict(each) for name, each in processors.items()},
    )
    for model in job.paths:
        check_readable(model.path, "--path", several=model.pair is None or None)
    progress.close()  # the processes of the service log to the same terminal
    run(job)


for part in (ServeConfig, DeviceOptions, TranslatorOptions):
    command.params += flags(part)
for flag in command.params:
    if isinstance(flag, click.Option) and flag.name == "max_tokens":
        flag.help = (
            "Source tokens of a batch. With smaller batches, short requests wait less; with larger batches, more "
            f"lines are translated per second.  [default: {CPU_MAX_TOKENS} on a CPU, 16384 on a GPU]"
        )
command.params += [flag for flag in flags(TextOptions, "Text") if flag.name not in OWN_TEXT_FIELDS]
command.params += [flag for flag in flags(SearchOptions, "Search") if flag.name in SEARCH_FIELDS]


def check_combination(config: ServeConfig, search: SearchOptions, devices: DeviceOptions) -> None:
    """Raises ValueError for flags that exclude each other."""
    on = flags_in_effect(search, devices)
    if config.workers in (None, 1):
        on.discard("--workers")
    check_flags(RULES, given_flags(), on)
    if config.workers is not None and devices.device not in ("auto", "cpu"):
        raise ValueError(f"--workers starts processes on the CPU; leave out --workers or --device {devices.device}")
