"""The demo: writes the corpus, runs the five commands as a user would, and shows what came of it."""

import shlex
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from nmtkit.demo import corpus
from nmtkit.demo.baselines import nearest_translations
from nmtkit.demo.corpus import Corpus
from nmtkit.demo.grammar import Pair

SHOWN = 6  # translations in the closing table

# A small model, a high learning rate and few updates, so that two cores learn it in under two minutes.
TRAIN_FLAGS = (
    "--arch transformer_tiny --encoder-layers 2 --decoder-layers 2 --d-ff 512 --dropout 0 --lr-scheduler polynomial "
    "--lr 0.004 --warmup-updates 100 --batch-tokens 1500 --max-update 700 --save-interval-updates 20 --no-valid-bleu"
)


@dataclass(frozen=True)
class Step:
    """One command, to be shown and run; `output` is the file its standard output goes to."""

    title: str
    arguments: Sequence[str]
    output: Path | None = None


def steps(folder: Path) -> list[Step]:
    """The five commands, as lists of arguments after `nmtkit`."""
    data, binary, checkpoints = folder / "data", folder / "data-bin", folder / "checkpoints"
    averaged, translated = folder / "averaged.pt", folder / "test.de"
    return [
        Step(
            "Preprocess: learn a vocabulary of 2,000 pieces, turn text into numbers",
            [
                *("preprocess", "-s", "en", "-t", "de", "--trainpref", f"{data}/train", "--validpref", f"{data}/valid"),
                *("--testpref", f"{data}/test", "--destdir", str(binary), "--vocab-size", "2000"),
            ],
        ),
        Step(
            "Train: a small Transformer",
            ["train", str(binary), *shlex.split(TRAIN_FLAGS), "--save-dir", str(checkpoints)],
        ),
        Step(
            "Average the last checkpoints",
            ["average-checkpoints", str(checkpoints), "--last", "3", "--output", str(averaged)],
        ),
        Step(
            "Generate: translate 400 sentences with combinations of words never seen",
            ["generate", str(binary), "--gen-subset", "test", "--path", str(averaged)],
            translated,
        ),
        Step("Score", ["score", "--data", str(binary), "--gen-subset", "test", "--sys", str(translated)]),
    ]


def run(folder: Path, program: Sequence[str], out: Console) -> None:
    """Runs the demo in `folder`, showing commands as calls of `program` (`nmtkit`, or `python -m nmtkit`).

    Raises FileExistsError when `folder` holds something, ValueError when a command fails.
    """
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise FileExistsError(f"{folder} already exists; remove it, or give another folder with --dir")
    begin = time.monotonic()
    (folder / "data").mkdir(parents=True)
    pairs = corpus.generate()
    corpus.write(pairs, folder / "data")
    introduce(pairs, folder, out)
    seconds = {}
    for number, step in enumerate(steps(folder), start=1):
        show_step(number, step, program, out)
        start = time.monotonic()
        call(step)
        seconds[step.arguments[0]] = time.monotonic() - start
    conclude(pairs, folder, program, out, seconds["train"], time.monotonic() - begin)


def introduce(pairs: Corpus, folder: Path, out: Console) -> None:
    out.print(heading("The demo corpus"))
    out.print(
        f"{len(pairs.train):,} English sentences and their German translations to train on, {len(pairs.test)} to test "
        f"with, made by a small grammar and written to {folder}/data. For example:\n",
        highlight=False,
    )
    for pair in examples(pairs.train, 3):
        out.print(Text(f"  {pair.english}\n  {pair.german}\n"))


def examples(pairs: Sequence[Pair], count: int, width: int = 72) -> list[Pair]:
    """The first `count` pairs of middling length that fit into `width` columns."""
    fitting = [pair for pair in pairs if 40 <= len(pair.german) <= width and len(pair.english) <= width]
    return fitting[:count]


def heading(text: str) -> Text:
    return Text(f"\n{text}", style="bold cyan")


def show_step(number: int, step: Step, program: Sequence[str], out: Console) -> None:
    out.print(heading(f"{number}. {step.title}"))
    out.print(Text(command_line(step, program, out.width if out.is_terminal else None), style="green"), soft_wrap=True)
    out.file.flush()  # what the command itself says must come after this


def command_line(step: Step, program: Sequence[str], width: int | None) -> str:
    """The command as a shell takes it, broken before flags where it is wider than `width`."""
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


def call(step: Step) -> None:
    """Runs the command; what it says goes where ours goes. Raises ValueError when it fails."""
    arguments = [sys.executable, "-m", "nmtkit", *step.arguments]
    if step.output:
        with step.output.open("wb") as file:
            status = subprocess.run(arguments, stdout=file).returncode
    else:
        status = subprocess.run(arguments).returncode
    if status:
        raise ValueError(f"the demo ends here, since `nmtkit {step.arguments[0]}` failed; what it said is above")


def conclude(pairs: Corpus, folder: Path, program: Sequence[str], out: Console, training: float, total: float) -> None:
    sources, references = [pair.english for pair in pairs.test], [pair.german for pair in pairs.test]
    translations = (folder / "test.de").read_text(encoding="utf-8").split("\n")[:-1]
    nearest = nearest_translations(sources, [(pair.english, pair.german) for pair in pairs.train])
    show_translations(sources, translations, references, out)
    out.print(heading("What the score means"))
    show_scores(
        {
            f"this model, trained for {training:.0f} seconds": translations,
            "the nearest training sentence's German": nearest,
            "the English source as it is": sources,
        },
        references,
        out,
    )
    equal = sum(one == other for one, other in zip(translations, references, strict=True))
    out.print(f"{equal} of {len(references)} translations equal their reference to the letter.", highlight=False)
    by_hand = shlex.join([*program, "generate", "--path", str(folder / "averaged.pt")])
    out.print(heading(f"Done in {total:.0f} seconds; everything is in {folder}. Your turn:"))
    out.print(Text(f"$ echo {shlex.quote(examples(pairs.valid, 1)[0].english)} |\n    {by_hand}", style="green"))


def show_translations(
    sources: Sequence[str], translations: Sequence[str], references: Sequence[str], out: Console
) -> None:
    """The first few that fit the screen, and among them up to two that are not as the reference has it."""
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
    """The text, with the words that `other` lacks in their place set off."""
    words = text.split()
    plain = set[int]()
    for block in SequenceMatcher(None, words, other.split(), autojunk=False).get_matching_blocks():
        plain.update(range(block.a, block.a + block.size))
    return Text(" ").join(Text(word, style="" if index in plain else style) for index, word in enumerate(words))


def show_scores(systems: dict[str, Sequence[str]], references: Sequence[str], out: Console) -> None:
    from nmtkit.scoring.metrics import score

    table = Table(box=None, pad_edge=False)
    table.add_column("")
    for name in ("BLEU", "chrF2"):
        table.add_column(name, justify="right")
    for name, lines in systems.items():
        values = score(lines, [references], ("bleu", "chrf"))
        table.add_row(name, *(f"{one.value:.1f}" for one in values))
    out.print(table)
