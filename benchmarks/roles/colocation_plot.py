"""The rows of `colocation.py` as an SVG: p90 ITL of streams over p90 TTFT of long prompts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import log10

from benchmarks.report import Row

WIDTH, HEIGHT, MARGIN = 760, 440, 70
COLOURS = {"overlap": "#1f77b4", "sum": "#d62728"}


class _Axis:
    """Logarithmic, from `low` to `high`, drawn between two pixels."""

    def __init__(self, values: Sequence[float], start: float, end: float) -> None:
        self.low, self.high = min(values) / 1.3, max(values) * 1.3
        self._start, self._end = start, end

    def at(self, value: float) -> float:
        share = log10(value / self.low) / log10(self.high / self.low)
        return round(self._start + share * (self._end - self._start), 1)

    def ticks(self) -> list[float]:
        steps = (digit * 10.0**power for power in range(-4, 4) for digit in (1, 2, 5))
        return [each for each in steps if self.low <= each <= self.high]


def svg_of(rows: Sequence[Row]) -> str:
    x = _Axis([row["TTFT p90 s"] for row in rows], MARGIN, WIDTH - 20)
    y = _Axis([row["ITL p90 ms"] for row in rows], HEIGHT - MARGIN, 40)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{HEIGHT}" '
        'font-family="sans-serif" font-size="12">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
        *_frame(x, y),
    ]
    for number, (cost, colour) in enumerate(COLOURS.items()):
        parts.append(_text(MARGIN + 8, 52 + 16 * number, f"step time by {cost}", colour))
        parts += _series([row for row in rows if row["step time"] == cost], x, y, colour)
    return "\n".join([*parts, "</svg>"]) + "\n"


def _frame(x: _Axis, y: _Axis) -> Iterator[str]:
    bottom = HEIGHT - MARGIN
    yield _text(WIDTH / 2 - 150, HEIGHT - 20, "p90 TTFT of 8k prompts, s (log)")
    yield _text(10, 24, "p90 ITL of running streams, ms (log). Circles: both roles, by chunk size")
    yield _line(MARGIN, bottom, WIDTH - 20, bottom, "black")
    yield _line(MARGIN, 40, MARGIN, bottom, "black")
    for value in x.ticks():
        yield _text(x.at(value) - 8, bottom + 18, f"{value:g}")
    for value in y.ticks():
        yield _text(MARGIN - 34, y.at(value) + 4, f"{value:g}")


def _series(rows: Sequence[Row], x: _Axis, y: _Axis, colour: str) -> Iterator[str]:
    points = [(x.at(row["TTFT p90 s"]), y.at(row["ITL p90 ms"]), row) for row in rows]
    both = [(left, top) for left, top, row in points if row["workers"] != "split"]
    path = " ".join(f"{left},{top}" for left, top in both)
    yield f'<polyline points="{path}" fill="none" stroke="{colour}"/>'
    for left, top, row in points:
        if row["workers"] == "split":
            yield _line(left, 40, left, HEIGHT - MARGIN, colour, dash="4 4")
            yield f'<rect x="{left - 5}" y="{top - 5}" width="10" height="10" fill="{colour}"/>'
            yield _text(left + 8, top + 14, "split", colour)
        else:
            yield f'<circle cx="{left}" cy="{top}" r="4" fill="{colour}"/>'
            yield _text(left + 6, top - 6, str(row["chunk tokens"]), colour)


def _line(x1: float, y1: float, x2: float, y2: float, colour: str, dash: str = "") -> str:
    dashed = f' stroke-dasharray="{dash}"' if dash else ""
    return f'<line x1="{x1}" y1="{y1}" x2="{x2}" y2="{y2}" stroke="{colour}"{dashed}/>'


def _text(x: float, y: float, content: str, colour: str = "black") -> str:
    return f'<text x="{x}" y="{y}" fill="{colour}">{content}</text>'
