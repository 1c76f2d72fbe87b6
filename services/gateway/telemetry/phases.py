"""Lays the phases of a placement one behind the other, by the gateway's clock. No I/O.

Durations come from other processes, and some overlap: a worker computes while its scheduler's
reply is under way. The gateway knows when it submitted and when the first token arrived; the phases
fill exactly that time. What no process has measured, such as the wire, is part of `first_token`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import pairwise

import msgspec

from services.gateway.streams.try_record import TryRecord
from services.gateway.telemetry.request_record import RequestRecord
from shared.messages import Served
from shared.telemetry.timeline import Phase, PhaseName, Try

# What is shortened first if the durations exceed the time: the phases that may overlap others.
# `submit` is no process's measurement: the scheduler's reply travels while the worker computes.
_SHORTENED: tuple[PhaseName, ...] = (
    *("submit", "placement", "reserve", "prefill_wait", "queue"),
    *("kv_push", "prefill"),
)


def gateway_phases(record: RequestRecord, gateway_id: str, end_at: float) -> tuple[Phase, ...]:
    """Before the first try: until the mark `submit`, or until `end_at` for a rejected request."""
    marks = [*record.marks, ("submit", max(end_at, record.marks[-1][1]))]
    phases = [
        Phase(
            name=name,
            process_id=gateway_id,
            start_s=began_at - record.arrived_at,
            duration_s=ended_at - began_at,
        )
        for (name, began_at), (_, ended_at) in pairwise(marks)
        if name != "submit"
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
    """When the last prompt was tokenized."""
    name, began_at = record.marks[-1]
    return began_at if name == "submit" else record.arrived_at


def try_of(
    each: TryRecord, *, began_at: float, arrived_at: float, gateway_id: str, is_last: bool
) -> Try:
    """`began_at`: the end of the try before, or of the preparation."""
    placed, served = each.placed, each.served
    phases = list(_phases(each, began_at, gateway_id, is_last=is_last))
    return Try(
        number=each.number,
        placement_id="" if placed is None else placed.placement_id.hex(),
        scheduler_id="" if placed is None else placed.scheduler_id or "",
        worker_id="" if placed is None else placed.worker_id,
        prefill_worker_id="" if served is None else served.prefill_worker_id or "",
        outcome=each.outcome,
        phases=tuple(
            msgspec.structs.replace(phase, start_s=phase.start_s - arrived_at) for phase in phases
        ),
    )


def _phases(each: TryRecord, began_at: float, gateway_id: str, *, is_last: bool) -> Iterator[Phase]:
    """With `start_s` by the gateway's clock."""
    if each.placed is None:
        yield _phase("submit", gateway_id, began_at, each.ended_at - began_at)
        return
    worker_id, first_token_at = each.placed.worker_id, each.first_token_at
    parts = _placement(each, began_at, gateway_id)
    if first_token_at is None:
        last: PhaseName = "first_token" if is_last else "recovery"
        owner = worker_id if is_last else gateway_id
        yield from _laid([*parts, _phase(last, owner)], began_at, each.ended_at)
        return
    parts += [*_prefill(each.served, worker_id), _phase("first_token", worker_id)]
    yield from _laid(parts, began_at, first_token_at)
    decode_end_at = each.ended_at if is_last else each.last_token_at
    decoded = None if each.served is None else each.served.phases
    yield _phase(
        "decode",
        worker_id,
        first_token_at,
        decode_end_at - first_token_at,
        num_tokens=each.num_tokens,
        num_steps=0 if decoded is None else decoded.num_steps,
    )
    if not is_last:
        yield _phase("recovery", gateway_id, decode_end_at, each.ended_at - decode_end_at)


def _placement(each: TryRecord, began_at: float, gateway_id: str) -> list[Phase]:
    placed = each.placed
    assert placed is not None
    scheduler_id = placed.scheduler_id or ""
    on_the_way_s = each.placed_at - began_at - placed.queued_s - placed.placement_s
    return [
        _phase("submit", gateway_id, duration_s=max(0.0, on_the_way_s)),
        _phase("queue", scheduler_id, duration_s=placed.queued_s),
        _phase("placement", scheduler_id, duration_s=placed.placement_s),
    ]


def _prefill(served: Served | None, worker_id: str) -> list[Phase]:
    """From the command at decode to the complete KV, or to the first token if computed there."""
    phases = None if served is None else served.phases
    if served is None or phases is None:
        return []
    reserve = _phase("reserve", worker_id, duration_s=phases.reserve_s)
    prefill_id, wait_s = served.prefill_worker_id, phases.prefill_wait_s
    if prefill_id is None:
        return [reserve, _phase("prefill", worker_id, duration_s=phases.first_step_s)]
    if phases.prefill is None:
        return [reserve, _phase("prefill", prefill_id, duration_s=wait_s)]
    compute_s, push_s = phases.prefill.compute_s, phases.prefill.push_s
    return [
        reserve,
        _phase("prefill_wait", prefill_id, duration_s=max(0.0, wait_s - compute_s - push_s)),
        _phase("prefill", prefill_id, duration_s=compute_s),
        _phase(
            "kv_push",
            prefill_id,
            duration_s=push_s,
            num_bytes=phases.prefill.num_pushed_bytes,
            num_tokens=served.num_pushed_tokens,
        ),
    ]


def _laid(parts: list[Phase], began_at: float, ended_at: float) -> Iterator[Phase]:
    """The last part takes the time that is left."""
    left_s = ended_at - began_at - sum(part.duration_s for part in parts)
    durations = {part.name: part.duration_s for part in parts}
    for name in _SHORTENED:
        if left_s < 0 and name in durations:
            cut_s = min(durations[name], -left_s)
            durations[name] -= cut_s
            left_s += cut_s
    durations[parts[-1].name] = max(0.0, left_s)
    for part in parts:
        yield msgspec.structs.replace(part, start_s=began_at, duration_s=durations[part.name])
        began_at += durations[part.name]


def _phase(
    name: PhaseName,
    process_id: str,
    start_s: float = 0.0,
    duration_s: float = 0.0,
    *,
    num_bytes: int = 0,
    num_tokens: int = 0,
    num_steps: int = 0,
) -> Phase:
    return Phase(
        name=name,
        process_id=process_id,
        start_s=start_s,
        duration_s=max(0.0, duration_s),
        num_bytes=num_bytes,
        num_tokens=num_tokens,
        num_steps=num_steps,
    )


def num_late_masks(tries: Iterable[TryRecord]) -> int:
    phases = (each.served.phases for each in tries if each.served is not None)
    return sum(each.num_late_masks for each in phases if each is not None)
