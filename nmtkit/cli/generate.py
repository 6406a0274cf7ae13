"""`nmtkit generate`: text in, translations out, one per line and in order."""

import dataclasses
import json
import math
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import click

from nmtkit import registry
from nmtkit.cli.command import Command
from nmtkit.generation.options import SearchOptions

if TYPE_CHECKING:
    from nmtkit.data.binarized import Split
    from nmtkit.generation.translator import Request, Translation, Translator


@click.command(cls=Command)
@click.argument("data", required=False, type=Path)
@click.option(
    "--path",
    "paths",
    type=Path,
    multiple=True,
    required=True,
    metavar="FILE",
    help="Checkpoint; repeat it for an ensemble.",
)
@click.option("--gen-subset", metavar="NAME", help="Subset of DATA.  [default: test]")
@click.option(
    "--input",
    "inputs",
    type=Path,
    multiple=True,
    metavar="FILE",
    help="Text, perhaps compressed; repeatable.  [default: standard input, or DATA]",
)
@click.option(
    "--format",
    type=click.Choice(["text", "jsonl"]),
    default="text",
    help="text: a line for each line; jsonl: an object for each line, with all of --nbest.  [default: text]",
)
@click.option(
    "--max-source-len",
    type=click.IntRange(1),
    default=1024,
    metavar="N",
    help="Pieces of the longest line taken whole, see --long-lines.  [default: 1024, or the model's limit]",
)
@click.option(
    "--long-lines",
    type=click.Choice(["split", "cut"]),
    default="split",
    help="What becomes of a line too long.  [default: split]",
)
@click.option(
    "--max-tokens",
    type=click.IntRange(1),
    metavar="N",
    help="Source tokens searched together; changes speed, not results.  [default: by device]",
)
@click.option(
    "--precision",
    type=click.Choice(["auto", "fp32", "bf16", "int8"]),
    default="auto",
    help="Of the products.  [default: fp32 on a CPU, bf16 on a GPU]",
)
@click.option("--device", default="auto", metavar="NAME", help="cpu, cuda, cuda:1, …  [default: cuda if there is one]")
@click.option(
    "--workers",
    type=click.IntRange(1),
    default=1,
    metavar="N",
    help="CPU processes of one thread each; the fastest is one per core.  [default: 1]",
)
@click.option("--threads", type=click.IntRange(1), metavar="N", help="CPU threads of the one process.")
@click.option("--plugin", "plugins", multiple=True, metavar="FILE|MODULE", help="Import this first; repeatable.")
def command(**settings: Any) -> None:
    """Translate a subset of DATA, files, or standard input.

    \b
    nmtkit generate data-bin --path averaged.pt | nmtkit score --data data-bin
    nmtkit generate --path averaged.pt < raw.en > translated.de
    """
    generate(**settings)


command.params[-3:-3] = registry.flags(SearchOptions(), "Search")  # before those that all commands share


def generate(
    data: Path | None,
    paths: tuple[Path, ...],
    gen_subset: str | None,
    inputs: tuple[Path, ...],
    format: str,
    device: str,
    precision: Literal["auto", "fp32", "bf16", "int8"],
    workers: int,
    threads: int | None,
    plugins: tuple[str, ...],
    max_source_len: int,
    long_lines: str,
    max_tokens: int | None,
    **search: Any,
) -> None:
    if data is None and gen_subset is not None:
        raise ValueError("--gen-subset names a part of a dataset; give its folder too")
    if data is not None and inputs:
        raise ValueError("give either a dataset or --input, not both")
    given = {name: value for name, value in search.items() if value is not None}
    options = registry.derive(SearchOptions(), given, "the command line")
    if options.nbest > 1 and format == "text":
        raise ValueError("--nbest above 1 needs --format jsonl: text has one translation for each line")

    import torch

    from nmtkit.generation.translator import WINDOW, Translator
    from nmtkit.generation.workers import Workers

    registry.load_installed_plugins()
    for plugin in plugins:
        registry.load_plugin(plugin)
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if workers > 1:
        if device != "cpu" or threads not in (None, 1):
            raise ValueError("--workers are CPU processes of one thread each; leave out --device and --threads")
        threads = 1
    if threads is not None:
        torch.set_num_threads(threads)
    translator = Translator.load(
        paths, device, precision, max_tokens=max_tokens, max_source_len=max_source_len, long_lines=long_lines
    )
    split = None if data is None else open_split(data, gen_subset or "test", translator, paths[0])
    with ExitStack() as stack:
        runner = translator.runner(options)
        if workers > 1:
            runner = stack.enter_context(Workers(translator, options, workers)).run
        windows = requests_of_split(split, WINDOW) if split is not None else requests_of_text(inputs, WINDOW)
        write(translator.run(windows, options, runner), format)


def open_split(folder: Path, subset: str, translator: "Translator", checkpoint: Path) -> "Split":
    from nmtkit.data.binarized import Dataset

    dataset = Dataset.open(folder)
    if dataset.tokenizer.fingerprint != translator.tokenizer.fingerprint:
        raise ValueError(
            f"{folder} was made with another tokenizer than {checkpoint} was trained with; "
            "give the dataset it was trained on, or the raw text with --input"
        )
    return dataset[subset]


def requests_of_split(split: "Split", window: int) -> Iterator[list["Request"]]:
    from nmtkit.generation.translator import Request

    try:
        texts: Sequence[str] | None = split.source_lines()
    except ValueError:  # no raw text of a training set is kept
        texts = None
    for start in range(0, len(split), window):
        rows = range(start, min(start + window, len(split)))
        ids = [split.source.sentence(row) for row in rows]
        sources = [split.tokenizer.decode_source(one) for one in ids] if texts is None else texts[start : rows.stop]
        yield [Request(source, one) for source, one in zip(sources, ids, strict=True)]


def requests_of_text(inputs: Sequence[Path], window: int) -> Iterator[list["Request"]]:
    from nmtkit.generation import incoming
    from nmtkit.generation.translator import Request

    if inputs:
        windows: Iterable[list[str]] = chain.from_iterable(incoming.from_file(path, window) for path in inputs)
    else:
        windows = incoming.from_stream(sys.stdin.buffer, "standard input", window)
    for lines in windows:
        yield [Request(line) for line in lines]


def write(translations: Iterable["Translation"], format: str) -> None:
    """A line for each translation; it is flushed as soon as no further one is ready."""
    out = sys.stdout.buffer
    for translation in translations:
        line = translation.text if format == "text" else json.dumps(plain(translation), ensure_ascii=False)
        out.write(line.encode() + b"\n")
        out.flush()


def plain(translation: "Translation") -> dict[str, Any]:
    """As JSON has it: `id`, `source`, `hypotheses`, each with `text`, `pieces`, `score` and `log_probability`.

    JSON knows no infinity: the score of a hypothesis that overflowed is null.
    """
    hypotheses = [
        {name: None if isinstance(value, float) and not math.isfinite(value) else value for name, value in one.items()}
        for one in map(dataclasses.asdict, translation.hypotheses)
    ]
    return {"id": translation.id, "source": translation.source, "hypotheses": hypotheses}
