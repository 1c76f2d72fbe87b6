"""The choices of one request run from the shared blocks of a prompt that is computed once."""

from __future__ import annotations

import pytest

from shared.engine.batching.sequence import Sequence, SequenceState
from shared.messages import BlocksStored, SamplingParams
from tests.support.engine.rig import (
    BLOCK_SIZE,
    Rig,
    greedy,
    new_sequence,
    prompt,
    pushed_kv,
    seeded,
    solo,
)

S = SequenceState
PROMPT = prompt(23)  # the parent has 22 of them: five full blocks and half of a sixth
EACH_SAMPLING = pytest.mark.parametrize(
    "sampling", [greedy(20), seeded(20)], ids=["greedy", "seeded"]
)


def held_prefill(rig: Rig, ids: list[int]) -> Sequence:
    parent = rig.add(new_sequence(ids[:-1], None))
    while parent.state is not S.HELD:
        rig.step()
    return parent


def choices(
    ids: list[int], sampling: SamplingParams, count: int, *, received: tuple[int, ...] = ()
) -> list[Sequence]:
    """Choice i starts with `received[i]` output tokens."""
    made = []
    for index in range(count):
        num_received = received[index] if received else 0
        output = solo(tuple(ids), sampling, choice_index=index)[:num_received]
        made.append(new_sequence(ids, sampling, output_ids=output, choice_index=index))
    return made


def forked(rig: Rig, count: int, sampling: SamplingParams, ids: list[int] = PROMPT) -> list:
    return rig.fork(held_prefill(rig, ids), choices(ids, sampling, count))


def check_outputs(rig: Rig, children: list[Sequence], ids: list[int] = PROMPT) -> None:
    rig.run()
    for child in children:
        assert child.sampling is not None
        expected = solo(tuple(ids), child.sampling, choice_index=child.choice_index)
        assert child.token_ids[len(ids) :] == expected
        assert rig.ending(child) == "length"


@EACH_SAMPLING
@pytest.mark.parametrize("num_tokens", [2, 4, 5, 6, 23])
@pytest.mark.parametrize("budget", [1, 2, 64])
def test_every_choice_equals_its_solo_run(
    budget: int, num_tokens: int, sampling: SamplingParams
) -> None:
    rig = Rig(max_batch_tokens=budget)
    ids = prompt(num_tokens)
    children = forked(rig, 3, sampling, ids)
    check_outputs(rig, children, ids)
    assert rig.num_computed_tokens == num_tokens - 1 + 3 * 20, "the prompt's KV is computed once"


@EACH_SAMPLING
def test_choices_of_pushed_prompt_equal_solo_runs(sampling: SamplingParams) -> None:
    rig = Rig()
    parent = new_sequence(PROMPT[:-1], None)
    assert rig.reserve(parent)
    rig.receive_kv(parent, pushed_kv(PROMPT, 0, 22), 22)
    assert parent.state is S.HELD
    check_outputs(rig, rig.fork(parent, choices(PROMPT, sampling, 3)))
    assert rig.num_computed_tokens == 3 * 20


@EACH_SAMPLING
def test_choices_resume_after_different_output_lengths(sampling: SamplingParams) -> None:
    rig = Rig()
    parent = held_prefill(rig, PROMPT)
    children = rig.fork(parent, choices(PROMPT, sampling, 4, received=(0, 1, 7, 19)))
    check_outputs(rig, children)


def test_each_choice_takes_one_block_beyond_the_prompt() -> None:
    rig = Rig()
    children = forked(rig, 4, seeded())
    assert rig.engine.pool.num_blocks - rig.engine.pool.num_free_blocks == 6
    rows = rig.step()
    assert [row.sequence for row in rows] == children, "all choices sample in the next step"
    assert rig.engine.pool.num_blocks - rig.engine.pool.num_free_blocks == 5 + 4
    assert [child.num_computed_tokens for child in children] == [23] * 4


def test_last_holder_writes_in_place() -> None:
    rig = Rig()
    parent = held_prefill(rig, PROMPT)
    partial = parent.block_tables[0][-1]
    *others, last = rig.fork(parent, choices(PROMPT, seeded(), 3))
    rows = rig.begin()
    assert last.block_tables[0][-1] == partial
    assert [row.block_copies for row in rows] == [
        *(((partial, other.block_tables[0][-1]),) for other in others),
        (),
    ]
    rig.end(rows)
    check_outputs(rig, [*others, last])


@pytest.mark.parametrize(("num_tokens", "count"), [(23, 1), (21, 3)])
def test_no_copy_for_one_choice_or_full_blocks(num_tokens: int, count: int) -> None:
    rig = Rig()
    forked(rig, count, seeded(), prompt(num_tokens))
    assert [row.block_copies for row in rig.begin()] == [()] * count


def test_copy_source_is_not_reallocated_during_the_step() -> None:
    """The only other holder is aborted during the step, and a push takes every free block."""
    rig = Rig(num_blocks=16, max_batch_tokens=1)
    copying, aborted = forked(rig, 2, seeded())
    rows = rig.begin()
    assert [row.sequence for row in rows] == [copying]
    rig.engine.abort(aborted)
    source = rows[0].block_copies[0][0]
    rig.check()
    pushed = new_sequence(prompt(9 * BLOCK_SIZE, start=900), greedy())
    assert rig.reserve(pushed)
    assert rig.engine.pool.num_free_blocks == 0
    assert source not in pushed.block_tables[0]
    rig.receive_kv(pushed, pushed_kv(pushed.token_ids, 0, 35), 35)
    rig.end(rows)
    rig.engine.abort(pushed)
    check_outputs(rig, [copying])


def test_row_preempted_during_scheduling_drops_its_copy() -> None:
    """The younger choices have block copies when the oldest choice, resumed after 7 tokens, needs
    blocks that a reservation took.
    """
    rig = Rig(num_blocks=15)
    parent = held_prefill(rig, PROMPT)
    children = rig.fork(parent, choices(PROMPT, seeded(), 3, received=(7, 0, 0)))
    assert all(child.state is S.RUNNING for child in children)
    reserved = new_sequence(prompt(24, start=800), greedy())
    assert rig.reserve(reserved)
    rows = rig.begin()
    assert [row.sequence for row in rows] == [children[1], children[0]]
    assert children[2].num_preemptions == 1
    rig.end(rows)
    rig.engine.abort(reserved)
    check_outputs(rig, children)


def test_younger_choice_is_preempted_without_block_for_copy() -> None:
    """The older choice is then the only holder of the prompt's last block and needs no copy."""
    rig = Rig(num_blocks=10)
    parent = held_prefill(rig, PROMPT)
    partial = parent.block_tables[0][-1]
    children = rig.fork(parent, choices(PROMPT, seeded(), 2))
    reserved = new_sequence(prompt(16, start=800), greedy())
    assert rig.reserve(reserved)
    rows = rig.begin()
    assert [(row.sequence, row.block_copies) for row in rows] == [(children[0], ())]
    assert children[0].block_tables[0][-1] == partial
    rig.end(rows)
    rig.engine.abort(reserved)
    check_outputs(rig, children)


def test_choices_beyond_the_batch_queue_first_and_hit_cache() -> None:
    rig = Rig(max_sequences=2)
    parent = held_prefill(rig, PROMPT)
    later = rig.add(new_sequence(prompt(3, start=600), greedy()))
    children = rig.fork(parent, choices(PROMPT, seeded(), 5))
    assert [child.state for child in children] == [S.RUNNING] * 2 + [S.WAITING] * 3
    assert list(rig.engine.batcher.waiting) == [*children[2:], later]
    check_outputs(rig, children)
    assert [child.num_cached_tokens for child in children] == [0, 0, 20, 20, 20]


@pytest.mark.parametrize("num_blocks", [6, 7, 8, 12])
def test_choices_without_room_wait_and_then_finish(num_blocks: int) -> None:
    rig = Rig(num_blocks=num_blocks)
    ids = prompt(22)
    children = forked(rig, 4, seeded(2), ids)
    num_own = num_blocks - 5
    assert [child.state for child in children[:num_own]] == [S.RUNNING] * min(num_own, 4)
    assert all(child.state is S.WAITING for child in children[num_own:])
    check_outputs(rig, children, ids)
    assert not any(child.num_preemptions for child in children), "no choice is admitted too early"


def test_shared_blocks_of_greedy_choices_are_announced_once() -> None:
    rig = Rig()
    children = forked(rig, 3, greedy(20))
    rig.run()
    assert len({tuple(rig.output(child)) for child in children}) == 1
    stored = [
        event.block_hashes[start : start + 16]
        for event in rig.engine.pool.take_events()
        if isinstance(event, BlocksStored)
        for start in range(0, len(event.block_hashes), 16)
    ]
    assert len(stored) == len(set(stored)) == (23 + 19) // BLOCK_SIZE


def test_failed_step_ends_only_its_own_choices() -> None:
    rig = Rig(max_batch_tokens=2)
    children = forked(rig, 3, seeded())
    rows = rig.begin()
    assert len(rows) == 2
    rig.fail(rows)
    assert [child.state for child in children] == [S.FINISHED, S.FINISHED, S.RUNNING]
    check_outputs(rig, children[2:])


@pytest.mark.parametrize("is_in_step", [False, True])
def test_aborted_choices_release_their_blocks(is_in_step: bool) -> None:
    rig = Rig()
    children = forked(rig, 3, seeded())
    rows = rig.begin() if is_in_step else []
    for child in children[:2]:
        rig.engine.abort(child)
        rig.check()
    rig.end(rows)
    check_outputs(rig, children[2:])


def test_fork_without_children_releases_the_prompt() -> None:
    rig = Rig()
    rig.fork(held_prefill(rig, PROMPT), [])
    assert rig.engine.is_idle


def test_fork_requires_a_held_and_computed_prompt() -> None:
    rig = Rig()
    parent = rig.add(new_sequence(PROMPT[:-1], None))
    with pytest.raises(ValueError, match="waiting sequence that lacks the KV of 22 tokens"):
        rig.engine.fork(parent, choices(PROMPT, seeded(), 2))
    rig.fail(rig.begin())
    assert parent.state is S.HELD
    with pytest.raises(ValueError, match="held sequence that lacks the KV of 22 tokens"):
        rig.engine.fork(parent, choices(PROMPT, seeded(), 2))
    rig.engine.release(parent)
    rig.check()


def test_fork_rejects_unsuitable_children() -> None:
    """A child with prompt logprobs shares no KV; a child is longer than its parent."""
    rig = Rig()
    parent = held_prefill(rig, PROMPT)
    with_logprobs = SamplingParams(seed=0, max_tokens=4, num_prompt_logprobs=0)
    with pytest.raises(ValueError, match="must compute every token"):
        rig.engine.fork(
            parent, [*choices(PROMPT, seeded(), 1), new_sequence(PROMPT, with_logprobs)]
        )
    with pytest.raises(ValueError, match="at least one token more"):
        rig.engine.fork(parent, choices(PROMPT[:-1], seeded(), 1))
    assert parent.state is S.HELD
