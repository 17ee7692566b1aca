"""Charts as inline SVG: lines, stacked columns and bars. Colours come from the page, so that they follow light and dark.

Each chart also has its numbers as a table, for readers who cannot see it or want to copy them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from html import escape

WIDTH, HEIGHT = 400, 220
LEFT, RIGHT, TOP, BOTTOM = 48, 10, 12, 38
"""Margins around the plot, in the units of the drawing."""
MAX_MARKED_VALUES = 40
"""Lines with up to this many values have a mark at each value."""
MAX_SEPARATE_COLUMNS = 80
"""With more columns than this, they have no gaps and are drawn as one shape."""
ROW_HEIGHT = 24
"""Height of one bar with its name."""

Form = Callable[[float], str]
"""A number as people read it."""


Series = Mapping[str, Sequence[float | None]]
"""Named rows of numbers; None marks a missing number. A chart without any number is None."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Chart:
    """A drawing, what its colours mean, and the numbers in it."""

    title: str
    svg: str
    legend: tuple[str, ...]
    """Names of the colours c0, c1, ...; empty if there is only one."""
    head: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    note: str = ""


def lines(
    title: str, x: Sequence[float], series: Series, *, x_label: str, form: Form, x_form: Form = "{:,.0f}".format,
    least: float | None = None, note: str = "",
) -> Chart | None:  # fmt: skip
    """Lines over `x`; the axis runs from `least`, or the smallest value, to the largest."""
    known = _known(series)
    if not known:
        return None
    least = min(known) if least is None else least
    most = max(known)
    if least == most:  # from 0 or to 0: around a single accuracy the axis would pass 100%
        least, most = min(least, 0.0), max(most, 0.0)
    axis = ticks(least, most)
    low, high = (x[0], x[-1]) if x[-1] > x[0] else (x[0] - 0.5, x[0] + 0.5)

    def across(value: float) -> float:
        return LEFT + (WIDTH - RIGHT - LEFT) * (value - low) / (high - low)

    body = _grid(axis, form)
    for number, (name, values) in enumerate(series.items()):
        points = [(across(a), _height(b, axis), a, b) for a, b in zip(x, values, strict=True) if b is not None]
        path = " ".join(f"{a:.1f},{b:.1f}" for a, b, _, _ in points)
        body += f'<polyline class="line c{number}" points="{path}"/>'
        for a, b, at, value in points if len(points) <= MAX_MARKED_VALUES else ():
            told = f"{name}, " * (len(series) > 1) + f"{x_label} {x_form(at)}: {form(value)}"
            body += (
                f'<circle class="dot c{number}" cx="{a:.1f}" cy="{b:.1f}" r="3"><title>{escape(told)}</title></circle>'
            )
    marks = [v for v in ticks(low, high, whole=all(float(v).is_integer() for v in x)) if low <= v <= high]
    body += _feet([(across(v), x_form(v)) for v in marks], x_label)
    return _chart(title, body, series, [x_form(v) for v in x], x_label, form, note)


def columns(
    title: str, names: Sequence[str], series: Series, *, x_label: str, form: Form,
    feet: Sequence[tuple[float, str]] | None = None, note: str = "",
) -> Chart | None:  # fmt: skip
    """Stacked columns, one per name. `feet` are marks below, (columns from the left, text); by default some of the names."""
    if not _known(series):
        return None
    tops = [[0.0] * len(names)]
    for values in series.values():
        tops.append([below + max(value or 0.0, 0.0) for below, value in zip(tops[-1], values, strict=True)])
    axis = ticks(0.0, max(tops[-1]))
    step = (WIDTH - RIGHT - LEFT) / len(names)
    body = _grid(axis, form)
    for number, (name, values) in enumerate(series.items()):
        layer = [
            (_height(low, axis), _height(high, axis)) for low, high in zip(tops[number], tops[number + 1], strict=True)
        ]
        if len(names) > MAX_SEPARATE_COLUMNS:
            body += _steps(layer, step, number)
            continue
        for i, (bottom, top) in enumerate(layer):
            told = f"{names[i]}: {form(values[i] or 0.0)}" + f" {name}" * (len(series) > 1)
            body += (
                f'<rect class="fill c{number}" x="{LEFT + (i + 0.1) * step:.2f}" y="{top:.2f}" width="{0.8 * step:.2f}" '
                f'height="{bottom - top:.2f}"><title>{escape(told)}</title></rect>'
            ) * (bottom > top)
    if feet is None:
        every = ticks(0.0, len(names), count=8, whole=True)[1]
        at = [int(name) if name.isdecimal() else i for i, name in enumerate(names)]
        feet = [(i + 0.5, name) for i, name in enumerate(names) if at[i] % every == 0]
    body += _feet([(LEFT + at * step, text) for at, text in feet], x_label)
    return _chart(title, body, series, names, x_label, form, note)


def bars(
    title: str, names: Sequence[str], series: Series, *, form: Form, what: str = "", note: str = "", hues: bool = True,
) -> Chart | None:  # fmt: skip
    """Horizontal bars with their numbers, each below its name; several series are drawn below each other.

    A single series has one colour per bar, or one colour in all if `hues` is off.
    """
    known, several = _known(series), len(series) > 1
    if not known:
        return None
    most, thick = max(known) or 1.0, 8 if several else 10
    step = ROW_HEIGHT + thick * len(series)
    body = ""
    for i, name in enumerate(names):
        top = i * step
        body += f'<text class="name" x="0" y="{top + 14}">{escape(_cut(name, 44))}</text>'
        if several:  # beside the bars the numbers would lie on each other
            all_of = " · ".join(_cell(values[i], form) for values in series.values())
            body += f'<text class="value end" x="{WIDTH}" y="{top + 14}">{escape(all_of)}</text>'
        for number, (of, values) in enumerate(series.items()):
            value, y = values[i], top + 20 + number * thick
            if value is None:
                continue
            width = max((WIDTH - (0 if several else 80)) * value / most, 1.0)
            colour = i if hues and not several else number
            body += (
                f'<rect class="fill c{colour % 6}" x="0" y="{y}" width="{width:.1f}" height="{thick - 1}">'
                f"<title>{escape(f'{name}: {form(value)}' + f' {of}' * several)}</title></rect>"
            )
            if not several:
                body += f'<text class="value" x="{width + 6:.1f}" y="{y + thick - 1}">{escape(form(value))}</text>'
    return _chart(title, body, series, names, what, form, note, height=len(names) * step + 4)


def ticks(low: float, high: float, *, count: int = 5, whole: bool = False) -> list[float]:
    """Round numbers around [low, high]: steps of 1, 2 or 5 times a power of ten, about `count` of them."""
    if not high > low:
        high = low + (1.0 if low == 0 else abs(low))
    raw = (high - low) / count
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(m * power for m in (1, 2, 5, 10) if m * power >= raw * 0.9)
    step = max(1.0, step) if whole else step
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [round(i * step, 12) for i in range(first, last + 1)]


def _height(value: float, axis: Sequence[float]) -> float:
    return HEIGHT - BOTTOM - (HEIGHT - BOTTOM - TOP) * (value - axis[0]) / (axis[-1] - axis[0])


def _steps(layer: Sequence[tuple[float, float]], step: float, number: int) -> str:
    """Columns of (bottom, top) without gaps, as one shape: over the tops and back along the bottoms."""
    there = [f"{LEFT + (i + k) * step:.2f},{top:.2f}" for i, (_, top) in enumerate(layer) for k in (0, 1)]
    back = [f"{LEFT + (i + k) * step:.2f},{bottom:.2f}" for i, (bottom, _) in enumerate(layer) for k in (0, 1)]
    return f'<polygon class="fill c{number}" points="{" ".join([*there, *reversed(back)])}"/>'


def _grid(axis: Sequence[float], form: Form) -> str:
    parts: list[str] = []
    for value in axis:
        y = _height(value, axis)
        parts.append(
            f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>'
            f'<text class="tick end" x="{LEFT - 6}" y="{y + 4:.1f}">{escape(form(value))}</text>'
        )
    return "".join(parts)


def _feet(marks: Sequence[tuple[float, str]], label: str) -> str:
    texts = "".join(
        f'<text class="tick middle" x="{min(x, WIDTH - RIGHT - 8):.1f}" y="{HEIGHT - BOTTOM + 17}">{escape(text)}</text>'
        for x, text in marks
    )
    return f'{texts}<text class="label middle" x="{(LEFT + WIDTH - RIGHT) / 2}" y="{HEIGHT - 5}">{escape(label)}</text>'


def _chart(
    title: str, body: str, series: Series, names: Sequence[str], what: str, form: Form, note: str,
    *, height: float = HEIGHT,
) -> Chart:  # fmt: skip
    rows = [(name, *(_cell(values[i], form) for values in series.values())) for i, name in enumerate(names)]
    told = ", ".join(series) + (f" by {what}" if what else "")
    drawn = (
        f'<svg viewBox="0 0 {WIDTH} {height:g}" role="img"><title>{escape(title)}</title>'
        f"<desc>{escape(told)}. The numbers are in the table below.</desc>{body}</svg>"
    )
    legend = tuple(series) if len(series) > 1 else ()
    return Chart(title=title, svg=drawn, legend=legend, head=(what, *series), rows=tuple(rows), note=note)


def _known(series: Series) -> list[float]:
    return [value for values in series.values() for value in values if value is not None]


def _cell(value: float | None, form: Form) -> str:
    return "-" if value is None else form(value)


def _cut(text: str, most: int) -> str:
    return text if len(text) <= most else text[: most - 1] + "…"
