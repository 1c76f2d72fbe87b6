from __future__ import annotations

import msgspec
import pytest

from services.scheduler.admission import Admission
from services.scheduler.backlog import Lane
from shared.errors import DeadlineExceeded, InvalidRequest, Overloaded
from shared.messages import CancelQueued, Choice, SubmitRequest
from tests.services.scheduler.literals import submit_of


def admission(max_requests: int = 100, max_tokens: int = 100_000) -> Admission:
    return Admission(max_requests, max_tokens)


def order(held: Admission) -> list[str]:
    names = []
    while (ticket := held.pop(0.0)) is not None:
        names.append(ticket.request.request_id)
    return names


def test_the_queue_is_bounded_in_requests() -> None:
    held = admission(max_requests=2)
    held.enqueue(submit_of("r0"), 0.0)
    held.enqueue(submit_of("r1"), 0.0)
    with pytest.raises(Overloaded) as refused:
        held.enqueue(submit_of("r2"), 0.0)
    assert refused.value.retry_after_s is not None
    assert refused.value.retry_after_s > 0
    held.remove("r0")
    held.enqueue(submit_of("r2"), 0.0)
    assert len(held) == 2


def test_the_queue_is_bounded_in_tokens_but_takes_a_giant_alone() -> None:
    held = admission(max_tokens=100)
    held.enqueue(submit_of("giant", num_prompt_tokens=500), 0.0)
    with pytest.raises(Overloaded):
        held.enqueue(submit_of("small"), 0.0)
    held.remove("giant")
    held.enqueue(submit_of("small"), 0.0)


def test_one_tenant_cannot_fill_the_queue() -> None:
    held = admission(max_requests=90)
    for number in range(80):
        held.enqueue(submit_of(f"r{number}", tenant_id="greedy"), 0.0)
    with pytest.raises(Overloaded, match="tenant"):
        held.enqueue(submit_of("r80", tenant_id="greedy"), 0.0)
    held.enqueue(submit_of("other", tenant_id="modest"), 0.0)


def test_what_is_being_placed_still_counts() -> None:
    held = admission(max_requests=1)
    held.enqueue(submit_of("r0"), 0.0)
    ticket = held.pop(0.0)
    assert ticket is not None
    with pytest.raises(Overloaded):
        held.enqueue(submit_of("r1"), 0.0)
    held.placed(ticket, 1.0)
    held.enqueue(submit_of("r1"), 1.0)


def test_retry_after_follows_the_rate_of_placement() -> None:
    held = admission()
    for number in range(20):
        held.enqueue(submit_of(f"r{number}", num_prompt_tokens=90, max_tokens=10), 0.0)
    for second in range(10):
        ticket = held.pop(float(second))
        assert ticket is not None
        held.placed(ticket, float(second))
    with pytest.raises(Overloaded) as refused:
        held.max_requests = 10
        held.enqueue(submit_of("r20"), 9.0)
    # Ten left, 1,000 tokens, and 100 tokens a second.
    assert refused.value.retry_after_s is not None
    assert 4.0 < refused.value.retry_after_s < 6.0


def test_requeued_requests_keep_their_place() -> None:
    held = admission()
    for number in range(4):
        held.enqueue(submit_of(f"r{number}"), 0.0)
    first, second = held.pop(0.0), held.pop(0.0)
    assert first is not None and second is not None
    held.requeue(second, 0.0)
    held.requeue(first, 0.0)
    assert order(held) == ["r0", "r1", "r2", "r3"]


def test_removed_while_being_placed_does_not_come_back() -> None:
    held = admission()
    held.enqueue(submit_of("r0"), 0.0)
    ticket = held.pop(0.0)
    assert ticket is not None
    assert held.remove("r0") is ticket
    held.requeue(ticket, 0.0)
    assert ticket.is_removed
    assert held.pop(0.0) is None
    assert len(held) == 0
    assert held.num_tokens == 0


def test_a_resubmission_replaces_the_earlier_try() -> None:
    held = admission()
    earlier = held.enqueue(submit_of("r0"), 0.0)
    held.enqueue(submit_of("r0"), 1.0)
    assert earlier.is_removed
    assert order(held) == ["r0"]


def test_expired_ones_leave_in_any_phase() -> None:
    held = admission()
    held.enqueue(submit_of("placing", deadline_s=1.0), 0.0)
    held.pop(0.0)
    held.enqueue(submit_of("late", deadline_s=3.0), 0.0)
    held.enqueue(submit_of("soon", deadline_s=2.0), 0.0)
    assert held.remove_expired(0.9) == []
    expired = held.remove_expired(2.0)
    assert [ticket.request.request_id for ticket in expired] == ["placing", "soon"]
    assert order(held) == ["late"]


def test_a_blocked_lane_does_not_hold_up_another_model() -> None:
    held = admission()
    held.enqueue(submit_of("a0", model="a"), 0.0)
    held.enqueue(submit_of("b0", model="b"), 0.0)
    held.enqueue(submit_of("b1", model="b"), 0.0)
    ticket = held.pop(0.0, blocked={Lane("a", "r1")})
    assert ticket is not None
    assert ticket.request.request_id == "b0"
    assert order(held) == ["a0", "b1"]


def test_a_gateways_requests_are_dropped_together() -> None:
    held = admission()
    held.enqueue(submit_of("r0", gateway_id="gateway-0"), 0.0)
    held.enqueue(submit_of("r1", gateway_id="gateway-1"), 0.0)
    dropped = held.remove_of_gateway("gateway-0")
    assert [ticket.request.request_id for ticket in dropped] == ["r0"]
    assert held.request_ids_by_gateway() == {"gateway-1": ("r1",)}


def test_early_endings_do_not_pile_up_until_their_deadlines() -> None:
    held = admission()
    for number in range(1000):
        held.enqueue(submit_of(f"r{number}"), 0.0)
        held.remove(f"r{number}")
        held.remove_expired(0.0)
    assert len(held._deadlines) < 200


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"prompt_token_ids": b""}, InvalidRequest),
        ({"prompt_token_ids": b"abc"}, InvalidRequest),
        ({"block_hashes": b"abc"}, InvalidRequest),
        ({"choices": ()}, InvalidRequest),
        ({"choices": (Choice(choice_index=0, output_token_ids=b"abc"),)}, InvalidRequest),
        ({"deadline_s": 0.0}, DeadlineExceeded),
    ],
)
def test_bad_requests_are_refused(change: dict, error: type[Exception]) -> None:
    submit = submit_of("r0")
    bad = SubmitRequest(request=msgspec.structs.replace(submit.request, **change))
    held = admission()
    with pytest.raises(error):
        held.enqueue(bad, 0.0)
    assert len(held) == 0


def cancel_of(attempt: int | None, gateway_id: str = "gateway-0") -> CancelQueued:
    return CancelQueued(request_id="r0", gateway_id=gateway_id, attempt=attempt)


@pytest.mark.parametrize(
    ("cancel", "is_held"),
    [
        (cancel_of(2), True),  # came late: the third try is held
        (cancel_of(3), False),
        (cancel_of(4), False),
        (cancel_of(None), False),
        (cancel_of(None, "gateway-1"), True),
    ],
)
def test_a_cancel_is_of_its_gateways_tries_so_far(cancel: CancelQueued, is_held: bool) -> None:
    held = admission()
    held.enqueue(msgspec.structs.replace(submit_of("r0"), attempt=3), 0.0)
    held.cancel(cancel)
    assert len(held) == is_held


def test_no_gateway_replaces_the_request_of_another() -> None:
    held = admission()
    held.enqueue(submit_of("r0"), 0.0)
    with pytest.raises(InvalidRequest, match="another gateway"):
        held.enqueue(submit_of("r0", gateway_id="gateway-1"), 0.0)
    assert held.request_ids_by_gateway() == {"gateway-0": ("r0",)}


def backlog(held: Admission, *, tenant_id: str = "busy", num: int = 40) -> None:
    """Requests of 100 tokens, of which one a second finds a worker: ten are placed."""
    for number in range(num):
        submit = submit_of(
            f"{tenant_id}-{number}", tenant_id=tenant_id, num_prompt_tokens=90, max_tokens=10
        )
        held.enqueue(submit, 0.0)
    for second in range(10):
        ticket = held.pop(float(second))
        assert ticket is not None
        held.placed(ticket, float(second))


def test_who_cannot_meet_its_deadline_is_refused_at_once() -> None:
    held = admission()
    backlog(held)  # 3,000 tokens left, about 110 a second
    with pytest.raises(Overloaded, match="the wait is about") as refused:
        held.enqueue(submit_of("r0", tenant_id="busy", deadline_s=20.0), 9.0)
    assert refused.value.retry_after_s is not None
    assert 3 < refused.value.retry_after_s < 15  # till the rest of it takes 20 seconds
    assert len(held) == 30
    held.enqueue(submit_of("r1", tenant_id="busy", deadline_s=60.0), 9.0)
    held.enqueue(submit_of("r2", tenant_id="modest", deadline_s=2.0), 9.0)  # its turn is next
    ticket = held.pop(9.0)
    assert ticket is not None and ticket.request.request_id == "r2"


def test_a_heavier_tenant_waits_less() -> None:
    held = admission()
    backlog(held, num=20)
    backlog_of_other = submit_of("r0", tenant_id="heavy", num_prompt_tokens=990)
    heavy = msgspec.structs.replace(backlog_of_other.request, weight=9.0)
    held.enqueue(SubmitRequest(request=heavy), 9.0)
    late = msgspec.structs.replace(heavy, request_id="r1", deadline_s=12.0)
    held.enqueue(SubmitRequest(request=late), 9.0)  # 1,000 tokens at nine tenths of the rate
    light = msgspec.structs.replace(late, request_id="r2", tenant_id="busy", weight=1.0)
    with pytest.raises(Overloaded, match="the wait is about"):
        held.enqueue(SubmitRequest(request=light), 9.0)


def test_nobody_is_refused_for_a_rate_that_no_wait_has_shown() -> None:
    """A short burst after a quiet time says nothing of what the workers can do."""
    held = admission()
    for second in range(100):
        held.enqueue(submit_of(f"r{second}"), float(second))
        ticket = held.pop(float(second))
        assert ticket is not None
        held.placed(ticket, second + 0.01)
    for number in range(50):
        held.enqueue(submit_of(f"burst-{number}", deadline_s=0.5), 100.0)
    assert len(held) == 50
