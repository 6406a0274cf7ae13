"""Quality against speed and size: which engine, model, beam, precision and shortlist is best for a budget?

    python benchmarks/pareto.py --text m30k --models teacher=averaged.pt student=student.pt --figure pareto.png \\
        --marian marianvenv/bin/pymarian --slimt slimtvenv/bin/slimt

Each model translates the test set (`--text`) with every beam and precision, with and without its shortlist if the
checkpoint has a shortlist. Several engines run the same weights:

- nmtkit with its default engine: the compiled search, if numba is installed;
- CTranslate2, without shortlist, if it is installed in the environment of nmtkit;
- Marian, if `--marian` is the path of the command pymarian in its environment (`pip install pymarian`). In 8 bits,
  Marian multiplies with intgemm or FBGEMM. Both are measured, with and without the shortlist;
- slimt, if `--slimt` is the path of the command slimt in its environment (`pip install slimt`, Python 3.11). It has
  greedy search and 8-bit weights only. The first 100 lines of the training text determine its quantization scales.

Each system has one thread, and all take turns. `--lines` is the number of lines at a time. The table has BLEU, chrF,
tokens of the reference per core-second, and bytes on disk: the checkpoint without training state (in 8 bits for int8),
or the exported model. A system is on the frontier if no other system is both better in BLEU and faster. A second table
has the reasons why an engine cannot run a system. Exports in `--folder` are used again: give a new folder after a new
training.

`--figure` draws BLEU against both costs, without systems far below the best (needs nmtkit[plots]). A line is the
frontier of an engine; the fastest system of each engine is named. `--output` writes all numbers as JSON, and
`--drawn-from FILE` draws the figure from such a file without measuring.
"""

import argparse
import hashlib
import inspect
import json
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from importlib.util import find_spec
from itertools import product
from pathlib import Path
from typing import Any

import torch
from harness import Report, Row, Server, Workspace, chosen, command, in_turns, nmtkit, parser

import nmtkit as api
from nmtkit.data import checkpoint_file
from nmtkit.models import building, checkpoint
from nmtkit.models.architectures.transformer_config import TransformerConfig
from nmtkit.models.formats import bergamot, lexical_shortlist, marian_export
from nmtkit.scoring.metrics import score

PRECISIONS = {"fp32": "float32", "int8": "int8"}  # nmtkit's precision -> CTranslate2's compute type
SYMBOLS = {
    "nmtkit": "o",
    "CTranslate2": "s",
    "Marian": "^",
    "Marian intgemm": "^",
    "Marian FBGEMM": "v",
    "slimt": "D",
}
System = Callable[[], list[str]]  # translates all lines
DRAWN = 2.0  # systems more than this many BLEU below the best are not drawn
WIDTH, TEXT_SIZE = 8.8, 11.5  # in inches and points: letters look as large as the text of a page 880 pixels wide


@dataclass
class Model:
    """A checkpoint, the lines to translate, lines for calibration, and a folder for the models of other engines."""

    name: str
    path: Path
    folder: Path
    arguments: argparse.Namespace
    lines: list[str]
    calibration: list[str]

    @cached_property
    def contents(self) -> dict[str, Any]:
        return dict(checkpoint_file.read(self.path, mmap=True))

    @cached_property
    def plain(self) -> Path:
        """Returns a copy of the checkpoint without training state."""
        path = self.folder / f"{self.name}.pt"
        checkpoint_file.save(
            path, {key: self.contents[key] for key in self.contents if key not in ("training", "checksum")}
        )
        return path

    @cached_property
    def quantized(self) -> Path:
        """Returns a copy of the checkpoint with 8-bit weights."""
        path = self.folder / f"{self.name}-int8.pt"
        path.unlink(missing_ok=True)
        checkpoint.export(checkpoint.load(self.plain), path, True)
        return path

    @property
    def shortlists(self) -> tuple[bool, ...]:
        return (False, True) if "shortlist" in self.contents else (False,)

    def groups(self) -> list[list[str]]:
        size = self.arguments.lines
        return [self.lines[start : start + size] for start in range(0, len(self.lines), size)]

    def system(self, translate: Callable[[list[str]], list[str]]) -> System:
        return lambda: [text for group in self.groups() for text in translate(group)]

    def exported(self, kind: str, save: Callable[[Path], None]) -> Path:
        """Returns the folder with this model for another engine. Calls `save` if the folder does not exist."""
        folder = self.folder / f"{self.name}-{kind}-pareto"
        if not folder.exists():
            save(folder)
        return folder


@dataclass
class Candidate:
    """A system that has not been started. `files` are the files that its engine reads."""

    engine: str
    precision: str
    beam: int
    shortlist: bool
    files: list[Path]
    start: Callable[[], System]


def nmtkit_systems(model: Model) -> Iterator[Candidate]:
    def start(path: Path, precision: Any, beam: int, shortlist: bool) -> System:
        loaded = api.load(path, precision=precision, threads=1)
        return model.system(partial(loaded.translate, beam=beam, shortlist=shortlist, lenpen=0.0))

    for precision in model.arguments.precisions:
        path = model.quantized if precision == "int8" else model.plain
        for beam, shortlist in product(model.arguments.beams, model.shortlists):
            make = partial(start, path, precision, beam, shortlist)
            yield Candidate("nmtkit", precision, beam, shortlist, [path], make)


def ctranslate2_systems(model: Model) -> Iterator[Candidate]:
    import ctranslate2
    import sentencepiece

    from nmtkit.models.formats import ctranslate2 as export

    def start(folder: Path, precision: str, beam: int) -> System:
        options = {"inter_threads": 1, "intra_threads": 1, "compute_type": PRECISIONS[precision]}
        translator = ctranslate2.Translator(str(folder), **options)
        source, target = (
            sentencepiece.SentencePieceProcessor(model_file=str(next(folder.glob(f"[{side[0]}j]*.model"))))
            for side in ("source", "target")
        )

        def translate(group: list[str]) -> list[str]:
            pieces = source.encode(group, out_type=str)
            results = translator.translate_batch(pieces, beam_size=beam, max_batch_size=32, length_penalty=0)
            return [target.decode(result.hypotheses[0]) for result in results]

        return model.system(translate)

    for precision in model.arguments.precisions:
        quantization: Any = PRECISIONS[precision]
        folder = model.exported(f"ct2-{precision}", lambda path, q=quantization: export.save(model.plain, path, q))
        for beam in model.arguments.beams:
            make = partial(start, folder, precision, beam)
            yield Candidate("CTranslate2", precision, beam, False, list(folder.iterdir()), make)


def python_of(program: Path) -> Path:
    """Returns the Python of the environment in which a command is installed."""
    return program.absolute().parent / "python"


def other_engine(model: Model, engine: str, program: Path, settings: dict[str, Any]) -> System:
    script = str(Path(__file__).with_name("other_engines.py"))
    return model.system(Server(script, [engine, settings], python=python_of(program)).ask)


def marian_systems(model: Model) -> Iterator[Candidate]:
    program: Path = model.arguments.marian
    folder = model.exported("marian", lambda path: marian_export.save(model.plain, path))
    vocabularies = [folder / name for name in marian_export.vocabularies(tokenizer_of(model))]
    shortlist_file = folder / "lex.s2t.bin"
    if len(model.shortlists) > 1 and not shortlist_file.exists():
        tokenizer = tokenizer_of(model)
        lexical_shortlist.write_binary(shortlist_file, bergamot.shortlist_of(model.contents, tokenizer), tokenizer)
    instructions = "avx512" if "avx512bw" in Path("/proc/cpuinfo").read_text() else "avx2"
    types = {"Marian": "float32", "Marian intgemm": f"intgemm8{instructions}"}
    types |= {"Marian FBGEMM": f"packed8{instructions}"}
    for engine, gemm in types.items():
        precision = "fp32" if gemm == "float32" else "int8"
        if precision not in model.arguments.precisions:
            continue
        weights = folder / ("model.npz" if precision == "fp32" else f"{gemm}.bin")
        if not weights.exists():
            command([str(program), "convert", "-f", str(folder / "model.npz"), "-t", str(weights), "--gemm-type", gemm])
        for beam in model.arguments.beams:
            for shortlist in model.shortlists:
                files = [weights, *vocabularies, *([shortlist_file] if shortlist else [])]
                settings: Row = {"models": str(weights), "vocabs": [str(vocabularies[0]), str(vocabularies[-1])]}
                settings |= {"beam-size": beam, "normalize": 0, "word-penalty": 0, "cpu-threads": 1, "workspace": 500}
                settings |= {"mini-batch": 64, "maxi-batch": 100, "maxi-batch-sort": "src", "quiet": True}
                settings |= {"shortlist": [str(shortlist_file), "false"]} if shortlist else {}
                make = partial(other_engine, model, "marian", program, settings)
                yield Candidate(engine, precision, beam, shortlist, files, make)


def slimt_systems(model: Model) -> Iterator[Candidate]:
    if "int8" not in model.arguments.precisions or 1 not in model.arguments.beams:
        return

    def save(folder: Path) -> None:
        translations = api.load(model.plain, threads=1).translate(model.calibration, beam=1)
        bergamot.save(model.plain, folder, list(zip(model.calibration, map(str, translations), strict=True)))

    folder = model.exported("bergamot", save)
    config = building.from_checkpoint(model.plain)[0].config
    assert isinstance(config, TransformerConfig)
    files = {
        "model": folder / bergamot.MODEL,
        "vocabulary": folder / bergamot.VOCABULARY,
        "shortlist": folder / bergamot.SHORTLIST,
    }
    settings = {name: str(path) for name, path in files.items()}
    sizes = {
        "encoder_layers": config.encoder_layers,
        "decoder_layers": config.decoder_layers,
        "num_heads": config.heads,
    }
    make = partial(other_engine, model, "slimt", model.arguments.slimt, settings | sizes)
    yield Candidate("slimt", "int8", 1, len(model.shortlists) > 1, list(files.values()), make)


def tokenizer_of(model: Model) -> Any:
    return building.tokenizer_of(model.contents, model.path)


ENGINES: dict[str, Callable[[Model], Iterator[Candidate]]] = {
    "nmtkit": nmtkit_systems,
    "CTranslate2": ctranslate2_systems,
    "Marian": marian_systems,
    "slimt": slimt_systems,
}
LACKS = {
    "CTranslate2": "shortlists (only one vocabulary map for all sentences)",
    "slimt": "fp32, beams, decoders without SSRUs, two vocabularies; each target token has the encoding of position 0 "
    "(slimt 0.1.0), so its translations and their lengths differ from Marian's",
}


def systems_of(model: Model) -> tuple[dict[str, tuple[System, Row]], list[Row]]:
    """Returns the systems of a model with the first columns of their rows, and the reasons why systems are missing."""
    systems: dict[str, tuple[System, Row]] = {}
    missing: list[Row] = []
    for engine, candidates in ENGINES.items():
        reason = LACKS.get(engine)
        try:
            if getattr(model.arguments, engine.lower(), True) is None:
                raise ValueError(f"not asked for: give --{engine.lower()}")
            for each in candidates(model):
                words = [each.engine, model.name, each.precision, f"beam {each.beam}"]
                title = ", ".join([*words, *(["shortlist"] if each.shortlist else [])])
                row: Row = {"engine": each.engine, "model": model.name, "precision": each.precision, "beam": each.beam}
                row |= {"shortlist": each.shortlist, "MB": sum(file.stat().st_size for file in each.files) / 1e6}
                if chosen({title: None}, model.arguments.only):
                    systems[title] = each.start(), row
        except (ImportError, ValueError) as error:
            reason = str(error)
        if reason is not None:
            missing.append({"engine": engine, "model": model.name, "cannot do": reason})
    return systems, missing


def frontier(rows: Sequence[Row], cost: str = "tok/core-s", less_is_better: bool = False) -> list[bool]:
    """Returns for each row whether no other row is at least as good in BLEU and `cost`, and better in one of them."""

    def point(row: Row) -> tuple[float, float]:
        return row["BLEU"], -row[cost] if less_is_better else row[cost]

    return [
        not any(
            point(other) != point(row) and all(a >= b for a, b in zip(point(other), point(row), strict=True))
            for other in rows
        )
        for row in rows
    ]


def stored_rows(path: Path) -> list[Row]:
    """Returns the rows that `--output` has written to a file."""
    tables = json.loads(path.read_text(encoding="utf-8"))["tables"]
    return [row for rows in tables.values() for row in rows if "BLEU" in row]


def labelled(rows: Sequence[Row]) -> list[Row]:
    """Returns the fastest row of each engine, from the fastest to the slowest."""
    fastest: dict[str, Row] = {}
    for row in sorted(rows, key=lambda row: -row["tok/core-s"]):
        fastest.setdefault(row["engine"], row)
    return list(fastest.values())


def draw(rows: Sequence[Row], path: Path) -> None:
    """Draws all systems, the frontier of each engine as a line, and the numbers and names of `labelled` systems."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import font_manager, pyplot, ticker

    known = {font.name for font in font_manager.fontManager.ttflist}
    families = [name for name in ("Noto Sans", "Segoe UI", "Helvetica") if name in known] + ["DejaVu Sans"]
    rows = drawn_rows(rows)
    engines = list(dict.fromkeys(row["engine"] for row in rows))
    numbered = labelled(rows)
    with pyplot.rc_context({"font.family": families, "font.size": TEXT_SIZE}):
        figure, axes = pyplot.subplots(1, 2, figsize=(WIDTH, 0.62 * WIDTH), sharey=True, layout="constrained")
        columns = (("tok/core-s", "tokens per second of a core", False), ("MB", "MB on disk", True))
        for axis, (cost, title, less_is_better) in zip(axes, columns, strict=True):
            for index, engine in enumerate(engines):
                own = [row for row in rows if row["engine"] == engine]
                best = [row for row, on in zip(own, frontier(own, cost, less_is_better), strict=True) if on]
                best.sort(key=lambda row: (row[cost], row["BLEU"] if less_is_better else -row["BLEU"]))
                style: dict[str, Any] = {"color": f"C{index}", "marker": SYMBOLS[engine], "markersize": 5}
                points = [(row[cost], row["BLEU"]) for row in own]
                axis.plot(*zip(*points, strict=True), linestyle="", alpha=0.3, **style)
                points = [(row[cost], row["BLEU"]) for row in best]
                axis.plot(*zip(*points, strict=True), linewidth=2, label=engine, **style)
            for number, row in enumerate(numbered, start=1):
                axis.annotate(
                    str(number), (row[cost], row["BLEU"]), (0, 11), textcoords="offset points",
                    ha="center", va="center", fontsize=0.8 * TEXT_SIZE, fontweight="bold",
                    bbox={"boxstyle": "circle,pad=0.2", "facecolor": "white", "edgecolor": "0.5"},
                )  # fmt: skip
            axis.set(xlabel=title, xscale="log")
            axis.xaxis.set_major_locator(ticker.LogLocator(subs=(1, 2, 5)))
            axis.xaxis.set_major_formatter(ticker.StrMethodFormatter("{x:,.5g}"))
            axis.xaxis.set_minor_formatter(ticker.NullFormatter())
            axis.grid(alpha=0.3)
            axis.margins(y=0.12)
        axes[0].set_ylabel("BLEU")
        names = [f"{number} {name_of(row)}" for number, row in enumerate(numbered, start=1)]
        figure.legend(*axes[0].get_legend_handles_labels(), loc="outside upper center", ncols=3, frameon=False)
        figure.supxlabel("\n".join(names), fontsize=TEXT_SIZE, x=0.02, ha="left", linespacing=1.4)
        figure.savefig(path, dpi=200, metadata={"Source": drawing_digest(rows)})
        pyplot.close(figure)


def drawn_rows(rows: Sequence[Row]) -> list[Row]:
    return [row for row in rows if row["BLEU"] >= max(other["BLEU"] for other in rows) - DRAWN]


def drawing_digest(rows: Sequence[Row]) -> str:
    """Returns the digest of the numbers and the code of the figure, which the file has as metadata."""
    code = "".join(inspect.getsource(each) for each in (frontier, labelled, draw, name_of))
    return hashlib.sha256(f"{code}\n{json.dumps(rows, sort_keys=True)}".encode()).hexdigest()


def name_of(row: Row) -> str:
    words = [row["engine"] + ":", row["model"] + ",", row["precision"] + ",", f"beam {row['beam']}"]
    return " ".join(words) + ", shortlist" * bool(row["shortlist"])


def main() -> None:
    flags = parser(__doc__)
    default = "default: two small models are trained"
    flags.add_argument("--models", nargs="+", default=[], metavar="NAME=FILE", help=default)
    flags.add_argument("--beams", nargs="+", type=int, default=[1, 4])
    flags.add_argument("--precisions", nargs="+", choices=PRECISIONS, default=list(PRECISIONS))
    flags.add_argument("--lines", type=int, default=64, help="lines that are translated at a time")
    flags.add_argument("--test-lines", type=int, help="lines of the test set; default: all")
    flags.add_argument("--marian", type=Path, metavar="PROGRAM", help="path of pymarian in its environment")
    flags.add_argument("--slimt", type=Path, metavar="PROGRAM", help="path of slimt in its environment")
    flags.add_argument("--figure", type=Path, help="PNG or SVG file to draw")
    flags.add_argument("--drawn-from", type=Path, metavar="JSON", help="draw --figure from the numbers of this file")
    arguments = flags.parse_args()
    if arguments.drawn_from:
        if not arguments.figure:
            flags.error("--drawn-from needs --figure")
        draw(stored_rows(arguments.drawn_from), arguments.figure)
        return
    torch.set_num_threads(1)
    if arguments.quick:
        arguments.beams, arguments.rounds = arguments.beams[:1], 1
    workspace, report = Workspace(arguments), Report(arguments)
    if find_spec("numba"):
        nmtkit("precompile")  # else PyTorch translates until the search is compiled
    if arguments.models:
        paths = {name: Path(file) for name, _, file in (each.partition("=") for each in arguments.models)}
    else:
        updates = 2 if arguments.quick else 900
        flags_of = {"tiny": "transformer_tiny --positions sinusoidal_fairseq", "student": "student_tiny"}
        paths = {
            name: workspace.trained(f"pareto-{name}", f"--arch {arch} --max-update {updates} --threads 2")
            for name, arch in flags_of.items()
        }
        for path in paths.values():
            if "shortlist" not in checkpoint_file.read(path, mmap=True):
                nmtkit("shortlist", str(workspace.data), "--path", str(path))
    lines, references = (workspace.lines("test", side) for side in (0, 1))
    limit = 4 if arguments.quick else arguments.test_lines
    lines, references = lines[:limit], references[:limit]
    tokenizer = building.tokenizer_of(checkpoint.load(next(iter(paths.values())), mmap=True), Path("the first model"))
    tokens = sum(map(len, tokenizer.encode_target(references).split()))
    systems: dict[str, tuple[System, Row]] = {}
    missing: list[Row] = []
    calibration = workspace.lines("train", 0)[:100]
    for name, path in paths.items():
        model = Model(name, path, workspace.folder, arguments, lines, calibration)
        started, absent = systems_of(model)
        systems, missing = systems | started, missing + absent
    timings = in_turns({name: run for name, (run, _) in systems.items()}, arguments.rounds)
    rows = []
    for name, (_, row) in systems.items():
        bleu, chrf = (each.value for each in score(timings[name].output, [references], ("bleu", "chrf")))
        speed = tokens / max(0.01, statistics.median(timings[name].core_seconds))
        rows.append({"system": name, **row, "BLEU": bleu, "chrF": chrf, "tok/core-s": speed})
    for row, best in zip(rows, frontier(rows), strict=True):
        row["frontier"] = best
    report.table(f"{len(lines)} lines, {arguments.lines} at a time, one thread", rows)
    if missing:
        report.table("what the engines cannot do", missing)
    if arguments.figure:
        draw(rows, arguments.figure)


if __name__ == "__main__":
    main()
