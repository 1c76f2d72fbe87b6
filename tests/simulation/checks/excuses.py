"""When a request may fail: each failure must be explained by missing capacity of the fleet.

A request has what it needs at a moment if its gateway, NATS, some scheduler and some decode worker
that fits it (block size, context) are healthy: no fault affects them, and none did in the last
REJOIN_S, or TWIN_GONE_S for two processes of one id. It may fail with

    client_gone          if its client left
    request_breaks_workers  if its prompt has the poison, or steps raised on two workers, or on one
                         while no other that fits it was healthy
    deadline_exceeded    no sooner than its deadline; a patient one only if it had what it needs for
                         less than WORK_S
    overloaded           if the schedulers' queues are short; an impatient one also if the reported
                         wait is longer than its deadline
    no_capacity          if it lacked what it needs for its full waiting time, or if it lost its
                         placement more often than it may be resubmitted, each time by a fault
                         (a hanging scheduler may swallow all tries until NATS drops it, and
                         messages may be lost until all workers are closed as silent);
                         at once if healthy workers, but none that fits, were there
    no_capable_worker    if it needs features, and likewise: a worker that has not got them is not
                         healthy for this request
    on admission: context_length_exceeded if no worker that fits it was healthy,
                         dependency_unavailable if Redis was down or hung, no_capacity if the
                         gateway drained

and with no other error. If a request's gateway dies, no process is left to report its end.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

from services.gateway.streams.resubmissions import MAX_RESUBMISSIONS, RECOVERY_WINDOW_S
from services.gateway.streams.streams import (
    NO_SCHEDULER_WINDOW_S,
    SUBMIT_WINDOW_S,
)
from services.scheduler.silent_workers import MAX_CLOSED_S
from services.scheduler.waiting_for_host import NO_WORKER_GRACE_S
from shared.errors import (
    DeadlineExceeded,
    HearthError,
    NoCapableWorker,
    NoCapacity,
    Overloaded,
    RequestBreaksWorkers,
)
from shared.lifecycle.health import SILENCE_LIMIT_S
from shared.store import BREAKER_S, MAX_STORE_TIMEOUT_S
from tests.simulation.plan import PATIENT_S, POISON, Fault, Plan
from tests.simulation.world.client import Client
from tests.support.world.bus import GIVEN_UP_AFTER_S

REJOIN_S = 0.4  # to reconnect and resume heartbeats
TWIN_GONE_S = SILENCE_LIMIT_S + REJOIN_S  # until peers no longer believe that two processes live
WORK_S = 90.0  # longer than all requests of a plan take together
LATE_S = 0.3
POLL_INTERVAL_S = 0.3  # a gateway stops waiting up to this much before its window ends
NATS_FAULTS = ("nats_restart", "nats_hang")
PROCESS_FAULTS = (
    *("kill", "drain", "freeze", "cut_off", "deaf", "slow", "wedge"),
    *("runner_raises", "rank_killed", "rank_frozen", "gpu_faulty", "twin"),
)


@dataclass
class Trouble:
    fault: Fault
    began: float
    ended: float = inf

    def touches(self, process_id: str) -> bool:
        fault = self.fault
        return process_id in (fault.target, fault.other) and fault.kind in PROCESS_FAULTS


def unexplained(client: Client, plan: Plan, troubles: list[Trouble]) -> str | None:
    """What is wrong about this request's failure; None if it did not fail, or had to."""
    error = client.rejection if client.end is None else client.end.error
    if error is None:
        return None
    if client.rejection is not None:
        return _unexplained_rejection(error, client, plan, troubles)
    if error.code == "client_gone":
        return None if client.left else "its client had not left"
    if isinstance(error, DeadlineExceeded):
        return _too_late(client, plan, troubles)
    if isinstance(error, Overloaded):
        is_short = plan.fleet.max_queued_requests < len(plan.requests)
        is_late = client.plan.deadline_s < PATIENT_S and "the wait is about" in error.message
        return None if is_short or is_late else f"no queue was full: {error}"
    if isinstance(error, RequestBreaksWorkers):
        return _breaks_workers(client, plan, troubles)
    if isinstance(error, NoCapacity):
        return _no_capacity(client, plan, troubles, error)
    return f"nothing explains {error.code}: {error}"


def _breaks_workers(client: Client, plan: Plan, troubles: list[Trouble]) -> str | None:
    assert client.opened_at is not None
    sick = {each.fault.target for each in troubles if each.fault.kind == "runner_raises"}
    if POISON in client.plan.prompt or len(sick) > 1:
        return None
    others = [each for each in fitting_workers(plan, client) if each not in sick]
    lacked_s = _covered(_all_in_trouble(others, troubles), client.opened_at, client.ended_at)
    if sick and lacked_s > 0:
        return None
    return "steps do not raise for its prompt"


def lacks(plan: Plan, client: Client, troubles: list[Trouble]) -> list[tuple[float, float]]:
    """The times when this request lacked something, including REJOIN_S."""
    found = [
        _span(each)
        for each in troubles
        if each.fault.kind in NATS_FAULTS or each.touches(client.gateway_id)
    ]
    for process_ids in (plan.fleet.process_ids["scheduler"], fitting_workers(plan, client)):
        found += _all_in_trouble(process_ids, troubles)
    return found


def fitting_workers(plan: Plan, client: Client) -> list[str]:
    return plan.fleet.decodes_for(
        num_tokens=client.plan.num_context_tokens, block_size=client.block_size
    )


def _swallowing(plan: Plan, troubles: list[Trouble]) -> list[tuple[float, float]]:
    """The times when a hanging scheduler still receives its share of the tries."""
    return [
        (each.began, min(each.ended, each.began + GIVEN_UP_AFTER_S) + REJOIN_S)
        for each in troubles
        if each.fault.kind == "freeze" and each.fault.target in plan.fleet.process_ids["scheduler"]
    ]


def _silencing(troubles: list[Trouble]) -> list[tuple[float, float]]:
    """The times when workers may be closed because the starts sent to them, or their replies, were
    lost: the scheduler cannot know that later ones would arrive.
    """
    return [
        (each.began, each.ended + MAX_CLOSED_S)
        for each in troubles
        if each.fault.kind in ("noise", "deaf")
    ]


def _unexplained_rejection(
    error: HearthError, client: Client, plan: Plan, troubles: list[Trouble]
) -> str | None:
    """Redis is queried twice, possibly by another request that closed the breaker before."""
    sent_at, rejected_at = client.sent_at, client.ended_at
    if error.code == "context_length_exceeded":
        spans = _all_in_trouble(fitting_workers(plan, client), troubles)
        is_missing = any(began <= rejected_at <= ended for began, ended in spans)
        return None if is_missing else f"a worker fits it: {error}"
    if error.code == "no_capacity":  # it may have waited for Redis before
        kinds, began, ended = {"drain"}, rejected_at, sent_at - REJOIN_S
    elif error.code == "dependency_unavailable":
        kinds, began = {"redis_away", "redis_hang"}, rejected_at
        ended = rejected_at - BREAKER_S - 2 * MAX_STORE_TIMEOUT_S
    else:
        return f"refused without a reason: {error}"
    has_reason = any(
        each.fault.kind in kinds and each.began <= began and each.ended >= ended
        for each in troubles
    )
    return None if has_reason else f"refused without a reason: {error}"


def _too_late(client: Client, plan: Plan, troubles: list[Trouble]) -> str | None:
    assert client.opened_at is not None
    deadline_s = client.plan.deadline_s
    took_s = client.ended_at - client.opened_at
    if took_s < deadline_s - 1e-6:
        return f"its deadline of {deadline_s:g} s had not come after {took_s:g} s"
    spans = lacks(plan, client, troubles)
    if deadline_s < PATIENT_S:
        own = [each for each in troubles if each.fault.target == client.gateway_id]
        is_late = took_s > deadline_s + LATE_S and not own
        return f"told {took_s - deadline_s:g} s after its deadline" if is_late else None
    lacked_s = _covered(spans, client.opened_at, client.ended_at)
    if took_s - lacked_s > WORK_S:
        return f"had what it needs for {took_s - lacked_s:g} s and did not finish"
    return None


def _no_capacity(
    client: Client, plan: Plan, troubles: list[Trouble], error: NoCapacity
) -> str | None:
    assert client.opened_at is not None and client.end is not None
    if isinstance(error, NoCapableWorker) and not client.plan.needs:
        return f"it needs nothing: {error}"
    spans = lacks(plan, client, troubles)
    if "no scheduler" in error.message:
        spans += _swallowing(plan, troubles)
    if "no worker serves" in error.message or "context holds" in error.message:
        spans += _silencing(troubles)  # of all workers, or of all that are large enough
    lacked_s = _covered(spans, client.opened_at, client.ended_at)
    if "context holds" in error.message and not client.end.num_resubmissions:
        return None if lacked_s > 0 else f"a worker fits it: {error}"
    if lacked_s >= _patience_s(client.end.num_resubmissions, error) - POLL_INTERVAL_S:
        return None
    touching = [
        each
        for each in troubles
        if each.began <= client.ended_at and client.opened_at <= each.ended + REJOIN_S
    ]
    if client.end.num_resubmissions >= MAX_RESUBMISSIONS and len(touching) >= MAX_RESUBMISSIONS:
        return None
    return f"lacked what it needs for no more than {lacked_s:g} s: {error}"


def _patience_s(num_resubmissions: int, error: NoCapacity) -> float:
    if num_resubmissions:
        return RECOVERY_WINDOW_S
    if "nobody serves" in error.message:
        return NO_SCHEDULER_WINDOW_S
    is_parked = isinstance(error, NoCapableWorker) or "no worker serves" in error.message
    return NO_WORKER_GRACE_S if is_parked else SUBMIT_WINDOW_S


def _span(trouble: Trouble) -> tuple[float, float]:
    after_s = TWIN_GONE_S if trouble.fault.kind == "twin" else REJOIN_S
    return trouble.began, trouble.ended + after_s


def _all_in_trouble(process_ids: list[str], troubles: list[Trouble]) -> list[tuple[float, float]]:
    """The times when none of these processes was healthy."""
    of_each = [
        [_span(each) for each in troubles if each.touches(process_id)] for process_id in process_ids
    ]
    common = [(0.0, inf)]
    for spans in of_each:
        common = [
            (max(a, c), min(b, d)) for a, b in common for c, d in spans if max(a, c) < min(b, d)
        ]
    return common


def _covered(spans: list[tuple[float, float]], first: float, last: float) -> float:
    covered, reached = 0.0, first
    for began, ended in sorted(spans):
        start, stop = max(began, reached), min(ended, last)
        if start < stop:
            covered, reached = covered + stop - start, stop
    return covered
