"""What a gateway knows and reports of the numerics that computed an answer."""

from __future__ import annotations

import msgspec

from services.gateway.streams.actions import ReportNumericsChange, ReportUnlikePrefill
from shared.messages import Placed, TokenBatch, TokenEntry
from shared.numerics import Numerics
from tests.services.gateway.streams.test_streams import P1, P2, P3, SERVED, Rig, running

ONE = Numerics("exact", "cpu-avx512", "bfloat16", "1")
OTHER = Numerics("exact", "sm90", "bfloat16", "1")


def send(rig: Rig, placement_id: bytes, position: int, *token_ids: int, by: Numerics) -> None:
    served = msgspec.structs.replace(SERVED, numerics=by)
    entry = TokenEntry(placement_id, 0, position, token_ids, None, served)
    rig.streams.on_token_batch(TokenBatch(worker_id="w1", entries=(entry,)), rig.now)


def resume(rig: Rig, placement_id: bytes) -> None:
    rig.streams.on_worker_lost("w1", rig.now, is_excluded=False)
    rig.place(placement_id)


def changes(rig: Rig) -> list[ReportNumericsChange]:
    return [each for each in rig.actions() if isinstance(each, ReportNumericsChange)]


def test_resubmission_names_the_numerics_of_the_tokens_received() -> None:
    rig = Rig()
    assert rig.submit().request.numerics is None
    rig.queue()
    rig.place()
    send(rig, P1, 0, by=ONE)  # no token yet
    rig.streams.on_worker_lost("w1", rig.now, is_excluded=False)
    assert rig.submit().request.numerics is None
    rig.place(P2)
    send(rig, P2, 0, 5, by=ONE)
    rig.streams.on_worker_lost("w1", rig.now, is_excluded=False)
    assert rig.submit().request.numerics == ONE


def test_change_of_numerics_is_reported_once_it_reaches_the_output() -> None:
    rig = running()
    send(rig, P1, 0, 5, by=ONE)
    resume(rig, P2)
    send(rig, P2, 1, 6, by=ONE)
    assert changes(rig) == []
    resume(rig, P3)
    assert changes(rig) == []
    send(rig, P3, 2, 7, by=OTHER)
    send(rig, P3, 3, 8, by=OTHER)
    assert changes(rig) == [ReportNumericsChange("r1", "w1", before=ONE, after=OTHER)]


def test_prompt_computed_for_want_of_like_prefill_workers_is_reported() -> None:
    rig = Rig()
    rig.queue()
    placed = Placed(request_id="r1", placement_id=P1, worker_id="w1", has_unlike_prefill=True)
    rig.streams.on_placed(placed, rig.now)
    assert ReportUnlikePrefill("r1", "w1") in rig.actions()
