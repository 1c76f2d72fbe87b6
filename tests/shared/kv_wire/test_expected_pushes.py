"""Which lost connections end a placement that several ranks push."""

from __future__ import annotations

import msgspec

from shared.kv_wire.expected_pushes import MAX_CARRIERS, ExpectedPushes
from shared.kv_wire.link import FrameHeader
from tests.shared.kv_wire.support import RecordingSink, header


def of_head(first_head: int) -> FrameHeader:
    return msgspec.structs.replace(header(1), first_head=first_head)


def expected() -> tuple[ExpectedPushes, RecordingSink]:
    pushes, sink = ExpectedPushes(), RecordingSink()
    pushes.expect(b"placement-a", sink)
    return pushes, sink


def test_each_sender_of_a_placement_may_be_the_lost_one() -> None:
    for lost in ("first", "second"):
        pushes, sink = expected()
        pushes.announce(of_head(0), "first")
        pushes.announce(of_head(1), "second")
        pushes.carrier_ended(lost)
        assert sink.num_lost == 1


def test_connection_that_its_sender_has_replaced_is_not_missed() -> None:
    pushes, sink = expected()
    for carrier in ("old", "new"):
        pushes.announce(of_head(0), carrier)
    pushes.carrier_ended("old")
    assert sink.num_lost == 0


def test_lost_connection_of_several_parts_is_one_loss() -> None:
    pushes, sink = expected()
    for head in range(2):
        pushes.announce(of_head(head), "only")
    pushes.carrier_ended("only")
    pushes.carrier_ended("only")
    assert sink.num_lost == 1


def test_parts_that_no_sink_accepts_take_bounded_memory() -> None:
    pushes, _ = expected()
    for head in range(2 * MAX_CARRIERS):
        pushes.announce(of_head(head), "hostile")
    (placement,) = pushes._expected.values()
    assert len(placement.carriers) == MAX_CARRIERS
