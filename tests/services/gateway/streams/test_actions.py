"""Subjects of submissions, and acknowledgements batched by worker."""

from __future__ import annotations

import msgspec
import pytest

from services.gateway.streams.actions import Actions, Publish, submit_subject
from shared.errors import NoCapacity
from shared.messages import AbortRequest, AckFinished, SubmitRequest
from shared.subjects import SUBMIT, control, submit_to
from tests.services.gateway.streams.test_streams import request


def subjects_of(request_id: str, schedulers: list[str]) -> list[str]:
    attempts = [
        SubmitRequest(request=request(request_id), attempt=number) for number in range(1, 6)
    ]
    return [submit_subject(each, schedulers) for each in attempts]


def test_retries_rotate_over_live_schedulers() -> None:
    first, *retries = subjects_of("r1", ["s1", "s2"])
    assert first == SUBMIT
    assert retries[:2] == retries[2:]
    assert set(retries) == {submit_to("s1"), submit_to("s2")}


def test_first_retries_spread_over_schedulers() -> None:
    seconds = {subjects_of(f"r{number}", ["s1", "s2"])[1] for number in range(20)}
    assert len(seconds) == 2


def test_retries_use_queue_group_without_live_scheduler() -> None:
    assert set(subjects_of("r1", [])) == {SUBMIT}


def test_bound_requests_go_to_schedulers_of_their_regions() -> None:
    bound = msgspec.structs.replace(request("r1"), allowed_regions=("fr",))
    first = SubmitRequest(request=bound, attempt=1)
    assert submit_subject(first, ["s1"]) == submit_to("s1")
    with pytest.raises(NoCapacity, match="no scheduler is in the regions"):
        submit_subject(first, [])
    in_class = msgspec.structs.replace(bound, region_class="eu")  # its queue group has no others
    assert submit_subject(SubmitRequest(request=in_class, attempt=1), []) == SUBMIT


def test_acknowledgements_are_batched_by_worker() -> None:
    p, q, r = (bytes([number]) * 16 for number in range(3))
    actions = Actions("gateway-1")
    actions.acknowledge("decode-1", p)
    actions.acknowledge("decode-2", q)
    actions.acknowledge("decode-1", r)
    one, two = control("decode", "decode-1"), control("decode", "decode-2")
    actions.abort("decode-2", p, "stop")
    other = Publish(two, AbortRequest(placement_id=p, reason="stop"))
    assert actions.take(with_acknowledgements=False) == [other]
    actions.abort("decode-1", q, "stop")
    assert actions.take() == [
        Publish(one, AckFinished(placement_ids=(p, r))),
        Publish(two, AckFinished(placement_ids=(q,))),
        Publish(one, AbortRequest(placement_id=q, reason="stop")),
    ]
    assert actions.take() == []
