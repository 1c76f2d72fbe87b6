"""Orders the phases of a placement on the gateway's clock. No I/O.

Durations come from other processes, and some overlap: a worker computes while its scheduler's
reply is in transit. The gateway knows when it submitted and when the first token arrived; the
phases fill exactly that time. Unmeasured time, such as that of the network, is in `first_token`.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import accumulate
from typing import NamedTuple

from services.gateway.observability.telemetry.request_record import RequestRecord
from services.gateway.streams.try_record import TryRecord
from shared.messages import Served
from shared.telemetry.timeline import Phase, PhaseName, Try

# Phases that may overlap others, in the order in which they are shortened to fit the time.
# `submit` comes first, as no process measures it: the worker computes while the reply travels.
_SHORTENED: tuple[PhaseName, ...] = (
    *("submit", "placement", "reserve", "prefill_wait", "queue"),
    *("kv_push", "prefill"),
)


def gateway_phases(record: RequestRecord, gateway_id: str, end_at: float) -> tuple[Phase, ...]:
    """Returns the phases before the first try: until the mark `submit`, or until `end_at` for a
    rejected request.
    """
    spent_s, name = dict(record.spent_s), record.phase
    if name != "submit":
        spent_s[name] = spent_s.get(name, 0.0) + max(0.0, end_at - record.phase_began_at)
    starts_s = accumulate(spent_s.values(), initial=0.0)
    phases = [
        Phase(name=each, process_id=gateway_id, start_s=start_s, duration_s=duration_s)
        for (each, duration_s), start_s in zip(spent_s.items(), starts_s, strict=False)
    ]
    if record.stall_s:
        start_s = record.stalled_at - record.arrived_at
        phases.append(
            Phase(
                name="client_stall",
                process_id=gateway_id,
                start_s=start_s,
                duration_s=record.stall_s,
            )
        )
    return tuple(phases)


def submitted_at(record: RequestRecord) -> float:
    """Returns the time when the last prompt was tokenized, or of the arrival if it has not been
    yet.
    """
    return record.phase_began_at if record.phase == "submit" else record.arrived_at


def try_of(
    each: TryRecord, *, began_at: float, arrived_at: float, gateway_id: str, is_last: bool
) -> Try:
    """Returns the phases of one try as a Try. `began_at` is the end of the previous try or of the
    preparation.
    """
    placed, served = each.placed, each.served
    return Try(
        number=each.number,
        placement_id="" if placed is None else placed.placement_id.hex(),
        scheduler_id="" if placed is None else placed.scheduler_id or "",
        worker_id="" if placed is None else placed.worker_id,
        prefill_worker_id="" if served is None else served.prefill_worker_id or "",
        outcome=each.outcome,
        move=each.move,
        phases=_phases(each, began_at, arrived_at, gateway_id, is_last=is_last),
    )


class _Part(NamedTuple):
    """A phase without its start: a `Phase` is built once, when that is known."""

    name: PhaseName
    process_id: str
    duration_s: float = 0.0
    num_bytes: int = 0
    num_tokens: int = 0
    port: str = ""
    num_copies: int = 0
    predicted_s: float = 0.0


def _phases(
    each: TryRecord, began_at: float, arrived_at: float, gateway_id: str, *, is_last: bool
) -> tuple[Phase, ...]:
    start_s, end_s = began_at - arrived_at, each.ended_at - arrived_at
    if each.placed is None:
        return (_phase("submit", gateway_id, start_s, end_s),)
    worker_id, first_token_at = each.placed.worker_id, each.first_token_at
    parts = _placement(each, began_at, gateway_id)
    if first_token_at is None:
        last = _Part("first_token", worker_id) if is_last else _Part("recovery", gateway_id)
        return tuple(_laid([*parts, last], start_s, end_s))
    parts += _prefill(each.served, worker_id)
    parts.append(_Part("first_token", worker_id))
    first_token_s = first_token_at - arrived_at
    phases = _laid(parts, start_s, first_token_s)
    decode_end_s = end_s if is_last else each.last_token_at - arrived_at
    decoded = None if each.served is None else each.served.phases
    phases.append(
        Phase(
            name="decode",
            process_id=worker_id,
            start_s=first_token_s,
            duration_s=max(0.0, decode_end_s - first_token_s),
            num_tokens=each.num_tokens,
            num_steps=decoded.num_steps if decoded is not None and each.is_counted else 0,
        )
    )
    if not is_last:
        phases.append(_phase("recovery", gateway_id, decode_end_s, end_s))
    return tuple(phases)


def _placement(each: TryRecord, began_at: float, gateway_id: str) -> list[_Part]:
    placed = each.placed
    assert placed is not None
    scheduler_id = placed.scheduler_id or ""
    on_the_way_s = each.placed_at - began_at - placed.queued_s - placed.placement_s
    return [
        _Part("submit", gateway_id, max(0.0, on_the_way_s)),
        _Part("queue", scheduler_id, placed.queued_s),
        _Part("placement", scheduler_id, placed.placement_s),
    ]


def _prefill(served: Served | None, worker_id: str) -> list[_Part]:
    """Returns the phases from the command at decode to the complete KV, or to the first token if
    decode computes the prompt.
    """
    phases = None if served is None else served.phases
    if served is None or phases is None:
        return []
    reserve = _Part("reserve", worker_id, phases.reserve_s)
    prefill_id, wait_s = served.prefill_worker_id, phases.prefill_wait_s
    if prefill_id is None:
        return [reserve, _Part("prefill", worker_id, phases.first_step_s)]
    if phases.prefill is None:
        return [reserve, _Part("prefill", prefill_id, wait_s)]
    pushed = phases.prefill
    compute_s, push_s = pushed.compute_s, pushed.push_s
    return [
        reserve,
        _Part("prefill_wait", prefill_id, max(0.0, wait_s - compute_s - push_s)),
        _Part("prefill", prefill_id, compute_s),
        _Part(
            "kv_push",
            prefill_id,
            push_s,
            pushed.num_pushed_bytes,
            served.num_pushed_tokens,
            port=f"{pushed.port} ({pushed.place})" if pushed.port else "",
            num_copies=pushed.num_copies,
            predicted_s=pushed.predicted_s,
        ),
    ]


def _laid(parts: list[_Part], start_s: float, end_s: float) -> list[Phase]:
    """Returns the parts as consecutive phases from start to end. The last part gets the remaining
    time.
    """
    durations = {part.name: part.duration_s for part in parts}
    left_s = end_s - start_s - sum(durations.values())
    if left_s < 0:
        left_s = _shorten(durations, left_s)
    durations[parts[-1].name] = max(0.0, left_s)
    phases = []
    for part in parts:
        duration_s = durations[part.name]
        phases.append(Phase(**part._asdict() | {"start_s": start_s, "duration_s": duration_s}))
        start_s += duration_s
    return phases


def _shorten(durations: dict[PhaseName, float], left_s: float) -> float:
    """Shortens durations until the negative `left_s` is zero, if possible. Returns the new
    `left_s`.
    """
    for name in _SHORTENED:
        if left_s < 0 and name in durations:
            cut_s = min(durations[name], -left_s)
            durations[name] -= cut_s
            left_s += cut_s
    return left_s


def _phase(name: PhaseName, process_id: str, start_s: float, end_s: float) -> Phase:
    return Phase(
        name=name,
        process_id=process_id,
        start_s=start_s,
        duration_s=max(0.0, end_s - start_s),
    )


def num_late_masks(tries: Iterable[TryRecord]) -> int:
    phases = (each.served.phases for each in tries if each.served is not None)
    return sum(each.num_late_masks for each in phases if each is not None)
