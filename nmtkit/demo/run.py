"""The demo: writes its corpus to files, runs the five commands, and shows the result."""

import bz2
import importlib.util
import json
import os
import shlex
import shutil
import subprocess
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from difflib import SequenceMatcher
from itertools import pairwise
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from nmtkit.config.files import parse_json
from nmtkit.demo import SHOWS_COMMANDS
from nmtkit.scoring.metrics import score

DemoCorpus = dict[str, list[tuple[str, str]]]  # subset (train, valid, test) -> English and German sentences

CORPUS = Path(__file__).with_name("corpus.tsv.bz2")  # made by examples/demo_corpus/demo_corpus.py
RECORD = "demo.json"  # file that marks a folder of the demo; holds the seconds of training and of the whole demo
# a new run in the folder of an earlier demo deletes only these files and folders
WRITTEN = ("data", "data-bin", "checkpoints", "averaged.pt", "test.de", RECORD)
SHOWN = 6  # number of translations in the final table

CAVEAT = "a small grammar made all sentences, so scores are far higher than with real text"

# Titles and arguments of the commands. A small model, a high learning rate and few updates keep training below
# two minutes on two cores.
COMMANDS = (
    (
        "Preprocess: learn a vocabulary of 2,000 pieces, and turn text into numbers",
        "preprocess -s en -t de --trainpref {0}/data/train --validpref {0}/data/valid --testpref {0}/data/test "
        "--destdir {0}/data-bin --vocab-size 2000",
    ),
    (
        "Train: a small Transformer",
        "train {0}/data-bin --arch transformer_tiny --encoder-layers 2 --decoder-layers 2 --d-ff 512 --dropout 0 "
        "--lr-scheduler polynomial --lr 0.004 --warmup-updates 100 --batch-tokens 1500 --max-update 700 "
        "--save-interval-updates 20 --metrics none --save-dir {0}/checkpoints",
    ),
    ("Average the last checkpoints", "average-checkpoints {0}/checkpoints --last 3 --output {0}/averaged.pt"),
    (
        "Generate: translate 400 sentences whose word combinations are not in the training set",
        "generate {0}/data-bin --gen-subset test --path {0}/averaged.pt > {0}/test.de",
    ),
    (f"Score: {CAVEAT}", "score --data {0}/data-bin --gen-subset test --sys {0}/test.de"),
)


def read_corpus() -> DemoCorpus:
    """Reads the demo corpus from the package."""
    corpus: DemoCorpus = {}
    for line in bz2.decompress(CORPUS.read_bytes()).decode().splitlines():
        subset, english, german = line.split("\t")
        corpus.setdefault(subset, []).append((english, german))
    return corpus


def write_corpus(corpus: DemoCorpus, folder: Path) -> None:
    """Writes `train.en`, `train.de`, `valid.en`, … into the existing `folder`."""
    for subset, pairs in corpus.items():
        for language, sentences in zip(("en", "de"), zip(*pairs, strict=True), strict=True):
            (folder / f"{subset}.{language}").write_text("".join(f"{line}\n" for line in sentences), encoding="utf-8")


@dataclass(frozen=True)
class DemoStep:
    """One command to show and run. `output` is the file that receives its standard output."""

    title: str
    arguments: Sequence[str]
    output: Path | None = None


def steps(folder: Path) -> list[DemoStep]:
    """Returns the five commands with `folder` in their paths."""
    result = []
    for title, command in COMMANDS:
        command, _, output = command.format(shlex.quote(str(folder))).partition(" > ")
        result.append(DemoStep(title, shlex.split(command), Path(*shlex.split(output)) if output else None))
    return result


def run(folder: Path, program: Sequence[str], out: Console, overwrite: bool = False) -> None:
    """Runs the demo in `folder` and shows each command as a call of `program` (`nmtkit` or `python -m nmtkit`).

    If `folder` holds a finished demo, shows the result of that demo, unless `overwrite` is set. An interrupted demo
    starts from the beginning. Raises FileExistsError if `folder` holds other files, and ValueError if a command fails.
    """
    if (folder / RECORD).exists():
        if not overwrite and (seconds := finished(folder)):
            conclude(folder, program, out, **seconds)
            again = shlex.join([*program, "demo", *(() if str(folder) == "nmtkit-demo" else ("--dir", str(folder)))])
            out.print("\nThis is the result of an earlier run. To run the demo again:", highlight=False)
            out.print(Text(f"$ {again} --overwrite", style="green"), soft_wrap=True)
            return
        out.print(f"Replacing {'an earlier' if overwrite else 'an unfinished'} demo in {folder}.", markup=False)
        for path in (folder / name for name in WRITTEN):
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)
    elif folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise FileExistsError(f"{folder} exists, but is not a demo folder; remove it, or choose another --dir")
    begin = time.monotonic()
    (folder / "data").mkdir(parents=True)
    (folder / RECORD).write_text("{}\n")
    corpus = read_corpus()
    write_corpus(corpus, folder / "data")
    introduce(corpus, folder, out)
    seconds = {}
    for number, step in enumerate(steps(folder), start=1):
        show_step(number, step, program, out)
        start = time.monotonic()
        call(step)
        seconds[step.arguments[0]] = time.monotonic() - start
    seconds = {"training": seconds["train"], "total": time.monotonic() - begin}
    (folder / RECORD).write_text(json.dumps(seconds) + "\n")
    conclude(folder, program, out, **seconds)


def finished(folder: Path) -> dict[str, float] | None:
    """Returns the recorded seconds of a finished demo, or None if a file of the demo is missing or incomplete."""
    try:
        seconds = parse_json((folder / RECORD).read_text())
        lengths = set(map(len, test_lines(folder)))
        return {name: float(seconds[name]) for name in ("training", "total")} if len(lengths) == 1 else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def lines_of(path: Path) -> list[str]:
    return path.read_text(encoding="utf-8").split("\n")[:-1]


def test_lines(folder: Path) -> list[list[str]]:
    """Returns the sources, the references and the translations of the test set."""
    return [lines_of(folder / name) for name in ("data/test.en", "data/test.de", "test.de")]


def call(step: DemoStep) -> None:
    """Runs a command. Its stdout goes to `step.output`, if set. Raises ValueError if the command fails."""
    arguments, environment = [sys.executable, "-m", "nmtkit", *step.arguments], {**os.environ, SHOWS_COMMANDS: "1"}
    with step.output.open("wb") if step.output else nullcontext() as file:
        status = subprocess.run(arguments, stdout=file, env=environment).returncode
    if status:
        raise ValueError(f"the demo stops because `nmtkit {step.arguments[0]}` failed; see its message above")


# --- on the screen --------------------------------------------------------------------------------------------------


def heading(text: str) -> Text:
    return Text(f"\n{text}", style="bold cyan")


def example(sources: Sequence[str], count: int) -> list[int]:
    """Returns the indices of the first `count` sentences of 40 to 72 characters."""
    return [index for index, text in enumerate(sources) if 40 <= len(text) <= 72][:count]


def introduce(corpus: DemoCorpus, folder: Path, out: Console) -> None:
    out.print(heading("The demo corpus"))
    train, test = len(corpus["train"]), len(corpus["test"])
    out.print(
        f"{train:,} English sentences with their German translations for training, and {test} for the test. A small "
        f"grammar generated them. They are in {folder}/data. For example:\n",
        highlight=False,
        markup=False,
    )
    for index in example([german for _, german in corpus["train"]], 3):
        english, german = corpus["train"][index]
        out.print(Text(f"  {english}\n  {german}\n"))


def show_step(number: int, step: DemoStep, program: Sequence[str], out: Console) -> None:
    out.print(heading(f"{number}. {step.title}"))
    out.print(Text(command_line(step, program, out.width if out.is_terminal else None), style="green"), soft_wrap=True)
    out.file.flush()  # flush before the command writes to the same file


def command_line(step: DemoStep, program: Sequence[str], width: int | None) -> str:
    """Returns the command as shell text. If the text is wider than `width`, adds line breaks before flags."""
    words = [shlex.join([*program, step.arguments[0]])]
    for argument in step.arguments[1:]:
        if argument.startswith("-"):
            words.append(argument)
        else:
            words[-1] += f" {shlex.quote(argument)}"
    if step.output:
        words.append(f"> {shlex.quote(str(step.output))}")
    lines = ["$ " + words[0]]
    for word in words[1:]:
        if width and len(lines[-1]) + len(word) + 3 > width:
            lines[-1] += " \\"
            lines.append("    " + word)
        else:
            lines[-1] += f" {word}"
    return "\n".join(lines)


def conclude(folder: Path, program: Sequence[str], out: Console, training: float, total: float) -> None:
    """Shows translations and scores of a finished demo. `training` and `total` are in seconds."""
    show_translations(folder, out)
    show_scores(folder, out)
    model = str(folder / "averaged.pt")
    generate, serve = (shlex.join([*program, command, "--path", model]) for command in ("generate", "serve"))
    valid = lines_of(folder / "data/valid.en")
    spent = f"Done in {total:.0f} seconds, of which training took {training:.0f}"
    out.print(heading(f"{spent}. All files are in {folder}. Translate a sentence of your own:"))
    out.print(Text(f"$ echo {shlex.quote(valid[example(valid, 1)[0]])} |\n    {generate}", style="green"))
    install = "" if importlib.util.find_spec("uvicorn") else ", after pip install 'nmtkit[serve]'"
    out.print(Text(f"The same as a web page{install}:"))
    out.print(Text(f"$ {serve}", style="green"))


def show_scores(folder: Path, out: Console) -> None:
    """Shows the scores of the model and of two baselines."""
    sources, references, translations = test_lines(folder)
    out.print(heading("What the score means"))
    known = list(zip(lines_of(folder / "data/train.en"), lines_of(folder / "data/train.de"), strict=True))
    systems = {
        "this model": translations,
        "the German of the nearest training sentence": nearest_translations(sources, known),
        "the English source, not translated": sources,
    }
    table = Table("", box=None, pad_edge=False)
    for name in ("BLEU", "chrF2"):
        table.add_column(name, justify="right")
    for name, lines in systems.items():
        table.add_row(name, *(f"{result.value:.1f}" for result in score(lines, [references], ("bleu", "chrf"))))
    out.print(table)
    out.print(f"{CAVEAT[0].upper()}{CAVEAT[1:]}.", highlight=False)
    equal = sum(translation == reference for translation, reference in zip(translations, references, strict=True))
    out.print(f"{equal} of {len(references)} translations equal their reference exactly.", highlight=False)


def show_translations(folder: Path, out: Console) -> None:
    """Shows up to SHOWN translations that fit the screen. At most a third of SHOWN differ from their reference."""
    sources, references, translations = test_lines(folder)
    width = min(out.width, 120) - 14
    fitting = [i for i, text in enumerate(references) if 48 <= len(text) <= width and len(sources[i]) <= width]
    wrong = [i for i in fitting if translations[i] != references[i] and len(translations[i]) <= width][: SHOWN // 3]
    right = [i for i in fitting if translations[i] == references[i]][: SHOWN - len(wrong)]
    out.print(heading("Translations and their references"))
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(style="dim", no_wrap=True)
    table.add_column(no_wrap=True)
    for index in right + wrong:
        if table.row_count:
            table.add_row()
        table.add_row("source", Text(sources[index], style="dim"))
        table.add_row("translation", marked(translations[index], references[index], "bold red"))
        table.add_row("reference", marked(references[index], translations[index], "bold green"))
    out.print(table)


def marked(text: str, other: str, style: str) -> Text:
    """Returns the text with `style` on the words that differ from the words of `other`."""
    words = text.split()
    blocks = SequenceMatcher(None, words, other.split(), autojunk=False).get_matching_blocks()
    plain = {index for block in blocks for index in range(block.a, block.a + block.size)}
    return Text(" ").join(Text(word, style="" if index in plain else style) for index, word in enumerate(words))


# --- a baseline without a model -----------------------------------------------------------------------------------


def nearest_translations(sources: Sequence[str], known: Sequence[tuple[str, str]]) -> list[str]:
    """Returns, for each source, the translation of the most similar source among the `known` pairs.

    The similarity of two sentences is the F1 score of their common words and word bigrams. If several sources are
    equally similar, the first source is chosen.
    """
    postings: dict[tuple[str, ...], list[tuple[int, int]]] = defaultdict(list)  # n-gram -> [(index, count), …]
    known_grams = [_grams(source) for source, _ in known]
    for index, grams in enumerate(known_grams):
        for gram, count in grams.items():
            postings[gram].append((index, count))
    sizes = [grams.total() for grams in known_grams]
    nearest = []
    for grams in map(_grams, sources):
        shared = Counter[int]()
        for gram, count in grams.items():
            for index, other in postings[gram]:
                shared[index] += min(count, other)
        size = grams.total()
        best = max(shared, key=lambda index: (shared[index] / (size + sizes[index]), -index), default=0)
        nearest.append(known[best][1])
    return nearest


def _grams(sentence: str) -> Counter[tuple[str, ...]]:
    words = sentence.lower().split()
    return Counter([*((word,) for word in words), *pairwise(words)])
