"""The `nmtkit` command. A subcommand is imported when it is run: help and completion do not wait for torch."""

import importlib

import click

import nmtkit

# name -> first line of its help, which must not need the import
COMMANDS = {
    "preprocess": "Raw parallel text to a binarized dataset.",
    "train": "Train a model on a binarized dataset.",
    "average-checkpoints": "Average the weights of several checkpoints.",
    "generate": "Translate a split of a dataset, files, or standard input.",
    "score": "BLEU, chrF and TER of translations, with confidence and significance.",
    "attention": "A web page of what every attention head looks at in a sentence.",
    "inspect": "What a checkpoint or a dataset is, and how to use it.",
    "demo": "All of it in three minutes, on an embedded corpus.",
}


class LazyGroup(click.Group):
    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        if name not in COMMANDS:
            return None
        module = importlib.import_module("nmtkit.cli." + name.replace("-", "_"))
        command: click.Command = module.command
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 120})
@click.version_option(nmtkit.__version__, prog_name="nmtkit")
def main() -> None:
    """Neural machine translation, from raw parallel text to a score you can believe.

    \b
    nmtkit preprocess -s en -t de --trainpref data/train --validpref data/val \\
                      --testpref data/test --destdir data-bin
    nmtkit train data-bin --arch transformer_base --save-dir checkpoints
    nmtkit average-checkpoints checkpoints --last 5 --output averaged.pt
    nmtkit generate data-bin --path averaged.pt | nmtkit score --data data-bin
    """
