"""Base class of all subcommands: headings on the help page, log level, and one-line error messages."""

import contextlib
import logging
import os
import re
import sys
from collections.abc import Iterator, Sequence
from typing import Any, BinaryIO, NoReturn

import click
from rich.console import Console
from rich.highlighter import NullHighlighter
from rich.logging import RichHandler

from nmtkit.cli.progress import CommandProgress
from nmtkit.config.files import explained
from nmtkit.config.plugins import plugin_message
from nmtkit.jobs import progress

stderr = Console(stderr=True, highlight=False)  # for messages, because stdout is only for data

OUTPUT_SECTION = "Messages"
FLAG_COLUMN = 24  # the help text of a longer flag begins on the next line, so that texts have 2/3 of 80 columns
NO_BREAK = "\u00a0"


class Command(click.Command):
    """A click command with `--quiet`, `--verbose` and `--debug`. After a mistake of the user, the exit code is 2.

    The help page groups options by their attribute `section`, in order of first appearance.
    """

    def get_params(self, ctx: click.Context) -> list[click.Parameter]:
        params = super().get_params(ctx)
        end = len(self.params)  # the index before --help
        return [*params[:end], *message_options(), *params[end:]]

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        sections: dict[str, list[tuple[str, str]]] = {}
        for parameter in self.get_params(ctx):
            record = parameter.get_help_record(ctx) if isinstance(parameter, click.Option) else None
            if record is not None:
                section = OUTPUT_SECTION if "--help" in parameter.opts else getattr(parameter, "section", "Options")
                sections.setdefault(section, []).append(
                    (re.sub(r"--(\S+) / --no-\1$", r"--[no-]\1", record[0]), tidied(record[1]))
                )
        sections[OUTPUT_SECTION] = sections.pop(OUTPUT_SECTION)
        for title, records in sections.items():
            with formatter.section(title):
                formatter.write_dl(records, col_max=FLAG_COLUMN)
        formatter.buffer[:] = [text.replace(NO_BREAK, " ") for text in formatter.buffer]

    def invoke(self, ctx: click.Context) -> Any:
        set_up_logging(ctx.meta)
        with errors_in_one_line(ctx), progress_shown(ctx):
            check_encoding(ctx)
            return super().invoke(ctx)


def check_encoding(ctx: click.Context) -> None:
    """Raises ValueError if the text of a flag or an argument is not UTF-8. Paths may contain any bytes."""
    for parameter in ctx.command.params:
        value = ctx.params.get(parameter.name or "")
        for text in value if isinstance(value, tuple | list) else (value,):
            if isinstance(text, str):
                try:
                    text.encode()
                except UnicodeEncodeError:
                    name = parameter.opts[-1] if parameter.param_type_name == "option" else parameter.make_metavar(ctx)
                    raise ValueError(f"{name} is not UTF-8: {os.fsencode(text)!r}") from None


@contextlib.contextmanager
def progress_shown(ctx: click.Context) -> Iterator[None]:
    """Shows the progress of the command, and at its end a line with the time. Nothing is shown with --quiet.

    Of several processes of torchrun, only the first shows its progress.
    """
    if ctx.meta.get("quiet") or os.environ.get("RANK", "0") != "0":
        yield
        return
    display = CommandProgress(stderr)
    progress.show_on(display)
    display.resume()
    try:
        yield
        if (line := display.summary()) is not None:
            logging.getLogger("nmtkit").info("%s", line)
    finally:
        display.close()
        progress.show_on(None)


def echo(text: str, nl: bool = True) -> None:
    """Writes data to stdout. In a terminal, the progress of the command makes room."""
    progress.hide()
    click.echo(text, nl=nl)


@contextlib.contextmanager
def errors_in_one_line(ctx: click.Context) -> Iterator[None]:
    """Reports a mistake of the user in one line and exits. Raises other errors, and with `--debug` all errors."""
    try:
        yield
    except BrokenPipeError:
        end_quietly()
    except (click.ClickException, click.exceptions.Exit, click.Abort):
        raise  # click reports these errors itself
    except Exception as error:
        message = message_of(error, ctx.command)
        if ctx.meta.get("debug") or message is None:
            raise
        fail(message)
    except KeyboardInterrupt:
        fail("interrupted", code=130)


def message_of(error: BaseException, command: click.Command) -> str | None:
    """Returns the message of a mistake of the user, or None for a mistake in nmtkit, which needs a traceback.

    If the memory is too small, the message names --max-tokens, if `command` has this flag. The message of an error in a
    plug-in contains the file and the line of the plug-in.
    """
    # On a CPU, the message of torch has source locations before "can't allocate memory: you tried to allocate N bytes".
    if isinstance(error, MemoryError) or (isinstance(error, RuntimeError) and "allocate" in str(error)):
        smaller = any("--max-tokens" in parameter.opts for parameter in command.params)
        advice = "; a smaller --max-tokens makes smaller batches" if smaller else ""
        return f"out of memory: the model or a batch is too large for this machine{advice}"
    if message := plugin_message(error):
        return message
    if isinstance(error, OSError):
        return explained(error)
    return str(error) if isinstance(error, ValueError | ImportError) else None


def tidied(text: str) -> str:
    """Returns the help text as a sentence, with `[default: …]` on one line. Removes ranges such as [x>=1].

    Click adds these ranges to the help of numbers.

    The first letter becomes a capital unless the first word is a value or a name, such as bleu or sacreBLEU.
    """
    text = re.sub(r"\s*\[(\d+<=)?x(<=\d+|>=\d+)?\]", "", text)
    words, bracket, default = text.partition("  [")
    if re.match("[a-z]+ ", words):
        words = words[0].upper() + words[1:]
    if words[-1:].isalnum() or words[-1:] == ")":
        words += "."
    return words + bracket + default.replace(" ", NO_BREAK)


def parsed_known_flags(
    command: click.Command, info_name: str | None, arguments: Sequence[str], parent: click.Context | None
) -> click.Context:
    """Parses the flags that `command` has. Ignores other flags, because their components may not be known yet."""
    first = Command(
        name=command.name,
        params=[parameter for parameter in command.params if isinstance(parameter, click.Option)],
        context_settings={"ignore_unknown_options": True, "allow_extra_args": True},
        add_help_option=False,
    )
    return first.make_context(info_name, list(arguments), parent, resilient_parsing=True)


def message_options() -> list[click.Option]:
    """Returns the flags that all commands have."""
    texts = {
        ("-q", "--quiet"): "Print only warnings and errors.",
        ("-v", "--verbose"): "Print more messages.",
        ("--debug",): "Print a traceback for each error.",
    }
    options = []
    for names, text in texts.items():
        option = click.Option(names, is_flag=True, is_eager=True, expose_value=False, help=text, callback=_remember)
        option.section = OUTPUT_SECTION  # type: ignore[attr-defined]
        options.append(option)
    return options


def _remember(ctx: click.Context, parameter: click.Parameter, value: bool) -> None:
    assert parameter.name is not None
    ctx.meta[parameter.name] = value


def set_up_logging(meta: dict[str, Any]) -> None:
    """Sends the `nmtkit` logger to stderr: coloured in a terminal, otherwise plain lines."""
    level = logging.WARNING if meta.get("quiet") else logging.DEBUG if meta.get("verbose") else logging.INFO
    logger = logging.getLogger("nmtkit")
    logger.setLevel(level)
    logger.propagate = False
    handler: logging.Handler
    if stderr.is_terminal:
        handler = RichHandler(
            console=stderr, show_time=False, show_path=False, show_level=False, highlighter=NullHighlighter()
        )
    else:
        handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_Formatter())
    logger.handlers = [handler]


class _Formatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        text = record.getMessage()
        return text if record.levelno < logging.WARNING else f"{record.levelname.lower()}: {text}"


def fail(message: str, code: int = 2) -> None:
    """Prints `nmtkit: error: …` and exits. `code` 2 means a mistake of the user."""
    prefix = "[bold red]error:[/] " if stderr.is_terminal else "error: "
    with contextlib.suppress(OSError):  # stderr may be closed
        stderr.print(f"nmtkit: {prefix}", end="")
        stderr.print(message, markup=False, soft_wrap=not stderr.is_terminal)
    with contextlib.suppress(OSError):
        if sys.stdout is not None:
            flush_output()
    sys.exit(code)


def flush_output() -> None:
    """Flushes stdout. If that fails, drops the buffered text, so that Python does not write it again at exit.

    Raises OSError, such as BrokenPipeError.
    """
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise


def end_quietly() -> NoReturn:
    """Exits after the reader of stdout, such as `head`, has closed the pipe, with the exit code of SIGPIPE."""
    with contextlib.suppress(OSError):
        flush_output()
    sys.exit(141)


def standard_input() -> BinaryIO:
    """Returns the binary stdin. Raises ValueError if stdin is closed."""
    if sys.stdin is None:
        raise ValueError("standard input is closed; give the text as a file")
    return sys.stdin.buffer
