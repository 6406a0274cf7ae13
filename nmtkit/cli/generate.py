"""`nmtkit generate`: text in, translations out, one per line and in order."""

import dataclasses
import json
import math
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from itertools import chain, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import click

from nmtkit import registry
from nmtkit.cli.command import Command, stderr
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
@click.option("--prefix", type=Path, metavar="FILE", help="A line for each input line: how its translation begins.")
@click.option(
    "--constraints",
    type=Path,
    metavar="FILE",
    help="A line for each input line: phrases, tab-separated, that its translation must hold.",
)
@click.option(
    "--avoid",
    type=Path,
    metavar="FILE",
    help="A line for each input line: phrases, tab-separated, that its translation must not hold.",
)
@click.option(
    "--reference",
    type=Path,
    metavar="FILE",
    help="Translations for --score-reference.  [default: those of DATA]",
)
@click.option("--source-tag", metavar="TAG", help="Put this symbol of the vocabulary before every line, e.g. <2de>.")
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
    help="Type of matrix products.  [default: fp32 on a CPU, bf16 on a GPU]",
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
    torchrun --nproc-per-node 8 -m nmtkit generate --path averaged.pt < in > out

    On a GPU, beam and greedy search by the Transformer run as CUDA graphs over slots, each filled again when its
    sentence is done; sampling, constraints and prefixes, diverse groups, --no-repeat-ngram, --alignment and other
    models search batch by batch.
    """
    generate(**settings)


command.params.extend(registry.flags(SearchOptions(), "Search"))


def generate(
    data: Path | None,
    paths: tuple[Path, ...],
    gen_subset: str | None,
    inputs: tuple[Path, ...],
    prefix: Path | None,
    constraints: Path | None,
    avoid: Path | None,
    reference: Path | None,
    source_tag: str | None,
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
    options = registry.derive(SearchOptions(), registry.on_command_line(search), "the command line")
    check_inputs(data, gen_subset, inputs, reference, source_tag, options, format)

    import torch

    from nmtkit.generation.ranks import place, spread, together
    from nmtkit.generation.translator import WINDOW, Translator
    from nmtkit.generation.workers import Workers

    registry.load_installed_plugins()
    for plugin in plugins:
        registry.load_plugin(plugin)
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() and workers == 1 else "cpu"
    device = place(device, workers)
    if workers > 1:
        if device != "cpu" or threads not in (None, 1):
            raise ValueError("--workers are CPU processes of one thread each; leave out --device and --threads")
        threads = 1
    if threads is not None:
        torch.set_num_threads(threads)
    with ExitStack() as stack:
        ranks = stack.enter_context(together())
        translator = Translator.load(
            paths, device, precision, max_tokens=max_tokens, max_source_len=max_source_len, long_lines=long_lines
        )
        if source_tag is not None:
            translator.tokenizer.check_tag(source_tag)
        runner = spread(translator.runner(options))
        if runner is None:  # this process has had its share
            return
        split = None if data is None else open_split(data, gen_subset or "test", translator, paths[0])
        beside = Beside(prefix=prefix, required=constraints, avoided=avoid, reference=reference)
        if split is None and not inputs and sys.stdin.isatty() and not beside.files and ranks == 1:
            converse(translator, options, source_tag)
            return
        if workers > 1:
            runner = stack.enter_context(Workers(translator, options, workers)).run
        if split is not None:
            windows = requests_of_split(split, WINDOW * ranks, options.score_reference)
        else:
            windows = requests_of_text(inputs, WINDOW * ranks, source_tag)
        translations = translator.run(beside.add_to(windows), options, runner)
        write(translations, format, scores=options.score_reference)


def check_inputs(
    data: Path | None,
    gen_subset: str | None,
    inputs: Sequence[Path],
    reference: Path | None,
    source_tag: str | None,
    options: SearchOptions,
    format: str,
) -> None:
    """Raises ValueError for flags that do not go together, naming them."""
    if data is None and gen_subset is not None:
        raise ValueError("--gen-subset names a part of a dataset; give its folder too")
    if data is not None and inputs:
        raise ValueError("give either a dataset or --input, not both")
    if data is not None and source_tag is not None:
        raise ValueError("--source-tag is for raw text; a dataset has its tags already")
    if options.score_reference and (data is None) == (reference is None):
        raise ValueError("--score-reference scores the references of a dataset, or those of --reference FILE")
    if reference is not None and not options.score_reference:
        raise ValueError("--reference is for --score-reference; to score text against it, use nmtkit score")
    if format == "text" and options.nbest > 1 and options.mbr is None:
        raise ValueError("--nbest above 1 needs --format jsonl: text has one translation for each line")
    if format == "text" and options.alignment is not None:
        raise ValueError("--alignment needs --format jsonl: text has no place for it")


def open_split(folder: Path, subset: str, translator: "Translator", checkpoint: Path) -> "Split":
    from nmtkit.data.binarized import Dataset

    dataset = Dataset.open(folder)
    if dataset.tokenizer.fingerprint != translator.tokenizer.fingerprint:
        raise ValueError(
            f"{folder} was made with another tokenizer than {checkpoint} was trained with; "
            "give the dataset it was trained on, or the raw text with --input"
        )
    return dataset[subset]


# --- what comes in --------------------------------------------------------------------------------------------------


def requests_of_split(split: "Split", window: int, with_references: bool) -> Iterator[list["Request"]]:
    from nmtkit.generation.translator import Request

    try:
        texts: Sequence[str] | None = split.source_lines()
    except ValueError:  # no raw text of a training set is kept
        texts = None
    references = split.references() if with_references else None
    for start in range(0, len(split), window):
        rows = range(start, min(start + window, len(split)))
        ids = [split.source.sentence(row) for row in rows]
        sources = [split.tokenizer.decode_source(one) for one in ids] if texts is None else texts[start : rows.stop]
        yield [
            Request(source, one, reference=None if references is None else references[row])
            for row, source, one in zip(rows, sources, ids, strict=True)
        ]


def requests_of_text(inputs: Sequence[Path], window: int, tag: str | None) -> Iterator[list["Request"]]:
    from nmtkit.generation import incoming

    if inputs:
        windows: Iterable[list[str]] = chain.from_iterable(incoming.from_file(path, window) for path in inputs)
    else:
        windows = incoming.from_stream(sys.stdin.buffer, "standard input", window)
    for lines in windows:
        yield [request_of(line, tag) for line in lines]


def request_of(line: str, tag: str | None) -> "Request":
    """An empty line stays empty, whatever the tag."""
    from nmtkit.generation.translator import Request

    return Request(f"{tag} {line}" if tag is not None and line.strip() else line)


class Beside:
    """Files of one line for each input line: field of Request -> file."""

    def __init__(self, **files: Path | None) -> None:
        self.files = {name: path for name, path in files.items() if path is not None}

    def add_to(self, windows: Iterable[list["Request"]]) -> Iterator[list["Request"]]:
        """Raises ValueError, once the shorter of a file and the input has ended, naming the file and both counts."""
        from nmtkit.generation import incoming

        streams = {name: chain.from_iterable(incoming.from_file(path, 1024)) for name, path in self.files.items()}
        count = 0
        for window in windows:
            columns = {name: list(islice(stream, len(window))) for name, stream in streams.items()}
            for name, lines in columns.items():
                if len(lines) < len(window):
                    raise ValueError(f"{self.files[name]} has {count + len(lines)} lines, fewer than the input")
            count += len(window)
            yield [
                dataclasses.replace(request, **{name: field_of(name, lines[row]) for name, lines in columns.items()})
                for row, request in enumerate(window)
            ]
        for name, stream in streams.items():
            if next(stream, None) is not None:
                raise ValueError(f"{self.files[name]} has more lines than the input, which has {count}")


def field_of(name: str, line: str) -> Any:
    return [phrase for phrase in line.split("\t") if phrase.strip()] if name in ("required", "avoided") else line


def converse(translator: "Translator", options: SearchOptions, tag: str | None) -> None:
    """A prompt: translations go to stdout, their scores and alignments to stderr. Ends with the input."""
    options = dataclasses.replace(options, alignment="hard")
    stderr.print("Type a line to translate; Ctrl-D ends.", style="dim")
    while True:
        stderr.print("> ", end="", style="bold")
        line = sys.stdin.readline()
        if not line:
            return
        request = request_of(line.rstrip("\n"), tag)
        try:
            translation = next(iter(translator.stream([request], options)))
        except ValueError as error:  # an architecture without attention
            if options.alignment is None:
                raise
            stderr.print(f"no alignment: {error}", style="dim", markup=False)
            options = dataclasses.replace(options, alignment=None)
            translation = next(iter(translator.stream([request], options)))
        encoded = translator.tokenizer.encode_source([request.source])
        source = translator.tokenizer.source_pieces(encoded.ids[:-1].tolist())
        for output in translation.hypotheses:
            write([dataclasses.replace(translation, hypotheses=[output])], "text", scores=False)
            pairs = [f"{source[int(i)]}→{output.pieces[int(j)]}" for i, j in output.alignment or []]
            stderr.print(f"  {output.score:.3f}  {' '.join(pairs)}", style="dim", markup=False, highlight=False)


# --- what goes out --------------------------------------------------------------------------------------------------


def write(translations: Iterable["Translation"], format: str, scores: bool) -> None:
    """A line for each translation, flushed at once; with `scores`, text is the score instead."""
    out = sys.stdout.buffer
    with ExitStack() as stack:
        show = stderr.is_terminal and not sys.stdout.isatty()
        status = stack.enter_context(stderr.status("Translating")) if show else None
        for count, translation in enumerate(translations, 1):
            if format == "jsonl":
                line = json.dumps(plain(translation), ensure_ascii=False)
            else:
                line = f"{translation.hypotheses[0].score:.6f}" if scores else translation.text
            out.write(line.encode() + b"\n")
            out.flush()
            if status is not None and count % 100 == 0:
                status.update(f"{count:,} lines translated")


def plain(translation: "Translation") -> dict[str, Any]:
    """As JSON has it: `id`, `source`, `hypotheses`, each with `text`, `pieces`, `score` and `log_probability`.

    `alignment` and `utility` are there when asked for. JSON knows no infinity: the score of a hypothesis that
    overflowed is null.
    """
    hypotheses = [
        {name: None if isinstance(value, float) and not math.isfinite(value) else value
         for name, value in dataclasses.asdict(one).items() if value is not None}
        for one in translation.hypotheses
    ]  # fmt: skip
    return {"id": translation.id, "source": translation.source, "hypotheses": hypotheses}
