"""A worker's speeds: differences of the counters in its heartbeats. No I/O.

A step counts when it ends, so one that began before the first heartbeat could exceed the time
between them, and its shares 1.
"""

from __future__ import annotations

from collections.abc import Sequence

from shared.messages import WorkerLoad

Loads = Sequence[tuple[float, WorkerLoad]]  # with the times of their heartbeats


def load_rates(loads: Loads) -> dict[str, float | None]:
    """Returns the fields of `ProcessView` of a worker's speeds: None, or left out, without two
    points in time.
    """
    busy_ratio = _rate(loads, "busy_s")
    return {
        "generated_per_s": _rounded(_rate(loads, "num_generated_tokens"), 1),
        "prefilled_per_s": _rounded(_rate(loads, "num_computed_prompt_tokens"), 1),
        "busy_ratio": None if busy_ratio is None else round(min(1.0, busy_ratio), 2),
        **_work_rates(loads),
    }


def _work_rates(loads: Loads) -> dict[str, float | None]:
    """Returns nothing of a worker that counts no work."""
    num_bytes, num_operations = (_rate(loads, each) for each in ("traffic_bytes", "num_operations"))
    if num_bytes is None or num_operations is None or not loads[-1][1].traffic_bytes:
        return {}
    found: dict[str, float | None] = {
        "traffic_bytes_per_s": float(f"{num_bytes:.2g}"),
        "operations_per_s": float(f"{num_operations:.2g}"),
    }
    peaks = loads[-1][1].peaks
    if peaks is not None:
        found["bandwidth_ratio"] = round(min(1.0, num_bytes / peaks.bytes_per_s), 2)
        found["arithmetic_ratio"] = round(min(1.0, num_operations / peaks.operations_per_s), 2)
    return found


def _rounded(value: float | None, num_digits: int) -> float | None:
    return None if value is None else round(value, num_digits)


def _rate(loads: Loads, counter: str) -> float | None:
    """Returns the growth of a counter per second, or None without two points in time."""
    if not loads or loads[-1][0] <= loads[0][0]:
        return None
    (first_at, first), (last_at, last) = loads[0], loads[-1]
    return float(getattr(last, counter) - getattr(first, counter)) / (last_at - first_at)
