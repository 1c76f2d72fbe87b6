"""Schedulers of an older release do not know what a request needs, and send it on without."""

from __future__ import annotations

from services.gateway.streams.queued_openings import Opening
from services.gateway.streams.resubmissions import MAX_RESUBMISSIONS
from shared.errors import NoCapableWorker, NoCapacity
from shared.messages import Placed
from shared.subjects import control
from tests.services.gateway.streams.test_streams import (
    P1,
    P2,
    QUEUED,
    STOP,
    Recorder,
    Rig,
    request,
)

DEMO = ("demo/1",)


class NeedingRig(Rig):
    """One open request that needs DEMO."""

    def __init__(self) -> None:
        super().__init__()
        self.streams.close("r1", "client_gone", NoCapacity("replaced"), self.now)
        self.actions()
        self.client = Recorder()
        self.streams.open([Opening(request(needs=DEMO), self.client)], self.now)

    def place_with(self, needs: tuple[str, ...], placement_id: bytes = P1) -> None:
        placed = Placed(request_id="r1", placement_id=placement_id, worker_id="w1", needs=needs)
        self.streams.on_placed(placed, self.now)


def test_every_submission_names_what_the_request_needs() -> None:
    rig = NeedingRig()
    assert rig.submit().request.needs == DEMO
    rig.queue()
    rig.place_with(DEMO)
    rig.tokens(0, 5, 6)
    rig.streams.on_worker_lost("w1", rig.now, is_excluded=True)
    assert rig.submit().request.needs == DEMO


def test_placement_without_what_the_request_needs_is_aborted_and_its_tokens_dropped() -> None:
    rig = NeedingRig()
    rig.actions()
    rig.tokens(0, 7, 8, finish=STOP)  # they may overtake the placement
    rig.place_with(())
    actions = rig.actions()
    assert any(control("decode", "w1") == getattr(each, "subject", "") for each in actions)
    assert [each.message.attempt for each in actions if hasattr(each.message, "attempt")] == [2]
    assert rig.resubmission_causes() == ["needs_dropped"]
    rig.tokens(0, 7, 8, finish=STOP)
    assert (rig.client.tokens, rig.client.ends) == ([], [])
    rig.streams.on_queued("r1", 2, QUEUED, rig.now)
    rig.place_with(DEMO, P2)
    rig.tokens(0, 5, 6, finish=STOP, placement_id=P2)
    assert rig.client.tokens == [5, 6]
    assert rig.client.error is None


def test_request_ends_if_every_scheduler_drops_what_it_needs() -> None:
    rig = NeedingRig()
    for number in range(MAX_RESUBMISSIONS + 1):
        assert rig.client.ends == []
        rig.place_with((), bytes([number]) * 16)
    assert isinstance(rig.client.error, NoCapacity)
    assert rig.client.tokens == []


def test_no_capable_worker_ends_a_new_request_and_is_retried_in_recovery() -> None:
    error = NoCapableWorker("no live worker has demo/1", retry_after_s=2.0)
    rig = NeedingRig()
    rig.reject(error)
    assert rig.client.error is error
    rig = NeedingRig()
    rig.queue()
    rig.place_with(DEMO)
    rig.streams.on_worker_lost("w1", rig.now, is_excluded=True)
    rig.reject(error, attempt=2)
    rig.actions()
    rig.tick(0.2)
    assert rig.submit().attempt == 3
