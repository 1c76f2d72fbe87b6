"""Detects from outside when most streams are in a given phase."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from typing import Literal

from shared.messages import KvEvents, Placed, WorkerLoad
from tests.chaos.chaos import Call
from tests.chaos.checks.monitor import Monitor
from tests.support.waiting import LIMIT_S, until

Phase = Literal[
    "queued", "placed", "encoding", "prefilling", "transferring", "decoding", "finishing"
]

PHASES: tuple[Phase, ...] = (
    "queued",
    "placed",
    "prefilling",
    "transferring",
    "decoding",
    "finishing",
)
IMAGE_PHASES: tuple[Phase, ...] = ("encoding", "transferring", "decoding")
POLL_S = 0.005


async def reach(
    phase: Phase, monitor: Monitor, sent: list[Call], victim: str, timeout_s: float = LIMIT_S
) -> None:
    """Waits until a fault of `victim` would hit the streams in this phase. Raises NotReached."""
    is_reached = _in_phase(phase, monitor, sent, victim)
    await until(
        is_reached,
        timeout_s=timeout_s,
        poll_s=POLL_S,
        seen=lambda: f"{phase}: {Counter(type(each.message) for each in monitor.recorded)}",
    )


def _in_phase(phase: Phase, monitor: Monitor, sent: list[Call], victim: str) -> Callable[[], bool]:
    def placed() -> list[float]:
        return [each.at for each in monitor.of(Placed)]

    def stored() -> bool:
        names = {each.subject for each in monitor.of(KvEvents)}
        return victim in names if victim.startswith("prefill") else bool(names)

    def is_queued() -> bool:
        times = placed()
        is_waiting = 4 <= len(times) <= len(sent) - 4
        return is_waiting and time.monotonic() - times[-1] > 0.04

    def is_placed() -> bool:
        ids = {each.message.worker_id for each in monitor.of(Placed)}
        return victim in ids if victim.startswith("decode") else bool(ids)

    def is_encoding() -> bool:
        """Whether a picture is encoded, and the victim encodes it or waits for it."""
        loads = {name: each.load for name, each in monitor.newest.items() if each.load is not None}
        has_begun = any(n.startswith("encode") and each.num_running for n, each in loads.items())
        own = loads.get(victim)
        return has_begun and own is not None and bool(_num_claims(own))

    def is_decoding() -> bool:
        return sum(bool(a.tries) and len(a.last.arrivals) >= 15 for a in sent) >= 0.75 * len(sent)

    return {
        "queued": is_queued,
        "placed": is_placed,
        "encoding": is_encoding,
        "prefilling": lambda: len(placed()) >= 4 and time.monotonic() - placed()[3] > 0.03,
        "transferring": stored,
        "decoding": is_decoding,
        "finishing": lambda: sum(bool(a.tries) and a.last.is_done for a in sent) >= 3,
    }[phase]


def _num_claims(load: WorkerLoad) -> int:
    """Returns what an encode worker encodes, or what another worker waits for or computes."""
    return load.num_running + load.num_waiting + load.num_handoffs_in_flight
