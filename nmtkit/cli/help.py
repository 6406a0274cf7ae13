"""Help pages of commands: `--help` describes all flags by section, `-h` the most used flags on one screen."""

import inspect
import os
import re
from collections.abc import Iterable, Mapping, Sequence

import click
from click.formatting import wrap_text

OUTPUT_SECTION = "Messages"
FLAG_COLUMN = 24  # the help text of a longer flag begins on the next line, so that texts have 2/3 of 80 columns
NO_BREAK = "\u00a0"

FlagRecord = tuple[str, str]  # a flag with the placeholder of its value, and its help text


def heading(text: str) -> str:
    """Returns a heading in colour. Click removes the colour if stdout is not a terminal."""
    return text if os.environ.get("NO_COLOR") else click.style(text, fg="green", bold=True)


def tidied(text: str) -> str:
    """Returns the help text as a sentence, with `[default: …]` on one line. Removes ranges such as [x>=1].

    Click adds these ranges to the help of numbers.

    The first letter becomes a capital letter if the first word has only small letters and a space follows. So help
    texts that begin with a name, such as `bleu, chrf` or `sacreBLEU tokenizer`, stay as they are.
    """
    text = re.sub(r"\s*\[(\d+<=)?x(<=\d+|>=\d+)?\]", "", text)
    words, bracket, default = text.partition("  [")
    if re.match("[a-z]+ ", words):
        words = words[0].upper() + words[1:]
    if words[-1:].isalnum() or words[-1:] == ")":
        words += "."
    return words + bracket + default.replace(" ", NO_BREAK)


def by_section(options: Iterable[click.Parameter], context: click.Context) -> dict[str, list[FlagRecord]]:
    """Returns the flags and their help texts by section, in the order of the flags. "Messages" is last."""
    sections: dict[str, list[FlagRecord]] = {}
    for option in options:
        record = option.get_help_record(context) if isinstance(option, click.Option) else None
        if record is not None:
            section = OUTPUT_SECTION if "--help" in option.opts else getattr(option, "section", "Options")
            flag = re.sub(r"--(\S+) / --no-\1$", r"--[no-]\1", record[0])
            sections.setdefault(section, []).append((flag, tidied(record[1])))
    sections[OUTPUT_SECTION] = sections.pop(OUTPUT_SECTION, [])
    return sections


def write_sections(formatter: click.HelpFormatter, sections: Mapping[str, Sequence[FlagRecord]]) -> None:
    """Writes flags under the headings of their sections."""
    for title, records in sections.items():
        with formatter.section(heading(title)):
            write_records(formatter, records)
    formatter.buffer[:] = [text.replace(NO_BREAK, " ") for text in formatter.buffer]


def write_records(formatter: click.HelpFormatter, records: Sequence[FlagRecord]) -> None:
    """Writes flags in one column and their texts in another. A line feed in a text begins a new line."""
    left = min(max((len(flag) for flag, _ in records), default=0), FLAG_COLUMN) + 2
    indent = " " * formatter.current_indent
    width = max(formatter.width - len(indent) - left, 10)
    for flag, text in records:
        lines = [line for part in text.split("\n") for line in wrap_text(part, width).splitlines()]
        first = lines.pop(0) if lines and len(flag) <= left - 2 else ""
        if len(indent + flag) > formatter.width:  # many choices: break the line between choices
            choices = wrap_text(flag.replace("|", "| "), formatter.width, indent, f"{indent:{len(indent) + 4}}")
            flag = choices.replace("| ", "|").removeprefix(indent)
        formatter.write(f"{indent}{flag:{left}}{first}".rstrip() + "\n")
        formatter.write("".join(f"{indent}{'':{left}}{line}\n" for line in lines))


def write_short_page(
    formatter: click.HelpFormatter, command: click.Command, common: Mapping[str, str], context: click.Context
) -> None:
    """Writes usage, purpose, examples, the `common` flags with short texts, and a line of other flags per section."""
    command.format_usage(context, formatter)
    paragraphs = inspect.cleandoc(command.help or "").split("\n\n")
    examples = [text for text in paragraphs if text.startswith("\b")]
    formatter.write_paragraph()
    with formatter.indentation():
        formatter.write_text("\n\n".join([paragraphs[0], *examples]))
    sections = by_section(command.get_params(context), context)
    messages = sections.pop(OUTPUT_SECTION)
    shown = {name_of(flag) for flag in common}
    others = {
        title: names
        for title, records in sections.items()
        if (names := [name for flag, _ in records if (name := name_of(flag)) not in shown])
    }
    width = formatter.width - min(max(map(len, others), default=0), FLAG_COLUMN) - 4
    rows = [(title, cut(names, width)) for title, names in others.items()]
    write_sections(formatter, {"Flags": list(common.items()), "More flags, described by --help": rows})
    write_sections(formatter, {OUTPUT_SECTION: messages})


def name_of(flag: str) -> str:
    """Returns the long name of a flag from the left column of a help page, such as "--arch" from "--arch NAME"."""
    return next(word.rstrip(",") for word in flag.split() if word.startswith("--"))


def cut(names: Sequence[str], width: int) -> str:
    """Returns the first names that fit into `width` columns, and the number of names that do not fit.

    If not even the first name fits, returns only the number of names.
    """
    for count in range(len(names), 0, -1):
        more = f", … ({len(names) - count} more)" if count < len(names) else ""
        if len(text := ", ".join(names[:count]) + more) <= width:
            return text
    return f"{len(names)} flags"
