"""Where a request is submitted to; what is told together."""

from __future__ import annotations

from services.gateway.streams.actions import Actions, Publish, submit_subject
from shared.messages import AbortRequest, AckFinished, SubmitRequest
from shared.subjects import SUBMIT, control, submit_to
from tests.services.gateway.streams.test_streams import request


def subjects_of(request_id: str, schedulers: list[str]) -> list[str]:
    tries = [SubmitRequest(request=request(request_id), attempt=number) for number in range(1, 6)]
    return [submit_subject(each, schedulers) for each in tries]


def test_further_tries_go_to_the_live_schedulers_by_turns() -> None:
    first, *further = subjects_of("r1", ["s1", "s2"])
    assert first == SUBMIT
    assert further[:2] == further[2:]
    assert set(further) == {submit_to("s1"), submit_to("s2")}


def test_not_all_requests_turn_to_the_same_one() -> None:
    seconds = {subjects_of(f"r{number}", ["s1", "s2"])[1] for number in range(20)}
    assert len(seconds) == 2


def test_without_a_known_scheduler_anyone_may_take_it() -> None:
    assert set(subjects_of("r1", [])) == {SUBMIT}


def test_endings_that_came_together_are_acknowledged_in_one_message_a_worker() -> None:
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
