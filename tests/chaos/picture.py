"""Draws streams over time while a decode worker is killed: benchmarks/results/chaos_streams.svg.

    python -m tests.chaos.picture

A real cluster and the requests of the chaos rows: a row for each stream, a mark for each event that
its client received, the kill as a line. Every response must equal that of the undisturbed run.
"""

from __future__ import annotations

import asyncio
import itertools
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from benchmarks.report import RESULTS
from tests.chaos.chaos import Call
from tests.chaos.checks.phases import reach
from tests.chaos.running import running_chaos

VICTIM = "decode-1"
WIDTH, ROW, LEFT, TOP, BOTTOM = 720, 9, 12, 46, 34
MOVED, UNMOVED, KILL, TEXT, GRID = "#c2410c", "#2563eb", "#111827", "#374151", "#d1d5db"
FONT = "font-family='sans-serif' font-size='12'"


@dataclass(frozen=True)
class Stream:
    """Seconds since the first request."""

    arrivals_s: list[float]
    is_resubmitted: bool

    def longest_gap_s(self, after_s: float) -> float:
        pairs = itertools.pairwise(self.arrivals_s)
        return max((b - max(a, after_s) for a, b in pairs if b > after_s), default=0.0)


async def killed_run(folder: Path) -> tuple[list[Stream], float]:
    """The streams, and the time of the kill."""
    async with running_chaos(folder) as chaos:
        started = time.monotonic()
        sent, tasks = chaos.send_all()
        await reach("decoding", chaos.monitor, sent, VICTIM)
        killed_s = time.monotonic() - started
        chaos.cluster.kill(VICTIM)
        await asyncio.gather(*tasks)
        for index, each in enumerate(sent):
            assert chaos.is_same(index, each.last), f"request {index} is altered"
        await chaos.cluster.restart(VICTIM)
        await chaos.cluster.wait_until_ready()
    return [stream_of(each, started) for each in sent], killed_s


def stream_of(call: Call, started: float) -> Stream:
    exchange = call.last
    is_resubmitted = exchange.metadata.get("num_resubmissions", 0) > 0
    return Stream([at - started for at in exchange.arrivals], is_resubmitted)


def svg_of(streams: list[Stream], killed_s: float) -> str:
    """Those that moved are at the top."""
    streams = sorted(streams, key=lambda each: (not each.is_resubmitted, each.arrivals_s[0]))
    end_s = max(each.arrivals_s[-1] for each in streams)
    height = TOP + ROW * len(streams) + BOTTOM
    scale = (WIDTH - 2 * LEFT) / end_s
    moved = [each for each in streams if each.is_resubmitted]
    longest_s = max((each.longest_gap_s(killed_s) for each in moved), default=0.0)
    title = (
        f"{VICTIM} is killed at {killed_s:.2f} s: {len(moved)} of {len(streams)} streams move, "
        f"none is lost or altered; longest pause {longest_s:.2f} s"
    )
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}">',
            f'<rect width="{WIDTH}" height="{height}" fill="white"/>',
            f"<text x='{LEFT}' y='18' fill='{KILL}' {FONT}>{title}</text>",
            *_axis(end_s, scale, height),
            *(_row(each, TOP + ROW * row, scale) for row, each in enumerate(streams)),
            *_kill(LEFT + killed_s * scale, height),
            "</svg>\n",
        ]
    )


def _axis(end_s: float, scale: float, height: int) -> list[str]:
    parts = []
    for second in range(int(end_s) + 1):
        x, bottom = LEFT + second * scale, height - BOTTOM
        parts.append(f"<path d='M{x:.1f} {TOP - 4}V{bottom}' stroke='{GRID}'/>")
        label = f"{second} s"
        parts.append(f"<text x='{x:.1f}' y='{bottom + 16}' fill='{TEXT}' {FONT}>{label}</text>")
    return parts


def _row(stream: Stream, y: int, scale: float) -> str:
    marks = "".join(f"M{LEFT + at * scale:.1f} {y}v{ROW - 3}" for at in stream.arrivals_s)
    colour = MOVED if stream.is_resubmitted else UNMOVED
    return f"<path d='{marks}' stroke='{colour}' stroke-width='1'/>"


def _kill(x: float, height: int) -> list[str]:
    return [
        f"<path d='M{x:.1f} {TOP - 12}V{height - BOTTOM}' stroke='{KILL}' stroke-width='2'/>",
        f"<text x='{x + 4:.1f}' y='{TOP - 8}' fill='{KILL}' {FONT}>kill -9</text>",
    ]


def main() -> int:
    with tempfile.TemporaryDirectory(prefix="hearth-chaos-") as folder:
        streams, killed_s = asyncio.run(killed_run(Path(folder)))
    (RESULTS / "chaos_streams.svg").write_text(svg_of(streams, killed_s))
    return 0


if __name__ == "__main__":
    sys.exit(main())
