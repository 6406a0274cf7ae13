"""Base class of all subcommands: headings on the help page, log level, and one-line error messages."""

import contextlib
import logging
import os
import re
import shlex
import shutil
import signal
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any, BinaryIO, NoReturn

import click
from rich.console import Console
from rich.highlighter import NullHighlighter
from rich.logging import RichHandler
from rich.text import Text

import nmtkit
from nmtkit.cli.flags import check_paths
from nmtkit.cli.help import OUTPUT_SECTION, by_section, heading, write_sections, write_short_page
from nmtkit.cli.progress import CommandProgress
from nmtkit.config.files import explained
from nmtkit.config.plugins import plugin_message
from nmtkit.demo import SHOWS_COMMANDS
from nmtkit.jobs import progress

PROGRAM = "NMTKIT_PROGRAM"  # environment variable: the words with which the user started nmtkit
stderr = Console(stderr=True, highlight=False)  # for messages, because stdout is only for data


class Command(click.Command):
    """A click command with `--quiet`, `--verbose` and `--debug`. After a mistake of the user, the exit code is 2.

    The help page groups options by their attribute `section`. `common` maps the most used flags, with their
    placeholders, to short texts. If `common` is given, `-h` shows a short page with these flags.
    """

    def __init__(self, *arguments: Any, common: Mapping[str, str] | None = None, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        self.common = common
        names = ["--help"] if common else ["-h", "--help"]
        self.context_settings = {"help_option_names": names, **self.context_settings}

    def get_params(self, ctx: click.Context) -> list[click.Parameter]:
        params = super().get_params(ctx)
        message_flags = [
            _message_flag(["-q", "--quiet"], "Print only warnings and errors.", _remember),
            _message_flag(["-v", "--verbose"], "Print more messages.", _remember),
            _message_flag(["--debug"], "Print a traceback for each error.", _remember),
        ]
        if self.common:
            message_flags.append(_message_flag(["-h"], "Show the most used flags.", _show_short_page))
        params[len(self.params) : len(self.params)] = message_flags  # before --help
        return params

    def get_help_option(self, ctx: click.Context) -> click.Option | None:
        option = super().get_help_option(ctx)
        if option is not None and self.common:
            option.help = "Show all flags."
        return option

    def format_usage(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        formatter.write_usage(ctx.command_path, " ".join(self.collect_usage_pieces(ctx)), heading("Usage: "))

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        write_sections(formatter, by_section(self.get_params(ctx), ctx))

    def show_short_page(self, ctx: click.Context) -> None:
        """Prints the page of `-h` and exits."""
        formatter = ctx.make_formatter()
        write_short_page(formatter, self, self.common or {}, ctx)
        click.echo(formatter.getvalue().rstrip("\n"), color=ctx.color)
        ctx.exit()

    def invoke(self, ctx: click.Context) -> Any:
        set_up_logging(ctx.meta)
        with errors_in_one_line(ctx), progress_shown(ctx):
            check_encoding(ctx)
            check_paths(ctx)
            return super().invoke(ctx)


def check_encoding(ctx: click.Context) -> None:
    """Raises ValueError if the text of a flag or an argument is not UTF-8. Paths may contain any bytes."""
    for parameter in ctx.command.params:
        value = ctx.params.get(parameter.name or "")
        for text in value if isinstance(value, tuple | list) else (value,):
            if isinstance(text, str) and re.search("[\ud800-\udfff]", text):  # surrogates: bytes that are not UTF-8
                name = parameter.opts[-1] if parameter.param_type_name == "option" else parameter.make_metavar(ctx)
                raise ValueError(f"{name} is not UTF-8: {os.fsencode(text)!r}")


@contextlib.contextmanager
def progress_shown(ctx: click.Context) -> Iterator[None]:
    """Shows the progress of the command, and at its end a line with the time. Nothing is shown with --quiet.

    With torchrun, only the first process shows its progress.
    """
    if ctx.meta.get("quiet") or os.environ.get("RANK", "0") != "0":
        yield
        return
    display = ctx.meta["display"] = CommandProgress(stderr)
    progress.show_on(display)
    display.resume()
    try:
        yield
        end_progress(ctx)
    finally:
        display.close()
        progress.show_on(None)


def end_progress(ctx: click.Context) -> None:
    """Ends the progress bar of the command, if there is one, and logs a last line with its counts, time and rate."""
    display: CommandProgress | None = ctx.meta.get("display")
    if display is not None and (line := display.summary()) is not None:
        logging.getLogger("nmtkit").info("%s", line)


def echo(text: str, nl: bool = True) -> None:
    """Writes data to stdout. In a terminal, the progress bar is removed first."""
    progress.hide()
    click.echo(text, nl=nl)


def tell(text: str, style: str | None = None) -> None:
    """Writes a line about the work to stderr. In a terminal, a long line wraps between words.

    With --quiet, writes nothing.
    """
    if not is_quiet():
        stderr.print(text, style=style, markup=False, soft_wrap=not stderr.is_terminal)


def is_quiet() -> bool:
    context = click.get_current_context(silent=True)  # None if no command runs
    return context is not None and bool(context.meta.get("quiet"))


def print_line(text: str, style: str | None = None) -> None:
    """Writes a line to stderr unchanged: rich does not interpret brackets as styles and does not break the line."""
    stderr.print(text, style=style, markup=False, soft_wrap=True)


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

    If memory runs out and `command` has the flag --max-tokens, the message names this flag. The message of an error in
    a plug-in contains the file and the line of the plug-in.
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


def _message_flag(names: list[str], help: str, callback: Callable[[click.Context, Any, bool], None]) -> click.Option:
    option = click.Option(names, is_flag=True, is_eager=True, expose_value=False, help=help, callback=callback)
    option.section = OUTPUT_SECTION  # type: ignore[attr-defined]
    return option


def _show_short_page(ctx: click.Context, parameter: click.Parameter, value: bool) -> None:
    if value and not ctx.resilient_parsing and isinstance(ctx.command, Command):
        ctx.command.show_short_page(ctx)


def _remember(ctx: click.Context, parameter: click.Parameter, value: bool) -> None:
    assert parameter.name is not None
    ctx.meta[parameter.name] = value


def set_up_logging(meta: dict[str, Any]) -> None:
    """Writes the messages of the logger `nmtkit` to stderr: coloured in a terminal, otherwise as plain lines."""
    level = logging.WARNING if meta.get("quiet") else logging.DEBUG if meta.get("verbose") else logging.INFO
    logger = logging.getLogger("nmtkit")
    logger.setLevel(level)
    logger.propagate = False
    handler: logging.Handler = logging.StreamHandler(sys.stderr)
    if stderr.is_terminal:
        handler = RichHandler(
            console=stderr, show_time=False, show_path=False, show_level=False, highlighter=NullHighlighter()
        )
    handler.setFormatter(_Formatter())
    logger.handlers = [handler]


class _Formatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        text = record.getMessage()
        return text if record.levelno < logging.WARNING else f"{record.levelname.lower()}: {text}"


def fail(message: str, code: int = 2) -> None:
    """Prints `nmtkit: error: …` and exits. `code` 2 means a mistake of the user."""
    line = Text("nmtkit: ").append("error:", style="bold red").append(f" {message}")
    with contextlib.suppress(OSError):  # stderr may be closed
        stderr.print(line, soft_wrap=not stderr.is_terminal)
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


def program(launcher: bool = False) -> list[str]:
    """Returns the words with which the user started nmtkit, such as `python -m nmtkit`, to begin a printed command.

    `launcher` is for commands that train: if torchrun started this process, the words include torchrun. The environment
    variable `PROGRAM` passes the words of the user to processes that nmtkit starts.
    """
    called, words = os.path.realpath(sys.argv[0]), os.environ.get(PROGRAM)
    if launcher and "TORCHELASTIC_RUN_ID" in os.environ:
        alone = os.environ.get("GROUP_WORLD_SIZE", "1") == "1"  # with several machines, torchrun also needs addresses
        torchrun = _as_typed(os.path.join(os.path.dirname(sys.executable), "torchrun"))
        return [torchrun, *(["--nproc-per-node", os.environ["LOCAL_WORLD_SIZE"]] if alone else ["…"]), "-m", "nmtkit"]
    if words is not None:
        return shlex.split(words)
    if called == os.path.join(os.path.dirname(os.path.realpath(nmtkit.__file__)), "__main__.py"):
        return [_as_typed(sys.executable), "-m", "nmtkit"]
    return ["nmtkit"] if os.path.basename(called) != "nmtkit" else [_as_typed(sys.argv[0])]


def _as_typed(path: str) -> str:
    """Returns the name of the program at `path` if a shell finds this program by its name, else `path`.

    Links are not followed: the `python3` of a virtual environment links to the `python3` of the system, which has
    other packages.
    """
    found = shutil.which(os.path.basename(path))
    return os.path.basename(path) if found is not None and os.path.abspath(found) == os.path.abspath(path) else path


def as_started(commands: str) -> str:
    """Replaces `nmtkit` in shell commands with the words with which the user started nmtkit (`program`)."""
    return re.sub("(^|&& )nmtkit ", lambda match: f"{match[1]}{shlex.join(program())} ", commands)


def show_next(*commands: str) -> None:
    """Prints the one or two commands that the user can run next, as the last lines on stderr, without line breaks.

    Each of `commands` begins with nmtkit. Prints nothing with --quiet, and in the demo, which shows its own commands.
    """
    if SHOWS_COMMANDS not in os.environ and not is_quiet():
        end_progress(click.get_current_context())
        for word, command in zip(("next", "then"), commands, strict=False):
            print_line(f"{word}: {as_started(command)}")


def exit_stopped(received: signal.Signals) -> NoReturn:
    """Prints the command that continues the work after a signal, and exits with the code of the signal."""
    print_line(f"{received.name}. To continue: {shlex.join([*program(), *sys.argv[1:]])}")
    sys.exit(128 + received)


def end_quietly() -> NoReturn:
    """Exits with the code of SIGPIPE, 141. Called if the reader of stdout, such as `head`, has closed the pipe."""
    with contextlib.suppress(OSError):
        flush_output()
    sys.exit(141)


def standard_input() -> BinaryIO:
    """Returns the binary stdin. Raises ValueError if stdin is closed."""
    if sys.stdin is None:
        raise ValueError("standard input is closed; give the text as a file")
    return sys.stdin.buffer
