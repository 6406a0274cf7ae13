"""Quality against speed and size: which model, beam, precision and shortlist is best for a budget?

    python benchmarks/pareto.py --text m30k --models teacher=averaged.pt student=student.pt --figure pareto.png

Each model translates the test set (`--text`) with every beam and precision, and with its shortlist if the checkpoint
has one; beside it runs CTranslate2 with the same weights, if it supports the model. All systems are in one process of
one thread and take turns. `--lines` is the number of lines at a time. The table has BLEU, chrF, tokens of the reference
per core-second, and bytes on disk: the checkpoint without training state, or the converted model. A system is on the
frontier if no other system is both better in BLEU and faster.

--figure draws BLEU against both costs (needs nmtkit[plots]); `--output` writes all figures as JSON.
"""

import argparse
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from harness import Report, Row, Workspace, chosen, in_turns, nmtkit, parser

import nmtkit as api
from nmtkit import checkpoint, models
from nmtkit.scoring.metrics import score

PRECISIONS = {"fp32": "float32", "int8": "int8"}  # ours -> CTranslate2's compute type
System = Callable[[], list[str]]  # translates all lines


def groups(lines: Sequence[str], size: int) -> list[list[str]]:
    return [list(lines[start : start + size]) for start in range(0, len(lines), size)]


def nmtkit_system(path: Path, precision: Any, beam: int, shortlist: bool, lines: list[str], size: int) -> System:
    model = api.load(path, precision=precision, threads=1)

    def run() -> list[str]:
        results = [model.translate(group, beam=beam, shortlist=shortlist, lenpen=0.0) for group in groups(lines, size)]
        return [text for group in results for text in group]

    return run


def ctranslate2_system(folder: Path, precision: str, beam: int, lines: list[str], size: int) -> System:
    import ctranslate2
    import sentencepiece

    translator = ctranslate2.Translator(
        str(folder), inter_threads=1, intra_threads=1, compute_type=PRECISIONS[precision]
    )
    source, target = (
        sentencepiece.SentencePieceProcessor(model_file=str(next(folder.glob(f"[{side[0]}j]*.model"))))
        for side in ("source", "target")
    )

    def run() -> list[str]:
        hypotheses = []
        for group in groups(lines, size):
            pieces = source.encode(group, out_type=str)
            hypotheses += translator.translate_batch(pieces, beam_size=beam, max_batch_size=32, length_penalty=0)
        return [target.decode(each.hypotheses[0]) for each in hypotheses]

    return run


def converted(path: Path, precision: str, folder: Path) -> Path | None:
    """Returns the model for CTranslate2, or None if CTranslate2 is missing or does not support the model."""
    try:
        from nmtkit.formats import ctranslate2

        if not folder.exists():
            ctranslate2.save(path, folder, "int8" if precision == "int8" else "float32")
    except (ImportError, ValueError) as error:
        print(f"no CTranslate2 for {path}: {error}")
        return None
    return folder


def systems_of(
    name: str, path: Path, arguments: argparse.Namespace, lines: list[str], folder: Path
) -> dict[str, tuple[System, Row]]:
    """Returns the systems of a model, each with the first columns of its row."""
    contents = checkpoint.read(path, mmap=True)
    plain = folder / f"{name}.pt"  # without the state of a training
    checkpoint.save(plain, {key: value for key, value in contents.items() if key not in ("training", "checksum")})
    result: dict[str, tuple[System, Row]] = {}

    def add(engine: str, precision: str, beam: int, shortlist: bool, size: int, make: Callable[[], System]) -> None:
        words = [engine, name, precision, f"beam {beam}", *(["shortlist"] if shortlist else [])]
        row: Row = {"engine": engine, "model": name, "precision": precision, "beam": beam, "shortlist": shortlist}
        for title in chosen({", ".join(words): None}, arguments.only):
            result[title] = make(), row | {"MB": size / 1e6}

    for precision in arguments.precisions:
        other = converted(plain, precision, folder / f"{name}-{precision}-pareto")
        for beam in arguments.beams:
            for shortlist in (False, True) if "shortlist" in contents else (False,):
                settings = plain, precision, beam, shortlist, lines, arguments.lines
                add("nmtkit", precision, beam, shortlist, plain.stat().st_size, lambda s=settings: nmtkit_system(*s))
            if other is not None:
                size = sum(file.stat().st_size for file in other.iterdir())
                given = other, precision, beam, lines, arguments.lines
                add("CTranslate2", precision, beam, False, size, lambda g=given: ctranslate2_system(*g))
    return result


def frontier(rows: Sequence[Row]) -> list[bool]:
    """Returns for each row whether no other row is at least as good in BLEU and speed, and better in one of them."""

    def point(row: Row) -> tuple[float, float]:
        return row["BLEU"], row["tok/core-s"]

    return [
        not any(
            point(other) != point(row) and all(a >= b for a, b in zip(point(other), point(row), strict=True))
            for other in rows
        )
        for row in rows
    ]


def draw(rows: Sequence[Row], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot, ticker

    figure, axes = pyplot.subplots(1, 2, figsize=(11, 4.5), sharey=True, layout="constrained")
    names = list(dict.fromkeys(row["model"] for row in rows))
    for axis, column, title in zip(axes, ("tok/core-s", "MB"), ("tokens per core-second", "MB on disk"), strict=True):
        for row in rows:
            axis.plot(
                *(row[column], row["BLEU"]),
                marker={"nmtkit": "o", "CTranslate2": "s"}[row["engine"]],
                color=f"C{names.index(row['model'])}",
                markerfacecolor=None if row["precision"] == "int8" else "none",
                markersize=5 + row["beam"] ** 0.5 + 3 * row["shortlist"],
            )
        axis.set(xlabel=title, xscale="log")
        axis.xaxis.set_major_locator(ticker.LogLocator(subs=(1, 2, 3, 5, 7)))
        axis.xaxis.set_major_formatter(ticker.StrMethodFormatter("{x:,.5g}"))
        axis.xaxis.set_minor_formatter(ticker.NullFormatter())
        axis.grid(alpha=0.3)
    axes[0].set_ylabel("BLEU")
    marks = {"nmtkit": "o", "CTranslate2": "s"}
    entries = [(name, {"color": f"C{index}", "marker": "o"}) for index, name in enumerate(names)]
    entries += [(engine, {"color": "gray", "marker": marks[engine]}) for engine in marks]
    entries += [("fp32 (int8 is filled)", {"color": "gray", "marker": "o", "markerfacecolor": "none"})]
    handles = [pyplot.Line2D([], [], linestyle="", label=label, **style) for label, style in entries]
    figure.legend(handles=handles, loc="outside lower center", ncols=len(handles))
    figure.savefig(path, dpi=150)
    pyplot.close(figure)


def main() -> None:
    flags = parser(__doc__)
    flags.add_argument("--models", nargs="+", default=[], metavar="NAME=FILE", help="default: a tiny model is trained")
    flags.add_argument("--beams", nargs="+", type=int, default=[1, 4])
    flags.add_argument("--precisions", nargs="+", choices=PRECISIONS, default=list(PRECISIONS))
    flags.add_argument("--lines", type=int, default=64, help="lines that are translated at a time")
    flags.add_argument("--figure", type=Path, help="PNG or SVG file to draw")
    arguments = flags.parse_args()
    torch.set_num_threads(1)
    if arguments.quick:
        arguments.beams, arguments.rounds = arguments.beams[:1], 1
    workspace, report = Workspace(arguments), Report(arguments)
    if arguments.models:
        paths = {name: Path(file) for name, _, file in (each.partition("=") for each in arguments.models)}
    else:
        updates = 2 if arguments.quick else 900
        path = workspace.trained("tiny", f"--arch transformer_tiny --max-update {updates} --threads 2")
        paths = {"tiny": path}
        if "shortlist" not in checkpoint.read(path, mmap=True):
            nmtkit("shortlist", str(workspace.data), "--path", str(path))
    lines, references = (workspace.lines("test", side) for side in (0, 1))
    if arguments.quick:
        lines, references = lines[:4], references[:4]
    tokenizer = models.tokenizer_of(checkpoint.load(next(iter(paths.values())), mmap=True), Path("the first model"))
    tokens = sum(map(len, tokenizer.encode_target(references).split()))
    systems: dict[str, tuple[System, Row]] = {}
    for name, path in paths.items():
        systems |= systems_of(name, path, arguments, lines, workspace.folder)
    timings = in_turns({name: run for name, (run, _) in systems.items()}, arguments.rounds)
    rows = []
    for name, (_, row) in systems.items():
        bleu, chrf = (each.value for each in score(timings[name].output, [references], ("bleu", "chrf")))
        speed = tokens / max(0.01, statistics.median(timings[name].core_seconds))
        rows.append({"system": name, **row, "BLEU": bleu, "chrF": chrf, "tok/core-s": speed})
    for row, best in zip(rows, frontier(rows), strict=True):
        row["frontier"] = best
    report.table(f"{len(lines)} lines, {arguments.lines} at a time, one thread", rows)
    if arguments.figure:
        draw(rows, arguments.figure)


if __name__ == "__main__":
    main()
