"""The limits of a tenant that are metered, and how long an excess takes to drain."""

from __future__ import annotations

RATES = ("requests_per_min", "input_tokens_per_min", "output_tokens_per_min")
METERED = (*RATES, "concurrency")
MINUTE_S = 60.0
ROUNDING = 1e-6  # part of a token
CONCURRENCY_RETRY_S = 1.0  # the end of a request cannot be predicted


def drain_s(excess: float, limit: int) -> float:
    """Returns the seconds in which a meter drains `excess`."""
    return excess * MINUTE_S / limit
