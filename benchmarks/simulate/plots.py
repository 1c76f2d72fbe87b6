"""Time to first token, by policy: one picture per run, one panel per case."""

from __future__ import annotations

import sys

import numpy as np

from benchmarks.report import RESULTS
from benchmarks.simulate.simulation import Outcome

MAX_POINTS = 500


def plot(name: str, cases: dict[str, dict[str, Outcome]]) -> None:
    """Writes `benchmarks/results/<name>.png`; if matplotlib is missing, prints that and returns."""
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError:
        print("no plot: matplotlib is missing (pip install '.[bench]')", file=sys.stderr)
        return
    figure = Figure(figsize=(4.5 * len(cases), 3.6), layout="constrained")
    for axes, (case, outcomes) in zip(
        figure.subplots(1, len(cases), squeeze=False)[0], cases.items(), strict=True
    ):
        for label, outcome in outcomes.items():
            shares = np.linspace(0, 1, MAX_POINTS)
            axes.plot(np.quantile(_shown(outcome), shares), shares, label=label)
        axes.set(title=case, xscale="log", xlabel="TTFT, s", ylabel="share of requests")
        axes.grid(alpha=0.3)
        axes.legend(fontsize="small")
    RESULTS.mkdir(exist_ok=True)
    figure.savefig(RESULTS / f"{name}.png", dpi=110)


def _shown(outcome: Outcome) -> np.ndarray:
    """Returns the TTFTs without the flooder's requests, which are meant to wait."""
    return np.array(outcome.ttft_s)[np.array(outcome.is_normal, dtype=bool)]
