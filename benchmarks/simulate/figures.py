"""An outcome's figures."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from benchmarks.report import Row
from benchmarks.simulate.simulation import Outcome

# The limits for a request to count as good: time to first token, and time per later token.
SLO_TTFT_S = 1.0
SLO_TPOT_S = 0.03


@dataclass(frozen=True, slots=True)
class Figures:
    num_requests: int
    num_refused: int
    num_expired: int
    ttft_p50_s: float
    ttft_p99_s: float
    normal_ttft_p99_s: float  # excludes the flooder's requests
    tpot_p99_s: float
    goodput_per_s: float
    hit_ratio: float
    local_share: float
    decision_us: float
    heartbeat_us: float

    def row(self) -> Row:
        """Returns names with units, rounded for display."""
        return {
            "requests": self.num_requests,
            "refused": self.num_refused,
            "expired": self.num_expired,
            "ttft_p50_ms": round(self.ttft_p50_s * 1e3, 1),
            "ttft_p99_ms": round(self.ttft_p99_s * 1e3, 1),
            "normal_ttft_p99_ms": round(self.normal_ttft_p99_s * 1e3, 1),
            "tpot_p99_ms": round(self.tpot_p99_s * 1e3, 1),
            "goodput_per_s": round(self.goodput_per_s, 1),
            "hit_ratio": round(self.hit_ratio, 3),
            "local_share": round(self.local_share, 3),
            "decision_us": round(self.decision_us, 1),
            "heartbeat_us": round(self.heartbeat_us, 1),
        }


def figures_of(outcome: Outcome) -> Figures:
    ttft_s, tpot_s = np.array(outcome.ttft_s), np.array(outcome.tpot_s)
    is_normal = np.array(outcome.is_normal, dtype=bool)
    is_good = (ttft_s <= SLO_TTFT_S) & (tpot_s <= SLO_TPOT_S)
    return Figures(
        num_requests=len(ttft_s),
        num_refused=outcome.num_refused.total(),
        num_expired=outcome.num_expired.total(),
        ttft_p50_s=float(np.percentile(ttft_s, 50)),
        ttft_p99_s=float(np.percentile(ttft_s, 99)),
        normal_ttft_p99_s=float(np.percentile(ttft_s[is_normal], 99)),
        tpot_p99_s=float(np.percentile(tpot_s, 99)),
        goodput_per_s=float(is_good.sum() / max(outcome.arrived_at)),
        hit_ratio=1 - outcome.num_computed_tokens / outcome.num_prompt_tokens,
        local_share=outcome.num_local / len(ttft_s),
        decision_us=usual_mean(np.array(outcome.decision_ns)) / 1e3,
        heartbeat_us=outcome.hearing_ns / 1e3 / outcome.num_heartbeats,
    )


def usual_mean(durations: np.ndarray) -> float:
    """Returns the mean without the slowest hundredth, when the machine did something else."""
    return float(durations[durations <= np.percentile(durations, 99)].mean())
