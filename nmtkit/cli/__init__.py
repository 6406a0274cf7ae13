"""The `nmtkit` command. A subcommand is imported when it runs, so that help and completion do not import torch."""

import contextlib
import gc
import importlib
import os
import re
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import click
from click.shell_completion import CompletionItem

import nmtkit
from nmtkit.cli.help import by_section, heading, write_sections

# group -> name -> summary, so that the help page needs no import of the command
GROUPS = {
    "Start": {"demo": "Run all stages in three minutes, on an embedded corpus."},
    "Data": {
        "fetch": "Download corpora and test sets by name: OPUS, WMT, Hub.",
        "clean": "Mend parallel text and drop bad pairs, with a reason for each.",
        "preprocess": "Make a binarized dataset from raw parallel text.",
    },
    "Train": {
        "train": "Train a model on a binarized dataset.",
        "sweep": "Train many runs from one file: grids, random search.",
        "average-checkpoints": "Average the weights of several checkpoints.",
        "distill": "Store the probabilities of a teacher for a student.",
    },
    "Translate": {
        "generate": "Translate a subset of a dataset, files, or standard input.",
        "serve": "Translate over HTTP, with the interface of LibreTranslate.",
        "rerank": "Choose from n-best lists with a backward model and an LM.",
        "shortlist": "Learn which target pieces a search has to consider.",
        "merge": "Join the shards in the --output-dir of another command.",
        "precompile": "Compile the CPU search in advance, for container images.",
    },
    "Evaluate": {
        "score": "Compute BLEU, chrF, TER and more; test if systems differ.",
        "compare": "Show training runs side by side: settings, scores, speed.",
        "inspect": "Describe a run, checkpoint or dataset; suggest commands.",
        "attention": "Write a web page with the weights of every attention head.",
    },
    "Share": {
        "import": "Convert a model of another toolkit to a checkpoint.",
        "export": "Convert a checkpoint for CTranslate2, transformers, Marian.",
        "cache": "List and prune cached models of the Hugging Face Hub.",
        "check": "Test if the components of plug-ins keep their contracts.",
    },
}
COMMANDS = {name: summary for group in GROUPS.values() for name, summary in group.items()}
MODULES = {"import": "import_model"}  # command -> module, for a command whose name is a keyword of Python


@contextlib.contextmanager
def imports() -> Iterator[None]:
    """Disables the garbage collector during imports and then excludes the imported objects from collection.

    Importing torch creates millions of objects that are never freed. Traversing these objects again and again takes a
    third of the time of a short command (1.4 s instead of 0.95 s).
    """
    if "torch" in sys.modules:  # in a notebook or a test, do not freeze objects of other code
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
            advice = about or "known: " + ", ".join(COMMANDS)
            raise click.UsageError(f"unknown command {name!r}; {advice}", ctx)
        with imports():
            module = importlib.import_module("nmtkit.cli." + MODULES.get(name, name.replace("-", "_")))
        command: click.Command = module.command
        return command

    def main(  # type: ignore[override]  # click passes all parameters except `args` by name
        self, args: Sequence[str] | None = None, *, standalone_mode: bool = True, **extra: Any
    ) -> Any:
        """Runs the command and exits. Reports a wrong flag or command in one line, and then exits with code 2."""
        if not standalone_mode:
            return super().main(args, standalone_mode=False, **extra)
        from nmtkit.cli.command import end_quietly, fail, flush_output
        from nmtkit.cli.other_toolkits import about_flag
        from nmtkit.config.files import explained

        if sys.stdout is None:  # the next opened file would get the file descriptor of stdout
            fail("standard output is closed; redirect it to a file or to /dev/null")
        try:
            status = super().main(args, standalone_mode=False, **extra)
            flush_output()
        except click.exceptions.NoArgsIsHelpError as error:
            error.show()
            sys.exit(error.exit_code)
        except click.UsageError as error:
            named = (args or sys.argv[1:])[:1]
            command = error.ctx.command_path if error.ctx else " ".join(["nmtkit", *(set(named) & COMMANDS.keys())])
            flag = error.option_name if isinstance(error, click.NoSuchOption) else ""
            about = about_flag(error.ctx.info_name or "", flag) if error.ctx else None
            message = re.sub(r"\s*\n\s*", " ", about or error.format_message()).rstrip(".")
            if "unexpected extra argument" in message and (example := _example(error.ctx)):
                message += f". Example: {example}"
            fail(f"{message}{'' if message.endswith(('?', '?)')) else '.'} See {command} --help")
        except click.Abort:
            sys.exit(130)
        except BrokenPipeError:
            end_quietly()
        except OSError as error:
            fail(explained(error))
        sys.exit(status if isinstance(status, int) else 0)

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        """Completes the names of commands without an import of the commands."""
        names = [name for name in COMMANDS if name.startswith(incomplete)]
        items = [CompletionItem(name, help=COMMANDS[name]) for name in names]
        return items + click.Command.shell_complete(self, ctx, incomplete)

    def format_usage(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        formatter.write_usage(ctx.command_path, " ".join(self.collect_usage_pieces(ctx)), heading("Usage: "))

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Writes the commands by group, then the flags."""
        flags = [record for records in by_section(self.get_params(ctx), ctx).values() for record in records]
        groups = {title: list(commands.items()) for title, commands in GROUPS.items()}
        write_sections(formatter, {**groups, "Options": flags})


def _example(context: click.Context | None) -> str:
    """Returns the first one-line example on the help page of a command, or "" if the page has no such example."""
    lines = (context.command.help or "").splitlines() if context else []
    return next((line.strip() for line in lines if line.strip().startswith("nmtkit ") and line[-1] != "\\"), "")


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 120})
@click.version_option(nmtkit.__version__, prog_name="nmtkit")
def main() -> None:
    """Neural machine translation, from parallel text to a model and its score.

    \b
    nmtkit preprocess -s en -t de --trainpref data/train --validpref data/val \\
                      --testpref data/test --destdir data-bin
    nmtkit train data-bin --arch transformer_base --save-dir checkpoints
    nmtkit average-checkpoints checkpoints --last 5 --output averaged.pt
    nmtkit generate data-bin --path averaged.pt | nmtkit score --data data-bin

    \b
    COMMAND -h shows the most used flags, COMMAND --help shows all flags.
    Completion in bash: eval "$(_NMTKIT_COMPLETE=bash_source nmtkit)"
    """
    # Batches of different sizes fragment the GPU memory unless its segments can grow. The CUDA allocator reads the
    # variable PYTORCH_ALLOC_CONF (formerly PYTORCH_CUDA_ALLOC_CONF) only once, so it is set before the command runs.
    if "PYTORCH_CUDA_ALLOC_CONF" not in os.environ:
        os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")
