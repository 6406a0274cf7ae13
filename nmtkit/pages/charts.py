"""Draws charts as SVG: curves on shared axes, and bars. The page around a chart has the style sheet with the colours,
and the script that shows values.
"""

import math
from collections.abc import Mapping, Sequence
from html import escape

Point = tuple[float, float]

WIDTH, HEIGHT = 340, 218  # size of the drawing; a unit is about one pixel
LEFT, RIGHT, TOP, BOTTOM = 46, 12, 26, 38  # margins around the axes
MOST_DECADES = 6  # an axis over more decades does not have a tick at every decade
COLOURS = 10  # number of colours in the style sheet, .s1 to .s10

Ticks = list[tuple[float, str]]  # position from 0 to 1 along the axis, label


def line_chart(
    title: str, lines: Mapping[str, Sequence[Point]], logarithmic: bool = False, keys: bool = True, unit: str = ""
) -> str:
    """Returns a chart of several curves over updates. At least one curve must have a point.

    The colour of a curve depends on its index in `lines`. To keep colours equal across charts, also pass empty curves.
    With `keys`, the caption names the curves. `unit` is the title of the vertical axis.
    """
    values = [y for points in lines.values() for _, y in points]
    updates = [x for points in lines.values() for x, _ in points]
    logarithmic = logarithmic and min(values) > 0
    low, high, ticks = _scale(min(values), max(values), logarithmic)
    left, right = min(updates), max(updates)
    convert = math.log10 if logarithmic else float

    def position(x: float, y: float) -> Point:
        across, up = (x - left) / (right - left or 1), (convert(y) - low) / (high - low or 1)
        return LEFT + across * (WIDTH - LEFT - RIGHT), HEIGHT - BOTTOM - up * (HEIGHT - TOP - BOTTOM)

    below = [(position(value, values[0])[0], _short(value)) for value in _round_numbers(left, right, 4)]
    parts = [*_axes(ticks, below, ", ".join(filter(None, (unit, "logarithmic" * logarithmic))), "update")]
    for index, (name, points) in enumerate(lines.items()):
        if points:
            drawn = [position(*point) for point in points]
            path = " ".join(f"{x:.1f},{y:.1f}" for x, y in drawn)
            data = " ".join(f"{x:.12g},{y:.6g}" for x, y in points)
            colour = f"s{index % COLOURS + 1}"
            parts.append(
                f'<polyline class="{colour}" points="{path}" data-name="{escape(name)}" data-points="{data}"/>'
            )
            if len(points) == 1:
                parts.append(f'<circle class="{colour}" r="3" cx="{drawn[0][0]:.1f}" cy="{drawn[0][1]:.1f}"/>')
    caption = legend(lines, [name for name, points in lines.items() if points]) if keys else ""
    return _figure(title, caption, f"{title} by update" + ", logarithmic" * logarithmic, "".join(parts))


def bar_chart(title: str, note: str, counts: Sequence[int], unit: str) -> str:
    """Returns a bar chart. `counts[i]` is the number of cases with the value i. `unit` is the unit of i.

    `note` is the caption. The axis ends at the last value whose count is not 0.
    """
    longest = max((index for index, count in enumerate(counts) if count), default=1)
    low, high, ticks = _scale(0, max(1, *counts), False)
    step = (WIDTH - LEFT - RIGHT) / (longest + 1)
    below = [(LEFT + (value + 0.5) * step, _short(value)) for value in _round_numbers(0, longest, 6)]
    parts = [*_axes(ticks, below, "", unit)]
    for index, count in enumerate(counts):
        if count:
            height = (count - low) / (high - low) * (HEIGHT - TOP - BOTTOM)
            parts.append(_bar(LEFT + index * step, step, height, f"{index} {unit}: {count:,}"))
    return _figure(title, f"<span>{escape(note)}</span>", title, "".join(parts))


def histogram(
    title: str,
    edges: Sequence[float],
    counts: Sequence[int],
    limits: Sequence[float],
    unit: str,
    counted: str = "pairs",
) -> str:
    """Returns a histogram. `counts[i]` is the number of cases between `edges[i]` and `edges[i + 1]`.

    The axis of the counts is logarithmic. The chart has a line at each of the `limits`. `unit` is the unit of the
    edges, and `counted` names the cases.
    """
    high = math.log10(max(1, *counts) + 1)
    first, last = edges[0], edges[-1]
    marks = [0, *(10**power for power in range(len(str(max(1, *counts)))))]
    ticks: Ticks = [(math.log10(mark + 1) / high, _short(mark)) for mark in marks]

    def column(value: float) -> float:
        return LEFT + (value - first) / ((last - first) or 1) * (WIDTH - LEFT - RIGHT)

    below = [(column(value), _short(value)) for value in _round_numbers(first, last, 5)]
    parts = [*_axes(ticks, below, f"{counted}, logarithmic", unit)]
    for low, end, count in zip(edges, edges[1:], counts, strict=False):
        height = math.log10(count + 1) / high * (HEIGHT - TOP - BOTTOM)
        parts.append(_bar(column(low), column(end) - column(low), height, f"{low:.3g} to {end:.3g}: {count:,}"))
    for limit in limits:
        parts.append(
            f'<line class="limit" stroke="currentColor" stroke-dasharray="4 3" x1="{column(limit):.2f}" '
            f'x2="{column(limit):.2f}" y1="{TOP}" y2="{HEIGHT - BOTTOM}"><title>limit {limit:g}</title></line>'
        )
    caption = f"<span>limit {', '.join(f'{limit:g}' for limit in limits)}</span>" if limits else ""
    return _figure(title, caption, f"{title}, {counted} by score", "".join(parts))


def _bar(left: float, step: float, height: float, title: str) -> str:
    top, width = HEIGHT - BOTTOM - height, 0.9 * step
    return f'<rect x="{left:.2f}" y="{top:.2f}" width="{width:.2f}" height="{height:.2f}"><title>{title}</title></rect>'


def legend(names: Sequence[str] | Mapping[str, object], shown: Sequence[str] | None = None) -> str:
    """Returns HTML with the names of curves in the colours of the curves. With `shown`, omits all other names."""
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


def _axes(ticks: Ticks, below: Sequence[tuple[float, str]], vertical: str, horizontal: str) -> list[str]:
    """Returns grid lines and labels. `below` has the column and the label of each horizontal tick."""
    parts = []
    for up, label in ticks:
        row = HEIGHT - BOTTOM - up * (HEIGHT - TOP - BOTTOM)
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{row:.1f}" y2="{row:.1f}"/>')
        parts.append(f'<text x="{LEFT - 6}" y="{row + 4:.1f}" text-anchor="end">{label}</text>')
    for column, label in below:
        parts.append(f'<text x="{column:.1f}" y="{HEIGHT - BOTTOM + 16}" text-anchor="middle">{label}</text>')
    if vertical:
        parts.append(f'<text class="axis" x="4" y="11">{escape(vertical)}</text>')
    middle = (LEFT + WIDTH - RIGHT) / 2
    parts.append(f'<text class="axis" x="{middle}" y="{HEIGHT - 4}" text-anchor="middle">{escape(horizontal)}</text>')
    return parts


def _scale(low: float, high: float, logarithmic: bool) -> tuple[float, float, Ticks]:
    """Returns the ends and the ticks of an axis. The ends are the first and the last tick; all data lie between them.

    The ends of a `logarithmic` axis are logarithms.
    """
    if logarithmic:
        bottom, top = math.floor(math.log10(low)), math.ceil(math.log10(high))
        apart = max(1, math.ceil((top - bottom) / MOST_DECADES))  # decades from one tick to the next
        decades = range(bottom, top + apart, apart)
        digits = (1, 2, 5) if len(decades) <= 4 and apart == 1 else (1,)
        places = [
            (decade + math.log10(digit), _short(digit * 10.0**decade) if decade < 300 else f"1e{decade}")
            for decade in decades
            for digit in digits
        ]
        first = max(index for index, (place, _) in enumerate(places) if place <= math.log10(low) + 1e-9 or not index)
        last = next((index for index, (place, _) in enumerate(places) if place >= math.log10(high) - 1e-9), len(places))
        places = places[first : max(last, first) + 1]
        start, end = places[0][0], places[-1][0]
        return start, end, [((place - start) / (end - start or 1), mark) for place, mark in places]
    width = _step(low, high, 4) if high > low else abs(high) or 1.0
    start = math.floor(low / width + 1e-9) * width if high > low else low
    count = max(0, math.ceil((high - start) / width - 1e-9))
    marks = [start + index * width for index in range(count + 1)]
    return start, marks[-1], [(index / (count or 1), _short(mark)) for index, mark in enumerate(marks)]


def _step(low: float, high: float, count: int) -> float:
    """Returns the distance between about `count` ticks from `low` to `high`: 1, 2 or 5 times a power of ten."""
    rough = (high - low) / count
    power = 10.0 ** math.floor(math.log10(rough))
    return next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough * 0.999)


def _round_numbers(low: float, high: float, count: int) -> list[float]:
    """Returns about `count` round numbers from `low` to `high`."""
    if low == high:
        return [low]
    width = _step(low, high, count)
    return [index * width for index in range(math.ceil(low / width - 1e-9), math.floor(high / width + 1e-9) + 1)]


def _short(value: float) -> str:
    """Returns a number as a short label of an axis: 2,000, 120k, 3.5M, 0.002 or 4e16."""
    value = 0.0 if abs(value) < 1e-12 else value
    if abs(value) >= 1e12:
        return f"{value:.2g}".replace("e+", "e")
    for size, letter in ((1e9, "G"), (1e6, "M"), (1e5, "k")):
        if abs(value) >= size:
            return f"{value / (1e3 if letter == 'k' else size):.4g}{letter}"
    return f"{value:,.5g}"
