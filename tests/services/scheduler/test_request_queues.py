from __future__ import annotations

import msgspec
import pytest

from services.scheduler.backlog import QueueKey
from services.scheduler.request_queues import RequestQueues
from shared.errors import DeadlineExceeded, InvalidRequest, Overloaded
from shared.messages import CancelQueued, Choice, SubmitRequest
from tests.services.scheduler.literals import submit_of


def admission(max_requests: int = 100, max_tokens: int = 100_000) -> RequestQueues:
    return RequestQueues(max_requests, max_tokens)


def order(queue: RequestQueues) -> list[str]:
    names = []
    while (ticket := queue.pop(0.0)) is not None:
        names.append(ticket.request.request_id)
    return names


def test_queue_is_bounded_in_requests() -> None:
    queue = admission(max_requests=2)
    queue.enqueue(submit_of("r0"), 0.0)
    queue.enqueue(submit_of("r1"), 0.0)
    with pytest.raises(Overloaded) as raised:
        queue.enqueue(submit_of("r2"), 0.0)
    assert raised.value.retry_after_s is not None
    assert raised.value.retry_after_s > 0
    queue.remove("r0")
    queue.enqueue(submit_of("r2"), 0.0)
    assert len(queue) == 2


def test_queue_is_bounded_in_tokens_unless_empty() -> None:
    queue = admission(max_tokens=100)
    queue.enqueue(submit_of("giant", num_prompt_tokens=500), 0.0)
    with pytest.raises(Overloaded):
        queue.enqueue(submit_of("small"), 0.0)
    queue.remove("giant")
    queue.enqueue(submit_of("small"), 0.0)


def test_one_tenant_cannot_fill_the_queue() -> None:
    queue = admission(max_requests=90)
    for number in range(80):
        queue.enqueue(submit_of(f"r{number}", tenant_id="greedy"), 0.0)
    with pytest.raises(Overloaded, match="tenant"):
        queue.enqueue(submit_of("r80", tenant_id="greedy"), 0.0)
    queue.enqueue(submit_of("other", tenant_id="modest"), 0.0)


def test_requests_being_placed_count_toward_the_bound() -> None:
    queue = admission(max_requests=1)
    queue.enqueue(submit_of("r0"), 0.0)
    ticket = queue.pop(0.0)
    assert ticket is not None
    with pytest.raises(Overloaded):
        queue.enqueue(submit_of("r1"), 0.0)
    queue.placed(ticket, 1.0)
    queue.enqueue(submit_of("r1"), 1.0)


def test_retry_after_follows_the_rate_of_placement() -> None:
    queue = admission()
    for number in range(20):
        queue.enqueue(submit_of(f"r{number}", num_prompt_tokens=90, max_tokens=10), 0.0)
    for second in range(10):
        ticket = queue.pop(float(second))
        assert ticket is not None
        queue.placed(ticket, float(second))
    with pytest.raises(Overloaded) as raised:
        queue.max_requests = 10
        queue.enqueue(submit_of("r20"), 9.0)
    # Ten requests of 1,000 tokens in all are left; the rate is 100 tokens/s.
    assert raised.value.retry_after_s is not None
    assert 4.0 < raised.value.retry_after_s < 6.0


def test_requeued_requests_retain_their_position() -> None:
    queue = admission()
    for number in range(4):
        queue.enqueue(submit_of(f"r{number}"), 0.0)
    first, second = queue.pop(0.0), queue.pop(0.0)
    assert first is not None and second is not None
    queue.requeue(second, 0.0)
    queue.requeue(first, 0.0)
    assert order(queue) == ["r0", "r1", "r2", "r3"]


def test_request_removed_while_placing_is_not_requeued() -> None:
    queue = admission()
    queue.enqueue(submit_of("r0"), 0.0)
    ticket = queue.pop(0.0)
    assert ticket is not None
    assert queue.remove("r0") is ticket
    queue.requeue(ticket, 0.0)
    assert ticket.is_removed
    assert queue.pop(0.0) is None
    assert len(queue) == 0
    assert queue.num_tokens == 0


def test_resubmission_replaces_the_earlier_attempt() -> None:
    queue = admission()
    earlier = queue.enqueue(submit_of("r0"), 0.0)
    queue.enqueue(submit_of("r0"), 1.0)
    assert earlier.is_removed
    assert order(queue) == ["r0"]


def test_expired_requests_are_removed_in_any_phase() -> None:
    queue = admission()
    queue.enqueue(submit_of("placing", deadline_s=1.0), 0.0)
    queue.pop(0.0)
    queue.enqueue(submit_of("late", deadline_s=3.0), 0.0)
    queue.enqueue(submit_of("soon", deadline_s=2.0), 0.0)
    assert queue.remove_expired(0.9) == []
    expired = queue.remove_expired(2.0)
    assert [ticket.request.request_id for ticket in expired] == ["placing", "soon"]
    assert order(queue) == ["late"]


def test_blocked_queue_does_not_delay_another_model() -> None:
    queue = admission()
    queue.enqueue(submit_of("a0", model="a"), 0.0)
    queue.enqueue(submit_of("b0", model="b"), 0.0)
    queue.enqueue(submit_of("b1", model="b"), 0.0)
    ticket = queue.pop(0.0, blocked={QueueKey("a", "r1", 16)})
    assert ticket is not None
    assert ticket.request.request_id == "b0"
    assert order(queue) == ["a0", "b1"]


def test_requests_of_a_gateway_are_removed_together() -> None:
    queue = admission()
    queue.enqueue(submit_of("r0", gateway_id="gateway-0"), 0.0)
    queue.enqueue(submit_of("r1", gateway_id="gateway-1"), 0.0)
    dropped = queue.remove_of_gateway("gateway-0")
    assert [ticket.request.request_id for ticket in dropped] == ["r0"]
    assert queue.request_ids_by_gateway() == {"gateway-1": ("r1",)}


def test_deadlines_of_removed_requests_are_dropped() -> None:
    queue = admission()
    for number in range(1000):
        queue.enqueue(submit_of(f"r{number}"), 0.0)
        queue.remove(f"r{number}")
        queue.remove_expired(0.0)
    assert len(queue._deadlines) < 200


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
def test_invalid_requests_are_rejected(change: dict, error: type[Exception]) -> None:
    submit = submit_of("r0")
    bad = SubmitRequest(request=msgspec.structs.replace(submit.request, **change))
    queue = admission()
    with pytest.raises(error):
        queue.enqueue(bad, 0.0)
    assert len(queue) == 0


def cancel_of(attempt: int | None, gateway_id: str = "gateway-0") -> CancelQueued:
    return CancelQueued(request_id="r0", gateway_id=gateway_id, attempt=attempt)


@pytest.mark.parametrize(
    ("cancel", "is_held"),
    [
        (cancel_of(2), True),  # too late: attempt 3 is queued
        (cancel_of(3), False),
        (cancel_of(4), False),
        (cancel_of(None), False),
        (cancel_of(None, "gateway-1"), True),
    ],
)
def test_cancel_ignores_later_attempts_and_other_gateways(
    cancel: CancelQueued, is_held: bool
) -> None:
    queue = admission()
    queue.enqueue(msgspec.structs.replace(submit_of("r0"), attempt=3), 0.0)
    queue.cancel(cancel)
    assert len(queue) == is_held


def test_gateway_cannot_replace_request_of_another() -> None:
    queue = admission()
    queue.enqueue(submit_of("r0"), 0.0)
    with pytest.raises(InvalidRequest, match="another gateway"):
        queue.enqueue(submit_of("r0", gateway_id="gateway-1"), 0.0)
    assert queue.request_ids_by_gateway() == {"gateway-0": ("r0",)}


def backlog(queue: RequestQueues, *, tenant_id: str = "busy", num: int = 40) -> None:
    """Enqueues `num` requests of 100 tokens, then places ten of them, one per second."""
    for number in range(num):
        submit = submit_of(
            f"{tenant_id}-{number}", tenant_id=tenant_id, num_prompt_tokens=90, max_tokens=10
        )
        queue.enqueue(submit, 0.0)
    for second in range(10):
        ticket = queue.pop(float(second))
        assert ticket is not None
        queue.placed(ticket, float(second))


def test_request_that_cannot_meet_its_deadline_is_rejected() -> None:
    queue = admission()
    backlog(queue)  # 3,000 tokens left, about 110 tokens/s
    with pytest.raises(Overloaded, match="the wait is about") as raised:
        queue.enqueue(submit_of("r0", tenant_id="busy", deadline_s=20.0), 9.0)
    assert raised.value.retry_after_s is not None
    assert 3 < raised.value.retry_after_s < 15  # until the expected wait is 20 s
    assert len(queue) == 30
    queue.enqueue(submit_of("r1", tenant_id="busy", deadline_s=60.0), 9.0)
    queue.enqueue(submit_of("r2", tenant_id="modest", deadline_s=2.0), 9.0)  # served next
    ticket = queue.pop(9.0)
    assert ticket is not None and ticket.request.request_id == "r2"


def test_tenant_with_higher_weight_waits_less() -> None:
    queue = admission()
    backlog(queue, num=20)
    backlog_of_other = submit_of("r0", tenant_id="heavy", num_prompt_tokens=990)
    heavy = msgspec.structs.replace(backlog_of_other.request, weight=9.0)
    queue.enqueue(SubmitRequest(request=heavy), 9.0)
    late = msgspec.structs.replace(heavy, request_id="r1", deadline_s=12.0)
    queue.enqueue(SubmitRequest(request=late), 9.0)  # 1,000 tokens at nine tenths of the rate
    light = msgspec.structs.replace(late, request_id="r2", tenant_id="busy", weight=1.0)
    with pytest.raises(Overloaded, match="the wait is about"):
        queue.enqueue(SubmitRequest(request=light), 9.0)


def test_no_rejection_before_a_wait_was_measured() -> None:
    """The rate before a burst shows the demand, not the capacity of the workers."""
    queue = admission()
    for second in range(100):
        queue.enqueue(submit_of(f"r{second}"), float(second))
        ticket = queue.pop(float(second))
        assert ticket is not None
        queue.placed(ticket, second + 0.01)
    for number in range(50):
        queue.enqueue(submit_of(f"burst-{number}", deadline_s=0.5), 100.0)
    assert len(queue) == 50


def test_all_tenants_of_another_site_share_one_turn() -> None:
    queue = RequestQueues(max_requests=100, max_tokens=100_000)
    for number in range(8):
        submit = submit_of(f"b{number}", tenant_id=f"b/t{number}")
        there = msgspec.structs.replace(submit.request, origin_site="b")
        queue.enqueue(msgspec.structs.replace(submit, request=there), 0.0)
    for number in range(8):
        queue.enqueue(submit_of(f"a{number}", tenant_id="a"), 0.0)
    taken = [queue.pop(0.0) for _ in range(8)]
    names = [each.request.request_id[0] for each in taken if each is not None]
    assert names.count("a") == names.count("b") == 4
