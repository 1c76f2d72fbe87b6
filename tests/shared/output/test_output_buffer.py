from __future__ import annotations

import pytest

from shared.errors import UnknownPlacement
from shared.messages import Finish, Served, TokenEntry, TokenLogprobs
from shared.output.output_buffer import Output, OutputBuffer, apart

P, Q = b"p" * 16, b"q" * 16
SERVED = Served(num_cached_tokens=3, prefill_worker_id="prefill-1")
STOP = Finish(reason="stop", served=SERVED)


def output_buffer() -> tuple[OutputBuffer, Output, Output]:
    made = OutputBuffer()
    first, second = made.open(P, "gateway-1", 0, 5), made.open(Q, "gateway-2", 1, 0)
    first.served = second.served = SERVED
    return made, first, second


def test_take_returns_one_batch_per_gateway_with_new_tokens():
    it, p, q = output_buffer()
    it.add(p, (1,))
    it.add(q, (7,))
    it.add(p, (2,))
    assert it.num_waiting == 2
    assert it.take() == {
        ("gateway-1", ""): [TokenEntry(P, 0, 5, (1, 2), None, SERVED)],
        ("gateway-2", ""): [TokenEntry(Q, 1, 0, (7,), None, SERVED)],
    }
    assert it.take() == {}
    it.add(p, (3,), STOP)
    assert it.take() == {("gateway-1", ""): [TokenEntry(P, 0, 7, (3,), STOP)]}


def test_take_first_returns_only_first_tokens():
    it, p, q = output_buffer()
    it.add(p, (1,))
    assert it.take_first() == {("gateway-1", ""): [TokenEntry(P, 0, 5, (1,), None, SERVED)]}
    it.add(p, (2,))
    it.add(q, (), STOP)
    assert it.take_first() == {("gateway-2", ""): [TokenEntry(Q, 1, 0, (), STOP, SERVED)]}
    assert it.take_first() == {}
    assert it.take() == {("gateway-1", ""): [TokenEntry(P, 0, 6, (2,))]}
    it.add(p, (3,))
    assert it.take_first() == {}


def test_take_first_skips_taken_resent_and_dropped_outputs():
    it, p, q = output_buffer()
    it.add(p, (1,))
    assert it.take() and it.take_first() == {}
    it.add(q, (1,))
    it.resend(Q, 1, 0)
    assert it.take_first() == {}
    it.drop(Q)
    again = it.open(Q, "gateway-2", 0, 0)
    it.add(again, (1,))
    it.drop(Q)
    assert it.take_first() == {} and it.num_waiting == 0


def test_first_token_after_resend_overdue_is_still_first():
    it, p, _ = output_buffer()
    it.resend_overdue(P)
    it.add(p, (1,))
    assert it.take_first() == {("gateway-1", ""): [TokenEntry(P, 0, 5, (1,), None, SERVED)]}
    assert it.take() == {}


def test_finish_without_tokens_is_returned():
    it, p, _ = output_buffer()
    it.add(p, (), STOP)
    assert it.take() == {("gateway-1", ""): [TokenEntry(P, 0, 5, (), STOP, SERVED)]}


@pytest.mark.parametrize("position, token_ids", [(0, (1, 2, 3)), (6, (2, 3)), (8, ()), (99, ())])
def test_resend_returns_tokens_from_any_position(position, token_ids):
    it, p, _ = output_buffer()
    it.add(p, (1, 2, 3), STOP)
    entry = it.resend(P, 0, position)
    assert entry.token_ids == token_ids and entry.finish == STOP
    assert (entry.served == SERVED) is (position <= 5)
    assert it.take() == {}, "`take` returns no resent tokens"


L1, L2, L3 = (TokenLogprobs(-float(n), (n,), (-0.5,)) for n in (1, 2, 3))


def test_logprobs_follow_tokens_and_prompt_logprobs_the_first():
    it, p, _ = output_buffer()
    it.add(p, (1,), logprobs=(L1,), prompt_logprobs=(L3, L2))
    first = TokenEntry(P, 0, 5, (1,), None, SERVED, logprobs=(L1,), prompt_logprobs=(L3, L2))
    assert it.take() == {("gateway-1", ""): [first]}
    it.add(p, (2,), logprobs=(L2,))
    it.add(p, (3,), STOP, logprobs=(L3,))
    assert it.take() == {("gateway-1", ""): [TokenEntry(P, 0, 6, (2, 3), STOP, logprobs=(L2, L3))]}
    again = it.resend(P, 0, 5)
    assert (again.logprobs, again.prompt_logprobs) == ((L1, L2, L3), (L3, L2))
    later = it.resend(P, 0, 7)
    assert (later.token_ids, later.logprobs, later.prompt_logprobs) == ((3,), (L3,), ())


def test_large_entries_are_sent_in_separate_messages():
    small = [TokenEntry(P, 0, 0, (1,), logprobs=(L1,)), TokenEntry(Q, 0, 0, (2,))]
    large = [TokenEntry(each, 0, 0, (3,), prompt_logprobs=(L1,)) for each in (P, Q)]
    assert apart([small[0], large[0], small[1], large[1]]) == [[large[0]], [large[1]], small]
    assert apart(large) == [[large[0]], [large[1]]]
    assert apart(small) == [small]


def test_choices_are_numbered_separately_and_dropped_together():
    it = OutputBuffer()
    first, other = it.open(P, "gateway-1", 0, 5), it.open(P, "gateway-1", 2, 0)
    first.served = other.served = SERVED
    it.add(first, (1,))
    it.add(other, (7, 8), STOP)
    assert it.take() == {
        ("gateway-1", ""): [
            TokenEntry(P, 0, 5, (1,), None, SERVED),
            TokenEntry(P, 2, 0, (7, 8), STOP, SERVED),
        ]
    }
    assert it.resend(P, 2, 1) == TokenEntry(P, 2, 1, (8,), STOP)
    it.add(first, (2,))
    it.drop_choice(P, 0)
    it.drop_choice(P, 0)
    assert it.take() == {} and P in it
    with pytest.raises(UnknownPlacement):
        it.resend(P, 0, 0)
    it.drop_choice(P, 2)
    assert P not in it and len(it) == 0
    it.open(P, "gateway-1", 0, 0)
    other = it.open(P, "gateway-1", 1, 0)
    it.add(other, (3,))
    it.drop(P)
    assert it.take() == {} and P not in it


def test_dropped_and_unknown_outputs_cannot_be_resent():
    it, p, _ = output_buffer()
    it.add(p, (1,))
    it.drop(P)
    it.drop(P)
    assert it.take() == {} and P not in it and len(it) == 1
    it.add(p, (2,))
    assert it.take() == {}
    for placement_id, choice_index in [(P, 0), (Q, 0), (b"x", 0)]:
        with pytest.raises(UnknownPlacement):
            it.resend(placement_id, choice_index, 0)
