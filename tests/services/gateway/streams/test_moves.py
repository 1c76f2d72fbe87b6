"""Requests that wait for room at their worker, and are offered another one."""

from __future__ import annotations

from random import Random

import pytest

from services.gateway.streams.actions import Publish, Submit
from services.gateway.streams.moves import MAX_MOVES, MAX_OFFER_S, MIN_PAUSE_S, MoveTimes
from shared.errors import Overloaded
from shared.messages import (
    AbortRequest,
    Finish,
    Placed,
    QueueKeepalive,
    SubmitRequest,
    TokenBatch,
    TokenEntry,
)
from shared.packing import unpack_token_ids
from shared.telemetry.timeline import Move
from tests.services.gateway.streams.test_streams import (
    FAILED,
    P1,
    P2,
    QUEUED,
    STOP,
    Rig,
    abort,
    cancelling,
    failing,
)

FULL = Overloaded("no worker has room for this request now")


def waits(rig: Rig, *, placement_id: bytes = P1, worker_id: str = "w1") -> None:
    """The worker says that it computes nothing of the request."""
    position = len(rig.client.tokens)
    entry = TokenEntry(placement_id, 0, position, (), is_waiting=True)
    rig.streams.on_token_batch(TokenBatch(worker_id=worker_id, entries=(entry,)), rig.now)


def asking() -> tuple[Rig, SubmitRequest]:
    """A request with two tokens, whose worker has no room for it, and its submission."""
    rig = Rig()
    rig.queue()
    rig.place()
    rig.tokens(0, 5, 6)
    rig.now += MIN_PAUSE_S
    rig.actions()
    waits(rig)
    return rig, rig.submit()


def placed(rig: Rig, attempt: int, placement_id: bytes = P2, worker_id: str = "w2") -> None:
    rig.place(placement_id, worker_id, attempt)


def test_request_moves_with_the_first_token_of_the_other_worker() -> None:
    rig, asked = asking()
    assert (asked.attempt, asked.is_move, asked.is_queueable) == (2, True, False)
    assert asked.excluded_workers == ("w1",)
    assert unpack_token_ids(asked.request.choices[0].output_token_ids) == [5, 6]
    rig.streams.on_queued("r1", 2, QUEUED, rig.now)
    placed(rig, 2)
    assert rig.published() == [], "it has its place at the first worker until then"
    rig.now += 0.5
    rig.tokens(2, 7, placement_id=P2, worker_id="w2")
    assert rig.published() == [abort("w1", P1, "superseded")]
    rig.tokens(2, 7, 8)  # of the first worker, too late
    rig.tokens(3, 8, finish=STOP, placement_id=P2, worker_id="w2")
    assert rig.client.tokens == [5, 6, 7, 8] and rig.client.error is None
    move = Move(from_workers=("w1",), cause="no_room", worker="w2", pause_s=MIN_PAUSE_S + 0.5)
    assert rig.client.moves == [move]
    assert rig.resubmission_causes() == ["no_room"]
    assert len(rig.streams) == 0 and not rig.streams._by_placement


def test_output_that_overtakes_its_placement_moves_the_request() -> None:
    rig, asked = asking()
    rig.tokens(2, 7, placement_id=P2, worker_id="w2")
    rig.tokens(3, 8, finish=STOP, placement_id=P2, worker_id="w2")
    assert rig.client.tokens == [5, 6]
    placed(rig, asked.attempt)
    assert rig.client.tokens == [5, 6, 7, 8] and rig.client.error is None


def test_present_worker_that_goes_on_first_has_the_request() -> None:
    rig, asked = asking()
    placed(rig, asked.attempt)
    rig.tokens(2, 7)
    assert rig.published() == [abort("w2", P2, "superseded")]
    rig.tokens(2, 7, placement_id=P2, worker_id="w2")
    rig.tokens(3, 8, finish=STOP)
    assert rig.client.tokens == [5, 6, 7, 8]
    assert (rig.client.moves, rig.client.ends[0].num_resubmissions) == ([], 0)


def test_placement_that_comes_after_the_present_worker_went_on_is_aborted() -> None:
    rig, asked = asking()
    rig.streams.on_queued("r1", asked.attempt, QUEUED, rig.now)
    rig.tokens(2, 7)
    assert rig.published() == [cancelling("s1", attempt=asked.attempt)]
    placed(rig, asked.attempt)
    assert rig.published() == [abort("w2", P2, "superseded")]
    assert rig.stream.placement is not None and rig.stream.placement.placement_id == P1


@pytest.mark.parametrize("how", ["rejected", "not placed", "failed", "lost", "silent", "waits"])
def test_request_stays_where_it_is_if_nobody_takes_it(how: str) -> None:
    rig, asked = asking()
    match how:
        case "rejected":
            rig.reject(FULL, asked.attempt)
        case "not placed":
            rig.streams.on_placement_failed(failing(FAILED.failure, attempt=asked.attempt), rig.now)
        case "failed":
            placed(rig, asked.attempt)
            rig.tokens(2, finish=FAILED, placement_id=P2, worker_id="w2")
        case "lost":
            placed(rig, asked.attempt)
            rig.streams.on_worker_lost("w2", rig.now, is_excluded=True)
        case "waits":
            placed(rig, asked.attempt)
            waits(rig, placement_id=P2, worker_id="w2")
            assert rig.stream.offer is not None
            rig.tick(MAX_OFFER_S)
        case "silent":
            rig.tick(MAX_OFFER_S)
    assert rig.stream.offer is None and len(rig.streams._by_placement) == 1
    assert rig.stream.placement is not None and rig.stream.placement.worker_id == "w1"
    rig.tokens(2, 7, finish=STOP)
    assert rig.client.tokens == [5, 6, 7] and rig.client.error is None
    assert rig.client.ends[0].num_resubmissions == 0


def test_loss_of_the_present_worker_gives_up_the_offer() -> None:
    rig, asked = asking()
    placed(rig, asked.attempt)
    rig.streams.on_worker_lost("w1", rig.now, is_excluded=True)
    actions = rig.actions()
    aborts = {each.subject for each in actions if isinstance(each, Publish)}
    assert len(aborts) == 2 and not rig.streams._by_placement
    (submit,) = (each.message for each in actions if isinstance(each, Submit))
    assert (submit.attempt, submit.is_move) == (asked.attempt + 1, False)


def test_keepalive_does_not_end_an_offer() -> None:
    rig, asked = asking()
    keepalive = QueueKeepalive(scheduler_id="s1", request_ids=("r1",))
    rig.streams.on_keepalive(keepalive, rig.now)
    assert rig.published() == []
    rig.reject(FULL, asked.attempt)
    rig.streams.on_keepalive(keepalive, rig.now)
    assert rig.published() == [cancelling("s1", attempt=asked.attempt)]


def test_pause_before_a_move_doubles_with_each_and_moves_end() -> None:
    times, now, pauses = MoveTimes(), 0.0, []
    for _ in range(MAX_MOVES):
        paused_at = now
        while not times.is_due(paused_at, now):
            now += 0.25
        pauses.append(now - paused_at)
        times.rejected(now)
        assert not times.is_due(paused_at, now + 0.5), "asks again later"
        times.moved()
        now += 100.0
    assert pauses == [MIN_PAUSE_S * 2**number for number in range(MAX_MOVES)]
    assert not times.is_due(now, now + 1e6)


@pytest.mark.parametrize("seed", range(30))
def test_no_token_is_lost_or_doubled_in_any_order(seed: int) -> None:
    """Workers compute the tokens 0, 1, 2, … Each that has the request waits, goes on or fails, and
    messages come in any order; all but one have been aborted at the end.
    """
    random, rig = Random(seed), Rig(max_tokens=30)
    rig.stream.deadline_at = float("inf")
    rig.queue()
    placements = {P1: 0}  # the next token of each
    workers, asked, number = {P1: "w1"}, list[SubmitRequest](), 1
    ended = set[bytes]()
    rig.place()
    for _ in range(2000):
        rig.now += random.choice((0.1, 1.0))
        for each in rig.actions():
            if isinstance(each, Submit):
                asked.append(each.message)
            elif isinstance(each, Publish) and isinstance(each.message, AbortRequest):
                ended.add(each.message.placement_id)
        if not len(rig.streams):
            break
        if asked and random.random() < 0.5:
            submit = asked.pop(random.randrange(len(asked)))
            number += 1
            placement_id = number.to_bytes(16, "big")
            placements[placement_id] = len(submit.request.choices[0].output_token_ids) // 4
            workers[placement_id] = f"w{number}"
            rig.place(placement_id, workers[placement_id], submit.attempt)
            continue
        placement_id = random.choice([each for each in placements if each not in ended])
        position, worker_id = placements[placement_id], workers[placement_id]
        kind = random.choice(("waits", "waits", "token", "token", "fails", "tick"))
        if kind == "tick":
            rig.tick(0.0)
        elif kind == "token":
            last = Finish(reason="length", served=STOP.served) if position == 29 else None
            entry = TokenEntry(placement_id, 0, position, (position,), last)
            placements[placement_id] += 1
            rig.streams.on_token_batch(TokenBatch(worker_id=worker_id, entries=(entry,)), rig.now)
            if last is not None:
                ended.add(placement_id)
        elif kind == "waits":
            entry = TokenEntry(placement_id, 0, position, (), is_waiting=True)
            rig.streams.on_token_batch(TokenBatch(worker_id=worker_id, entries=(entry,)), rig.now)
        elif rig.stream.offer is not None and rig.stream.offer.is_of(placement_id):
            rig.tokens(position, finish=FAILED, placement_id=placement_id, worker_id=worker_id)
    assert rig.client.tokens == list(range(30)) and rig.client.error is None
    assert not rig.streams._by_placement
    assert rig.client.ends[0].num_resubmissions == len(rig.client.moves)


def test_placed_of_an_offer_may_come_twice() -> None:
    rig, asked = asking()
    named = Placed(request_id="r1", placement_id=P2, worker_id="w2", attempt=asked.attempt)
    for _ in range(2):
        rig.streams.on_placed(named, rig.now)
    assert rig.published() == []
    rig.tokens(2, 7, finish=STOP, placement_id=P2, worker_id="w2")
    assert rig.client.tokens == [5, 6, 7]
