"""Charts as SVG: curves on shared axes, and bars. Their colours and their readings on hover come with every page."""

import math
from collections.abc import Mapping, Sequence
from html import escape

Point = tuple[float, float]

WIDTH, HEIGHT = 420, 210  # in units of the drawing, which is as wide as its place
LEFT, RIGHT, TOP, BOTTOM = 46, 10, 8, 22  # around the axes
COLOURS = 10  # of the style sheet, .s1 to .s10

Axis = list[tuple[float, str]]  # ticks, where they stand from 0 to 1, and what they say


def line_chart(title: str, lines: Mapping[str, Sequence[Point]], logarithmic: bool = False, keys: bool = True) -> str:
    """Returns several curves over the update on shared axes. At least one of them has a point.

    Curves keep their colours from chart to chart if they come in the same order, empty ones too. With `keys` they are
    named beside the title.
    """
    values = [y for points in lines.values() for _, y in points]
    updates = [x for points in lines.values() for x, _ in points]
    logarithmic = logarithmic and min(values) > 0
    low, high, ticks = _scale(min(values), max(values), logarithmic)
    left, right = min(updates), max(updates)
    convert = math.log10 if logarithmic else float

    def place(x: float, y: float) -> tuple[float, float]:
        across, up = (x - left) / (right - left or 1), (convert(y) - low) / (high - low or 1)
        return LEFT + across * (WIDTH - LEFT - RIGHT), HEIGHT - BOTTOM - up * (HEIGHT - TOP - BOTTOM)

    parts = [*_grid(ticks)]
    for value in _steps(left, right, 5) if right > left else [left]:
        column = place(value, values[0])[0]
        parts.append(f'<text x="{column:.1f}" y="{HEIGHT - 5}" text-anchor="middle">{_short(value)}</text>')
    for index, (name, points) in enumerate(lines.items()):
        if points:
            drawn = [place(*point) for point in points]
            spots = " ".join(f"{x:.1f},{y:.1f}" for x, y in drawn)
            data = " ".join(f"{x:g},{y:.6g}" for x, y in points)
            colour = f"s{index % COLOURS + 1}"
            parts.append(
                f'<polyline class="{colour}" points="{spots}" data-name="{escape(name)}" data-points="{data}"/>'
            )
            if len(points) == 1:
                parts.append(f'<circle class="{colour}" r="3" cx="{drawn[0][0]:.1f}" cy="{drawn[0][1]:.1f}"/>')
    named = [name for name, points in lines.items() if points]
    shown = legend(lines, named) if keys else ""
    return _figure(title, shown, f"{title} by update" + ", logarithmic" * logarithmic, "".join(parts))


def bar_chart(title: str, note: str, counts: Sequence[int], unit: str) -> str:
    """Returns a bar for each of `counts`, whose index is a number of `unit`; the axis ends with the last above zero."""
    longest = max((index for index, count in enumerate(counts) if count), default=1)
    low, high, ticks = _scale(0, max(1, *counts), False)
    step = (WIDTH - LEFT - RIGHT) / (longest + 1)
    parts = [*_grid(ticks)]
    for value in _steps(0, longest, 6):
        parts.append(
            f'<text x="{LEFT + (value + 0.5) * step:.1f}" y="{HEIGHT - 5}" text-anchor="middle">{_short(value)}</text>'
        )
    for index, count in enumerate(counts):
        if count:
            height = (count - low) / (high - low) * (HEIGHT - TOP - BOTTOM)
            parts.append(
                f'<rect x="{LEFT + index * step:.2f}" y="{HEIGHT - BOTTOM - height:.2f}" width="{0.9 * step:.2f}" '
                f'height="{height:.2f}"><title>{index} {unit}: {count:,}</title></rect>'
            )
    return _figure(title, f"<span>{escape(note)}</span>", title, "".join(parts))


def legend(names: Sequence[str] | Mapping[str, object], shown: Sequence[str] | None = None) -> str:
    """Returns the names of curves with their colours; `shown` are those of them that are drawn."""
    return "".join(
        f'<span class="key s{index % COLOURS + 1}">{escape(name)}</span>'
        for index, name in enumerate(names)
        if shown is None or name in shown
    )


def _figure(title: str, caption: str, label: str, drawing: str) -> str:
    return (
        f'<figure class="chart"><figcaption><b>{escape(title)}</b>{caption}</figcaption>'
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(label)}">{drawing}</svg></figure>'
    )


def _grid(ticks: Axis) -> list[str]:
    """Returns a line and a label for each tick of the upright axis."""
    parts = []
    for up, label in ticks:
        row = HEIGHT - BOTTOM - up * (HEIGHT - TOP - BOTTOM)
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{row:.1f}" y2="{row:.1f}"/>')
        parts.append(f'<text x="{LEFT - 6}" y="{row + 4:.1f}" text-anchor="end">{label}</text>')
    return parts


def _scale(low: float, high: float, logarithmic: bool) -> tuple[float, float, Axis]:
    """Returns the ends of an axis, logarithms if it is `logarithmic`, and its ticks."""
    if logarithmic:
        decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
        digits = (1, 2, 5) if len(decades) <= 4 else (1,)
        marks = [digit * 10.0**decade for decade in decades for digit in digits]
        start, end = math.log10(low), math.log10(high)
        inside = [math.log10(mark) for mark in marks if low <= mark <= high]
        if len(inside) < 2:
            inside = [start, end]
        return start, end, [((mark - start) / (end - start or 1), _short(10**mark)) for mark in inside]
    steps = _steps(low, high, 4)
    width = steps[1] - steps[0] if len(steps) > 1 else abs(high) or 1.0
    start = min(low, math.floor(low / width + 1e-9) * width)
    end = max(high, math.ceil(high / width - 1e-9) * width)
    count = round((end - start) / width)
    marks = [start + index * width for index in range(count + 1)]
    return start, end, [((mark - start) / (end - start or 1), _short(mark)) for mark in marks]


def _steps(low: float, high: float, count: int) -> list[float]:
    """Returns round numbers from `low` to `high`, about `count` steps of 1, 2 or 5 times a power of ten."""
    if high <= low:
        return [low]
    rough = (high - low) / count
    power = 10.0 ** math.floor(math.log10(rough))
    width = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough * 0.999)
    first = math.ceil(low / width - 1e-9)
    last = math.floor(high / width + 1e-9)
    return [index * width for index in range(first, last + 1)]


def _short(value: float) -> str:
    """Returns a number in few characters: 12k, 3.5M, 0.002."""
    for size, letter in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if abs(value) >= size:
            return f"{value / (1e3 if letter == 'k' else size):.4g}{letter}"
    return f"{value:.4g}"
