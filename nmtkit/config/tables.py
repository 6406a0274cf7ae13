"""Tables as lines of text, for reports and messages."""

from collections.abc import Sequence


def numeric(header: Sequence[str], lines: Sequence[Sequence[str]]) -> list[bool]:
    """Returns for each column whether all nonempty texts begin with a number, which may follow a sign, < or a space."""
    columns = ([line[column].lstrip("+-< ") for line in lines if line[column]] for column in range(len(header)))
    return [all(text[:1].isdigit() for text in column) for column in columns]


def aligned(header: Sequence[str], lines: Sequence[Sequence[str]]) -> list[str]:
    """Returns the lines of a text table. Columns of numbers are aligned to the right."""
    return _padded([header, *lines], numeric(header, lines))


def right_aligned(lines: Sequence[Sequence[str]]) -> list[str]:
    """Returns the lines of a text table. All columns but the first are aligned to the right."""
    return _padded(lines, [False] + [True] * (len(lines[0]) - 1))


def settings_table(header: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    """Returns an indented text table of settings and their values, all aligned to the left, for a message."""
    return "\n".join(f"  {line}" for line in _padded([header, *lines], [False] * len(header)))


def _padded(rows: Sequence[Sequence[str]], right: Sequence[bool]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            cell.rjust(width) if of_number else cell.ljust(width)
            for cell, width, of_number in zip(row, widths, right, strict=True)
        ).rstrip()
        for row in rows
    ]
