"""Where a request is submitted to."""

from __future__ import annotations

from services.gateway.actions import submit_subject
from shared.messages import SubmitRequest
from shared.subjects import SUBMIT, submit_to
from tests.services.gateway.test_streams import request


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
