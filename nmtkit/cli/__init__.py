"""The `nmtkit` command. A subcommand is imported when it is run: help and completion do not wait for torch."""

import contextlib
import gc
import importlib
import os
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import click

import nmtkit

# name -> first line of its help, which must not need the import
COMMANDS = {
    "preprocess": "Raw parallel text to a binarized dataset.",
    "train": "Train a model on a binarized dataset.",
    "average-checkpoints": "Average the weights of several checkpoints.",
    "generate": "Translate a dataset's subset, files, or standard input.",
    "serve": "Translate over HTTP, by LibreTranslate's interface.",
    "score": "BLEU, chrF, TER and more; says if systems differ.",
    "compare": "Training runs side by side: settings, scores, speed, state.",
    "sweep": "Many training runs from one file: grids, draws, seeds, several machines.",
    "attention": "A web page of what every attention head looks at.",
    "import": "A model of another toolkit as a checkpoint.",
    "export": "A checkpoint for CTranslate2, for transformers, or as standard files.",
    "inspect": "What a checkpoint or a dataset is, and how to use it.",
    "check": "Whether plug-ins keep to their contracts.",
    "demo": "All of it in three minutes, on an embedded corpus.",
}
MODULES = {"import": "import_model"}  # where the name of a command is a word of Python


@contextlib.contextmanager
def imports() -> Iterator[None]:
    """Keeps the garbage collector at rest, and takes what was imported out of its sight.

    Importing torch makes millions of objects that stay. Going through them again and again takes a third of the time
    from there to the process's end: 1.4 s instead of 0.95 s where nothing else is done.
    """
    if "torch" in sys.modules:  # in a notebook or a test; the objects of others are theirs
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


class LazyGroup(click.Group):
    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, name: str) -> click.Command:
        if name not in COMMANDS:
            from nmtkit.cli.other_toolkits import about_command

            about = about_command(name, COMMANDS)
            raise click.UsageError(
                f"unknown command {name!r}; {f'{about}; ' if about else ''}known: {', '.join(COMMANDS)}", ctx
            )
        with imports():
            module = importlib.import_module("nmtkit.cli." + MODULES.get(name, name.replace("-", "_")))
        command: click.Command = module.command
        return command

    def main(
        self,
        args: Sequence[str] | None = None,
        prog_name: str | None = None,
        complete_var: str | None = None,
        standalone_mode: bool = True,
        **extra: Any,
    ) -> Any:
        """As click has it, but a wrong flag or command is reported as every other mistake: in one line, exit code 2."""
        if not standalone_mode:
            return super().main(args, prog_name, complete_var, standalone_mode=False, **extra)
        from nmtkit.cli.command import end_quietly, fail, flush_output

        if sys.stdout is None:  # a file that is opened next would take its place
            fail("standard output is closed; redirect it to a file or to /dev/null")
        try:
            status = super().main(args, prog_name, complete_var, standalone_mode=False, **extra)
            flush_output()
        except click.exceptions.NoArgsIsHelpError as error:
            error.show()
            sys.exit(error.exit_code)
        except click.UsageError as error:
            command = error.ctx.command_path if error.ctx else "nmtkit"
            fail(f"{_about_flag(error) or error.format_message().rstrip('.')}. See {command} --help")
        except click.Abort:
            sys.exit(130)
        except BrokenPipeError:
            end_quietly()
        except OSError as error:
            fail(str(error))
        sys.exit(status if isinstance(status, int) else 0)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))


def _about_flag(error: click.UsageError) -> str | None:
    """Returns what a flag is called here, where the error is that the command does not have it, and others' has."""
    from nmtkit.cli.other_toolkits import FLAGS, answer

    if not isinstance(error, click.NoSuchOption) or error.ctx is None:
        return None
    return answer(FLAGS.get(error.ctx.info_name or "", {}), error.option_name)


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 120})
@click.version_option(nmtkit.__version__, prog_name="nmtkit")
def main() -> None:
    """Neural machine translation, from raw parallel text to a score you can believe.

    To see all of it at work, type: nmtkit demo

    \b
    nmtkit preprocess -s en -t de --trainpref data/train --validpref data/val \\
                      --testpref data/test --destdir data-bin
    nmtkit train data-bin --arch transformer_base --save-dir checkpoints
    nmtkit average-checkpoints checkpoints --last 5 --output averaged.pt
    nmtkit generate data-bin --path averaged.pt | nmtkit score --data data-bin
    """
    # torch's CUDA allocator reads it once: batches of many sizes fragment blocks that cannot grow
    if "PYTORCH_CUDA_ALLOC_CONF" not in os.environ:
        os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")
