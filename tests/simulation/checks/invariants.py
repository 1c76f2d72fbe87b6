"""The invariants that must hold after every schedule."""

from __future__ import annotations

from collections.abc import Mapping

from shared.engine.batching.sequence import Sequence
from shared.tenancy.rate_limit import RateLimitCounter
from tests.simulation.checks.excuses import unexplained
from tests.simulation.checks.excuses_hosted import unexplained_hosted
from tests.simulation.checks.expected import Expected, expected_of, expected_prompt_logprobs
from tests.simulation.plan import POISON
from tests.simulation.world.client import Client
from tests.simulation.world.fleet import Fleet
from tests.support.world.workers import SimulatedWorker

# Faults that must not cause a resubmission.
UNDISTURBING = {
    *("redis_away", "redis_hang", "link_drop", "link_noise", "slow", "change_roles"),
}
# Faults that must not cause a process to declare another one lost.
UNSUSPICIOUS = {"nats_restart", "nats_hang", *UNDISTURBING}
# Faults that can lose an acknowledgement, so that an ending is retained until it expires.
FORGETFUL = {"noise", "deaf", "nats_restart", "nats_hang", "cut_off", "freeze"}
SOON_S = 6.0
SETTLE_S = 40.0


def held_too_long(fleet: Fleet) -> list[str]:
    """Leftovers SOON_S after the last request's end and the last fault that should be gone.

    A lost acknowledgement may retain tokens until they expire, but no blocks; an aborted request
    retains only blocks that a long step still writes, and so does a pinned prefix. A worker that is
    declared lost because its step takes longer than announced is unknown to an index meanwhile.
    """
    is_forgetful = any(fault.kind in FORGETFUL for fault in fleet.plan.faults)
    retained = ("ended", "output_buffer") if is_forgetful else ()
    busy = [
        f"{worker.worker_id}: {name}: "
        for worker in fleet.workers()
        if any(_may_last(each, worker) for each in worker.engine.batcher.running)
        for name in ("running", "blocks", "computing_pins")
    ]
    allowed = [f"{worker.worker_id}: {name}: " for worker in fleet.workers() for name in retained]
    allowed += [
        f"{index.process.process_id}: {worker.worker_id}'s cache is None"
        for index in fleet.indices()
        for worker in fleet.workers()
        if index.service.health_monitor.fleet.is_lost(worker.worker_id)
        and any(each.is_in_step for each in worker.engine.batcher.running)
    ]
    return [each for each in fleet.leaks() if not each.startswith((*busy, *allowed))]


def _may_last(sequence: Sequence, worker: SimulatedWorker) -> bool:
    """Whether it may last as long as the current step."""
    is_unwanted = sequence.is_aborted or sequence.sequence_id in worker.worker.pins._computing
    return sequence.is_in_step and is_unwanted


def wrongs_of(fleet: Fleet, events: Mapping[str, int]) -> list[str]:
    found = [f"left over: {each}" for each in fleet.leaks()] + list(fleet.monitor.wrongs)
    kinds = {fault.kind for fault in fleet.plan.faults}
    is_hosted = fleet.plan.fleet.hosted is not None  # hosts stop workers
    if events["peer_lost"] and kinds <= UNSUSPICIOUS and not is_hosted:
        found.append(f"{events['peer_lost']} times a peer was taken for lost")
    found += wrongs_of_accounts(fleet)
    num_changes = sum(max(0, len(client.variants) - 1) for client in fleet.clients)
    if events["numerics_changed"] != num_changes:
        found.append(f"{num_changes} changes of numerics, {events['numerics_changed']} reported")
    for client in fleet.clients:
        explain = unexplained_hosted if is_hosted else unexplained
        reason = explain(client, fleet.plan, fleet.troubles_of(client))
        if reason is not None:
            found.append(f"{client.plan.request_id}: {reason}")
        is_disturbed = POISON in client.plan.prompt or not kinds <= UNDISTURBING
        if num_losses(client) and not is_disturbed:
            found.append(f"{client.plan.request_id}: was submitted again for no reason")
        found += [f"{client.plan.request_id}: {each}" for each in wrongs_of_client(client)]
    return found


def num_losses(client: Client) -> int:
    """Returns how often a request was submitted again, but for want of room at its worker."""
    if client.end is None:
        return 0
    num_moves = sum(each.outcome == "no_room" for each in client.end.tries)
    return client.end.num_resubmissions - num_moves


def wrongs_of_accounts(fleet: Fleet) -> list[str]:
    """Each request's usage is in Redis once, and no request is still counted as in progress.

    A killed gateway may not have written it; its leases expire.
    """
    found, written = [], _usage_in(fleet)
    killed = {fault.target for fault in fleet.plan.faults if fault.kind == "kill"}
    lost = {each.plan.request_id for each in fleet.clients if each.gateway_id in killed}
    for client in fleet.clients:
        reported = {"requests": 1, "output_tokens": client.num_output_tokens}
        expected = {kind: amount for kind, amount in reported.items() if amount}
        counts = written.pop(client.plan.request_id, {})
        is_due = client.end is not None and client.plan.request_id not in lost
        if counts != (expected if client.end is not None else {}) and (is_due or counts):
            found.append(f"{client.plan.request_id}: used {counts}, not {expected}")
    found += [f"{request_id}: was never answered, but used" for request_id in written]
    for meter in fleet.store.data.values():
        if isinstance(meter, RateLimitCounter):
            found += [
                f"{lease_id} is still counted as under way"
                for lease_id, until in meter._leases.items()
                if until > fleet.store.now() and lease_id not in lost
            ]
    return found


def _usage_in(fleet: Fleet) -> dict[str, dict[str, int]]:
    """Usage by request: the model field contains the request's id."""
    written: dict[str, dict[str, int]] = {}
    for key, counts in fleet.store.data.items():
        if ":usage:" in key:
            for field, amount in counts.items():
                kind, _, request_id = field.decode().partition(":")
                written.setdefault(request_id, {})[kind] = int(amount)
    return written


def wrongs_of_client(client: Client) -> list[str]:
    found = list(client.wrongs)
    if client.opened_at is None:
        return found
    if client.is_open:
        found.append("has no ending")
    is_whole = client.end is not None and client.end.error is None
    variants = [choice.variants for choice in client.choices]
    for index, expected in enumerate(expected_of(client.plan, variants)):
        reported = client.choices[index]
        found += _wrongs_of_tokens(index, reported.token_ids, expected.token_ids, is_whole=is_whole)
        if reported.logprobs != expected.logprobs[: len(reported.logprobs)]:
            found.append(f"choice {index}: other logprobs")
        if client.plan.sampling.num_logprobs is not None and len(reported.logprobs) < len(
            reported.token_ids
        ):
            found.append(f"choice {index}: tokens without logprobs")
        found += _wrongs_of_ending(index, client, expected)
        found += _wrongs_of_length(index, client)
        is_finished = reported.finish is not None and reported.finish.failure is None
        if is_finished and reported.finish.embedding != expected.embedding:
            found.append(f"choice {index}: another embedding")
    for variant, logprobs in client.prompt_logprobs:
        if logprobs != expected_prompt_logprobs(client.plan, variant):
            found.append("other logprobs of the prompt")
    is_wanted = client.plan.sampling.num_prompt_logprobs is not None and len(client.plan.prompt) > 1
    if is_whole and is_wanted and not client.prompt_logprobs:
        found.append("no logprobs of the prompt")
    return found


def _wrongs_of_tokens(
    index: int, reported: list[int], expected: list[int], *, is_whole: bool
) -> list[str]:
    if reported != expected[: len(reported)]:
        return [f"choice {index}: tokens {reported} are not those of {expected}"]
    if is_whole and len(reported) < len(expected):
        return [f"choice {index}: {len(reported)} of {len(expected)} tokens"]
    return []


def _wrongs_of_length(index: int, client: Client) -> list[str]:
    """`length` only at the request's own end: no plan's request reaches the model's context."""
    reported, most = client.choices[index], client.plan.sampling.max_tokens
    is_length = reported.finish is not None and reported.finish.reason == "length"
    if is_length and not reported.is_stopped and len(reported.token_ids) < most:
        return [f"choice {index}: cut after {len(reported.token_ids)} of {most} tokens"]
    return []


def _wrongs_of_ending(index: int, client: Client, expected: Expected) -> list[str]:
    reported = client.choices[index]
    if reported.is_stopped:  # the worker may also have stopped at the same token
        return []
    if reported.finish is not None and reported.finish.reason != expected.finish_reason:
        return [f"choice {index}: ended by {reported.finish.reason}, not {expected.finish_reason}"]
    return []
