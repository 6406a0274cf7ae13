"""The demo: writes the corpus, runs the five commands as a user would, and shows the result."""

import json
import shlex
import shutil
import subprocess
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from itertools import pairwise
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from nmtkit.demo import corpus
from nmtkit.scoring.metrics import score

RECORD = "demo.json"  # marks a folder as the demo's; holds the seconds that training and the whole demo took
WRITTEN = ("data", "data-bin", "checkpoints", "averaged.pt", "test.de", RECORD)  # the demo deletes nothing else
SHOWN = 6  # translations in the closing table

# Titles, and arguments after `nmtkit`. The model is small, the learning rate high and the updates few, so that two
# cores learn it in under two minutes.
COMMANDS = (
    (
        "Preprocess: learn a vocabulary of 2,000 pieces, turn text into numbers",
        "preprocess -s en -t de --trainpref {0}/data/train --validpref {0}/data/valid --testpref {0}/data/test "
        "--destdir {0}/data-bin --vocab-size 2000",
    ),
    (
        "Train: a small Transformer",
        "train {0}/data-bin --arch transformer_tiny --encoder-layers 2 --decoder-layers 2 --d-ff 512 --dropout 0 "
        "--lr-scheduler polynomial --lr 0.004 --warmup-updates 100 --batch-tokens 1500 --max-update 700 "
        "--save-interval-updates 20 --metrics none --save-dir {0}/checkpoints",
    ),
    (
        "Average the last checkpoints",
        "average-checkpoints {0}/checkpoints --last 3 --output {0}/averaged.pt",
    ),
    (
        "Generate: translate 400 sentences with combinations of words never seen",
        "generate {0}/data-bin --gen-subset test --path {0}/averaged.pt > {0}/test.de",
    ),
    ("Score", "score --data {0}/data-bin --gen-subset test --sys {0}/test.de"),
)


@dataclass(frozen=True)
class Step:
    """One command, to be shown and run; `output` is the file its standard output goes to."""

    title: str
    arguments: Sequence[str]
    output: Path | None = None


def steps(folder: Path) -> list[Step]:
    """Returns the five commands."""
    result = []
    for title, command in COMMANDS:
        command, _, output = command.format(shlex.quote(str(folder))).partition(" > ")
        result.append(Step(title, shlex.split(command), Path(*shlex.split(output)) if output else None))
    return result


def run(folder: Path, program: Sequence[str], out: Console, overwrite: bool = False) -> None:
    """Runs the demo in `folder`, showing commands as calls of `program` (`nmtkit`, or `python -m nmtkit`).

    Where the demo has run before, only its result is shown again, unless `overwrite` is set. A demo that was
    interrupted starts again. Raises FileExistsError when `folder` holds something else, ValueError when a command
    fails.
    """
    if (folder / RECORD).exists():
        if not overwrite and (seconds := finished(folder)):
            conclude(folder, program, out, **seconds)
            again = shlex.join([*program, "demo", *(() if str(folder) == "nmtkit-demo" else ("--dir", str(folder)))])
            out.print("\nThis is the result of an earlier run. To run the demo again:", highlight=False)
            out.print(Text(f"$ {again} --overwrite", style="green"), soft_wrap=True)
            return
        out.print(f"Starting again in {folder}, which holds {'an earlier' if overwrite else 'an unfinished'} demo.")
        for path in (folder / name for name in WRITTEN):
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)
    elif folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise FileExistsError(f"{folder} exists and is no demo's; remove it, or name another folder with --dir")
    begin = time.monotonic()
    (folder / "data").mkdir(parents=True)
    (folder / RECORD).write_text("{}\n")
    pairs = corpus.generate()
    corpus.write(pairs, folder / "data")
    introduce(pairs, folder, out)
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
    """Returns the seconds that a finished demo took, or None where something of it is missing."""
    try:
        seconds = json.loads((folder / RECORD).read_text())
        lengths = {len(lines_of(folder / name)) for name in ("test.de", "data/test.en", "data/test.de")}
        return {name: float(seconds[name]) for name in ("training", "total")} if len(lengths) == 1 else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def lines_of(path: Path) -> list[str]:
    return path.read_text(encoding="utf-8").split("\n")[:-1]


def call(step: Step) -> None:
    """Runs the command; its output goes where ours goes. Raises ValueError when it fails."""
    arguments = [sys.executable, "-m", "nmtkit", *step.arguments]
    if step.output:
        with step.output.open("wb") as file:
            status = subprocess.run(arguments, stdout=file).returncode
    else:
        status = subprocess.run(arguments).returncode
    if status:
        raise ValueError(f"the demo ends here, since `nmtkit {step.arguments[0]}` failed; its message is above")


# --- on the screen --------------------------------------------------------------------------------------------------


def heading(text: str) -> Text:
    return Text(f"\n{text}", style="bold cyan")


def example(sources: Sequence[str], count: int) -> list[int]:
    """Returns the indices of the first `count` sentences of middling length."""
    return [index for index, text in enumerate(sources) if 40 <= len(text) <= 72][:count]


def introduce(pairs: corpus.Corpus, folder: Path, out: Console) -> None:
    out.print(heading("The demo corpus"))
    out.print(
        f"{len(pairs.train):,} English sentences and their German translations to train on, {len(pairs.test)} to test "
        f"with, made by a small grammar and written to {folder}/data. For example:\n",
        highlight=False,
    )
    for index in example([pair.german for pair in pairs.train], 3):
        out.print(Text(f"  {pairs.train[index].english}\n  {pairs.train[index].german}\n"))


def show_step(number: int, step: Step, program: Sequence[str], out: Console) -> None:
    out.print(heading(f"{number}. {step.title}"))
    out.print(Text(command_line(step, program, out.width if out.is_terminal else None), style="green"), soft_wrap=True)
    out.file.flush()  # the command's own output must come after this


def command_line(step: Step, program: Sequence[str], width: int | None) -> str:
    """Returns the command as a shell takes it, broken before flags where it is wider than `width`."""
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
    """Shows translations and scores of a finished demo; `training` and `total` are seconds."""
    sources, references = lines_of(folder / "data/test.en"), lines_of(folder / "data/test.de")
    translations = lines_of(folder / "test.de")
    show_translations(sources, translations, references, out)
    out.print(heading("What the score means"))
    known = list(zip(lines_of(folder / "data/train.en"), lines_of(folder / "data/train.de"), strict=True))
    systems = {
        f"this model, trained for {training:.0f} seconds": translations,
        "the nearest training sentence's German": nearest_translations(sources, known),
        "the English source as it is": sources,
    }
    table = Table("", box=None, pad_edge=False)
    for name in ("BLEU", "chrF2"):
        table.add_column(name, justify="right")
    for name, lines in systems.items():
        table.add_row(name, *(f"{result.value:.1f}" for result in score(lines, [references], ("bleu", "chrf"))))
    out.print(table)
    equal = sum(translation == reference for translation, reference in zip(translations, references, strict=True))
    out.print(f"{equal} of {len(references)} translations equal their reference to the letter.", highlight=False)
    by_hand = shlex.join([*program, "generate", "--path", str(folder / "averaged.pt")])
    valid = lines_of(folder / "data/valid.en")
    out.print(heading(f"Done in {total:.0f} seconds; everything is in {folder}. Your turn:"))
    out.print(Text(f"$ echo {shlex.quote(valid[example(valid, 1)[0]])} |\n    {by_hand}", style="green"))


def show_translations(
    sources: Sequence[str], translations: Sequence[str], references: Sequence[str], out: Console
) -> None:
    """Shows the first few that fit the screen, and among them up to two that differ from their reference."""
    width = min(out.width, 120) - 14
    fitting = [i for i, text in enumerate(references) if 48 <= len(text) <= width and len(sources[i]) <= width]
    wrong = [i for i in fitting if translations[i] != references[i] and len(translations[i]) <= width][:2]
    right = [i for i in fitting if translations[i] == references[i]][: SHOWN - len(wrong)]
    out.print(heading("Translations beside their references"))
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
    """Returns the text, styled where its words differ from those of `other`."""
    words = text.split()
    plain = set[int]()
    for block in SequenceMatcher(None, words, other.split(), autojunk=False).get_matching_blocks():
        plain.update(range(block.a, block.a + block.size))
    return Text(" ").join(Text(word, style="" if index in plain else style) for index, word in enumerate(words))


# --- a baseline that knows no grammar -------------------------------------------------------------------------------


def nearest_translations(sources: Sequence[str], known: Sequence[tuple[str, str]]) -> list[str]:
    """Returns for each source the translation of the known (source, translation) whose source is most similar.

    Similarity is the F1 score of words and pairs of neighbouring words in common; of equals the first is taken.
    """
    postings: dict[tuple[str, ...], list[tuple[int, int]]] = defaultdict(list)  # n-gram -> sentences and counts
    sizes = []
    for index, (source, _) in enumerate(known):
        grams = _grams(source)
        sizes.append(grams.total())
        for gram, count in grams.items():
            postings[gram].append((index, count))
    nearest = []
    for source in sources:
        grams = _grams(source)
        shared: Counter[int] = Counter()
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
