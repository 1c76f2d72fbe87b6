"""The state of a tenant's limits as response headers, under OpenAI's names and two similar ones.

OpenAI has one token limit, Hearth has two: `…-tokens` reports the one with the smaller remaining
share, `…-input-tokens` and `…-output-tokens` report each. `reset` is the time until the limit is
fully available, in OpenAI's format: 6m0s, 1.5s, 20ms.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from shared.tenancy.leases.rates import MINUTE_S, ROUNDING
from shared.tenancy.rate_limit import LimitState

_NAMES = {
    "requests_per_min": "requests",
    "input_tokens_per_min": "input-tokens",
    "output_tokens_per_min": "output-tokens",
}


def ratelimit_headers(limits: Mapping[str, int], state: LimitState) -> dict[str, str]:
    """Returns the headers of the limits that the tenant has."""
    headers: dict[str, str] = {}
    tokens = [name for name in _NAMES if name != "requests_per_min" and name in limits]
    for name, suffix in _NAMES.items():
        if name in limits:
            headers |= _headers(suffix, limits[name], state.used[name])
    if tokens:
        scarce = min(tokens, key=lambda name: 1 - state.used[name] / limits[name])
        headers |= _headers("tokens", limits[scarce], state.used[scarce])
    return headers


def _headers(suffix: str, limit: int, used: float) -> dict[str, str]:
    return {
        f"x-ratelimit-limit-{suffix}": str(limit),
        f"x-ratelimit-remaining-{suffix}": str(max(0, math.floor(limit - used + ROUNDING))),
        f"x-ratelimit-reset-{suffix}": duration(used * MINUTE_S / limit),
    }


def duration(seconds: float) -> str:
    if seconds < 1:
        return f"{math.ceil(seconds * 1e3)}ms"
    minutes, rest = divmod(round(seconds, 3), 60)
    text = f"{round(rest, 3):g}s"
    return f"{int(minutes)}m{text}" if minutes else text
