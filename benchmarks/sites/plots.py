"""A picture of lines beside a part's result."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence

from benchmarks.report import RESULTS


def plot_lines(
    name: str, lines: Mapping[str, Sequence[tuple[float, float]]], *, x: str, y: str
) -> None:
    """Writes `benchmarks/results/<name>.svg`; if matplotlib is missing, prints that and returns."""
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError:
        print("no plot: matplotlib is missing (pip install '.[bench]')", file=sys.stderr)
        return
    figure = Figure(figsize=(6, 3.6), layout="constrained")
    axes = figure.subplots()
    for label, points in lines.items():
        axes.plot(*zip(*points, strict=True), marker="o", markersize=3, label=label)
    axes.set(xlabel=x, ylabel=y, ylim=(0, None))
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small")
    RESULTS.mkdir(exist_ok=True)
    figure.savefig(RESULTS / f"{name}.svg")
