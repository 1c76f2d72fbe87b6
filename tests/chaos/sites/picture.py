"""Draws the streams of a run of cuts over time: benchmarks/results/chaos_links.svg."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator

from tests.chaos.picture import FONT, GRID, KILL, TEXT, UNMOVED
from tests.chaos.sites.cuts import Cut, Flow
from tests.chaos.sites.streams import token_times

WIDTH, ROW, LEFT, TOP, BOTTOM = 960, 6, 12, 46, 34
COLOURS = {"cut": "#fed7aa", "half open": "#e9d5ff"}
PAUSE_S = 1.0  # a shorter gap is none
GRID_S = 60


def svg_of(flow: Flow) -> str:
    """A row for each client, with a line while tokens come."""
    rows = [_times_s(flow, index) for index in range(len(flow.sent))]
    end_s = max(times[-1] for times in rows if times)
    scale = (WIDTH - 2 * LEFT) / end_s
    height = TOP + ROW * len(rows) + BOTTOM
    title = (
        f"{len(flow.cuts)} cuts of a link, {len(flow.sent)} clients of the other site's model: "
        f"{flow.lost} of {len(flow.streams)} streams lost, {flow.altered} altered. "
        "Shaded: cut (orange), half open (violet)"
    )
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}">',
            f'<rect width="{WIDTH}" height="{height}" fill="white"/>',
            f"<text x='{LEFT}' y='18' fill='{KILL}' {FONT}>{title}</text>",
            *(_shade(each, scale, height) for each in flow.cuts),
            *_axis(end_s, scale, height),
            *(_row(times, TOP + ROW * row, scale) for row, times in enumerate(rows)),
            "</svg>\n",
        ]
    )


def _times_s(flow: Flow, index: int) -> list[float]:
    tries = (each for stream in flow.sent[index] for each in stream.tries)
    return [at - flow.started for each in tries for at in token_times(each)]


def flowing(times_s: Iterable[float]) -> Iterator[tuple[float, float]]:
    """Yields the beginnings and ends of what has no pause."""
    first = last = None
    for at in times_s:
        if first is None or last is None:
            first = at
        elif at - last > PAUSE_S:
            yield first, last
            first = at
        last = at
    if first is not None and last is not None:
        yield first, last


def _shade(cut: Cut, scale: float, height: int) -> str:
    x, width = LEFT + cut.began_s * scale, cut.cut_s * scale
    place = f"x='{x:.1f}' y='{TOP - 4}' width='{width:.1f}' height='{height - TOP - BOTTOM + 4}'"
    return f"<rect {place} fill='{COLOURS[cut.kind]}'/>"


def _axis(end_s: float, scale: float, height: int) -> list[str]:
    parts = []
    for second in itertools.takewhile(lambda at: at <= end_s, itertools.count(0, GRID_S)):
        x, bottom = LEFT + second * scale, height - BOTTOM
        parts.append(f"<path d='M{x:.1f} {TOP - 4}V{bottom}' stroke='{GRID}'/>")
        label = f"{second // 60} min"
        parts.append(f"<text x='{x:.1f}' y='{bottom + 16}' fill='{TEXT}' {FONT}>{label}</text>")
    return parts


def _row(times_s: list[float], y: int, scale: float) -> str:
    lines = "".join(
        f"M{LEFT + first * scale:.1f} {y}H{LEFT + last * scale:.1f}"
        for first, last in flowing(times_s)
    )
    return f"<path d='{lines}' stroke='{UNMOVED}' stroke-width='2'/>"
