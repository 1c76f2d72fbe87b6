"""The engine core: what it accepts, how a sequence ends, and leaving in every state."""

from __future__ import annotations

from typing import Any

import pytest

from shared.block_hash import extend_chain
from shared.engine.batching.sequence import TRANSITIONS, Sequence, SequenceState
from shared.engine.engine import StepProgress
from shared.errors import InvalidRequest
from shared.messages import BlocksStored, SamplingParams
from tests.shared.engine.support.rig import (
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
PROMPT = tuple(prompt(10))
TOKENS = solo(PROMPT, greedy(30))


@pytest.mark.parametrize("max_tokens", [1, 2, 30])
def test_max_tokens(max_tokens: int) -> None:
    rig = Rig()
    sequence = new_sequence(PROMPT, greedy(max_tokens))
    assert rig.complete(sequence) == TOKENS[:max_tokens]
    assert rig.endings[sequence.sequence_id] == StepProgress(
        sequence, (TOKENS[max_tokens - 1],), finish_reason="length"
    )
    assert sequence.state is S.FINISHED


@pytest.mark.parametrize("stop_index", [0, 1, 12])
def test_a_stop_token_is_told_and_not_part_of_the_output(stop_index: int) -> None:
    rig = Rig()
    sequence = new_sequence(PROMPT, greedy(30), stop=(5, TOKENS[stop_index]))
    assert rig.complete(sequence) == TOKENS[:stop_index]
    assert rig.endings[sequence.sequence_id] == StepProgress(
        sequence, finish_reason="stop", stop_token_id=TOKENS[stop_index]
    )


def test_without_stop_ids_nothing_stops() -> None:
    rig = Rig()
    assert rig.complete(new_sequence(PROMPT, greedy(30), stop=())) == TOKENS


@pytest.mark.parametrize(("min_tokens", "num_output"), [(3, 3), (4, 4), (5, None)])
def test_before_min_tokens_no_stop_token_is_drawn(min_tokens: int, num_output: int | None) -> None:
    """Of two tokens one stops, so that up to `min_tokens` only the other is drawn."""
    rig = Rig(vocab_size=18)
    sequence = new_sequence(PROMPT, greedy(200, min_tokens=min_tokens), stop=(17,))
    tokens = rig.complete(sequence)
    assert len(tokens) >= min_tokens
    assert set(tokens) == {16}
    assert rig.ending(sequence) == "stop"
    assert rig.endings[sequence.sequence_id].stop_token_id == 17


def test_min_tokens_counts_what_was_received_before() -> None:
    stop = TOKENS[5]
    for min_tokens, is_stopped in ((5, True), (6, False)):
        rig = Rig()
        sampling = greedy(7, min_tokens=min_tokens)
        sequence = new_sequence(PROMPT, sampling, output_ids=TOKENS[:5], stop=(stop,))
        assert (rig.complete(sequence) == []) is is_stopped


def test_the_context_limit_ends_with_length() -> None:
    rig = Rig(max_context_tokens=14)
    sequence = new_sequence(PROMPT, greedy(30))
    assert rig.complete(sequence) == TOKENS[:4]
    assert rig.ending(sequence) == "length"


def test_the_pool_bounds_the_context() -> None:
    rig = Rig(num_blocks=4, max_context_tokens=4096)
    assert rig.engine.max_context_tokens == 16
    sequence = new_sequence(PROMPT, greedy(30))
    assert rig.complete(sequence) == TOKENS[:6]
    assert rig.ending(sequence) == "length"


def refused_longer_than_the_context() -> Sequence:
    return new_sequence(prompt(17), greedy())


def refused_more_hashes_than_blocks() -> Sequence:
    sequence = new_sequence(PROMPT, greedy())
    sequence.block_hashes = [b"x" * 16] * 3
    return sequence


def refused_no_tokens() -> Sequence:
    return new_sequence([], greedy())


def refused_nothing_left_to_draw() -> Sequence:
    return new_sequence(PROMPT, greedy(2), output_ids=TOKENS[:2])


def refused_a_seed_that_is_no_u64() -> Sequence:
    return new_sequence(PROMPT, seeded(seed=-1))


def refused_a_top_k_beyond_int64() -> Sequence:
    return new_sequence(PROMPT, SamplingParams(seed=0, max_tokens=1, top_k=2**63))


def refused_a_choice_index_beyond_int64() -> Sequence:
    return new_sequence(PROMPT, greedy(), choice_index=2**63)


NAN, INFINITY = float("nan"), float("inf")


@pytest.mark.parametrize(
    "options",
    [
        {"repetition_penalty": 0.0},
        {"repetition_penalty": -1.0},
        {"repetition_penalty": 1e-60},
        {"repetition_penalty": NAN},
        {"repetition_penalty": INFINITY},
        {"frequency_penalty": NAN},
        {"presence_penalty": -INFINITY},
        {"logit_bias": ((5, 1.0), (6, NAN))},
        {"logit_bias": ((5, 1e300),)},
        {"bad_words": ((5,), ())},
        {"bad_words": ((5,), (6,) * 33)},
        {"bad_words": ((5,),) * 257},
        {"logit_bias": tuple((n, 1.0) for n in range(1025))},
        {"num_logprobs": -1},
        {"num_logprobs": 21},
        {"num_prompt_logprobs": 21},
    ],
    ids=lambda options: str(options)[:40],
)
def test_refuses_options_that_no_logits_can_bear(options: dict[str, Any]) -> None:
    rig = Rig(num_blocks=64)
    params = SamplingParams(seed=0, max_tokens=1, **options)
    for take in (rig.engine.add, rig.engine.reserve):
        with pytest.raises(InvalidRequest):
            take(new_sequence(PROMPT, params))
    assert rig.engine.is_idle


def test_takes_the_outermost_options() -> None:
    params = SamplingParams(
        seed=0,
        max_tokens=1,
        repetition_penalty=1e-3,
        frequency_penalty=-2.0,
        presence_penalty=2.0,
        logit_bias=((0, -100.0), *((n, 100.0) for n in range(1, 1024))),
        bad_words=((5,) * 32,) * 256,
        num_logprobs=20,
        num_prompt_logprobs=0,
    )
    assert len(Rig().complete(new_sequence(PROMPT, params))) == 1


@pytest.mark.parametrize(
    "refused",
    [
        refused_longer_than_the_context,
        refused_more_hashes_than_blocks,
        refused_no_tokens,
        refused_nothing_left_to_draw,
        refused_a_seed_that_is_no_u64,
        refused_a_top_k_beyond_int64,
        refused_a_choice_index_beyond_int64,
    ],
)
def test_refuses_what_it_can_never_compute(refused) -> None:  # type: ignore[no-untyped-def]
    rig = Rig(num_blocks=4)
    for take in (rig.engine.add, rig.engine.reserve):
        with pytest.raises(InvalidRequest):
            take(refused())
    rig.check()
    assert rig.engine.is_idle


def test_the_lists_that_it_was_given_stay_the_callers() -> None:
    """Choices of one request may be made from one list of tokens and hashes."""
    rig = Rig()
    donor = rig.add(new_sequence(prompt(8), greedy()))
    hashes, ids = list(donor.block_hashes), prompt(8)
    rig.run()
    made = [
        Sequence(
            sequence_id=bytes([n]),
            tenant_id=donor.tenant_id,
            cache_root=donor.cache_root,
            token_ids=ids,
            num_prompt_tokens=8,
            block_hashes=hashes,
            sampling=seeded(20),
            choice_index=n,
        )
        for n in range(2)
    ]
    for sequence in made:
        rig.add(sequence)
    rig.run()
    assert (len(ids), len(hashes)) == (8, 2)
    for n, sequence in enumerate(made):
        assert rig.output(sequence) == solo(tuple(ids), seeded(20), choice_index=n)


def test_reservations_are_bounded_by_their_share() -> None:
    rig = Rig(num_blocks=16)
    first, second, third = (new_sequence(prompt(16, start=n), greedy()) for n in (0, 50, 90))
    assert rig.reserve(first)
    assert rig.reserve(second)
    assert rig.engine.num_reserved_blocks == 8
    assert not rig.reserve(third)
    assert not third.block_table
    rig.engine.abort(first)
    assert rig.reserve(third)
    rig.check()


def test_one_reservation_alone_may_exceed_the_share() -> None:
    rig = Rig(num_blocks=16)
    assert rig.reserve(new_sequence(prompt(50), greedy()))
    assert not rig.reserve(new_sequence(prompt(4), greedy()))


def test_no_reservation_without_room() -> None:
    rig = Rig(num_blocks=8)
    rig.add(new_sequence(prompt(24), greedy()))
    rig.step()
    refused = new_sequence(prompt(12, start=500), greedy())
    assert not rig.reserve(refused)
    assert not refused.block_table
    rig.check()


def test_activation_leaves_a_token_to_compute() -> None:
    rig = Rig()
    sequence = new_sequence(PROMPT, greedy())
    assert rig.reserve(sequence)
    with pytest.raises(ValueError, match="10 of 10 tokens"):
        rig.engine.activate(sequence, 10)
    rig.arrive(sequence, pushed_kv(PROMPT, 0, 9), 9)
    rig.run()
    assert rig.output(sequence) == TOKENS[:8]


def in_state(rig: Rig, state: SequenceState) -> Sequence:
    match state:
        case S.RESERVED:
            sequence = new_sequence(PROMPT, greedy())
            assert rig.reserve(sequence)
        case S.WAITING:
            sequence = rig.add(new_sequence(PROMPT, greedy()))
        case S.RUNNING:
            sequence = rig.add(new_sequence(PROMPT, greedy()))
            rig.step()
        case S.HELD:
            sequence = rig.add(new_sequence(PROMPT, None))
            rig.step()
        case S.FINISHED:
            sequence = new_sequence(PROMPT, greedy(1))
            rig.complete(sequence)
    assert sequence.state is state
    return sequence


@pytest.mark.parametrize("state", list(S))
def test_abort_frees_at_once_and_twice_is_once(state: SequenceState) -> None:
    rig = Rig()
    sequence = in_state(rig, state)
    told = list(rig.output(sequence))
    for _ in range(2):
        rig.engine.abort(sequence)
        rig.check()
        assert sequence.state is S.FINISHED
    assert rig.engine.is_idle
    assert rig.step() == []
    assert rig.output(sequence) == told


@pytest.mark.parametrize("is_prefill", [False, True])
def test_abort_in_a_step_frees_when_the_step_ends(is_prefill: bool) -> None:
    rig = Rig()
    other = rig.add(new_sequence(prompt(6, start=500), greedy()))
    gone = rig.add(new_sequence(PROMPT, None if is_prefill else greedy()))
    rows = rig.begin()
    for _ in range(2):
        rig.engine.abort(gone)
        assert (gone.state, len(gone.block_table)) == (S.RUNNING, 3)
        rig.check()
    rig.end(rows)
    assert (gone.state, len(gone.block_table)) == (S.FINISHED, 0)
    rig.run()
    assert rig.output(gone) == []
    assert gone.sequence_id not in rig.endings
    assert rig.output(other) == solo(tuple(prompt(6, start=500)), greedy())


def test_the_draw_of_an_aborted_sequence_goes_to_nobody_else() -> None:
    rig = Rig()
    gone = rig.add(new_sequence(prompt(6, start=500), greedy()))
    stays = rig.add(new_sequence(PROMPT, greedy()))
    rows = rig.begin()
    rig.engine.abort(gone)
    rig.end(rows)
    rig.run()
    assert rig.output(gone) == []
    assert rig.output(stays) == TOKENS[:8]


def test_blocks_are_announced_as_one_chain_step_by_step() -> None:
    rig = Rig(max_batch_tokens=10)
    sequence = rig.add(new_sequence(prompt(19), greedy(6)))
    rig.run()
    hashes = extend_chain(sequence.cache_root, prompt(19) + rig.output(sequence), BLOCK_SIZE)
    chain = [sequence.cache_root, *hashes]
    # computed: 10, then 19, then one a step: the last token drawn is never computed
    assert rig.engine.pool.take_events() == [
        BlocksStored(
            tenant_id="tenant-a",
            parent_hash=chain[first],
            first_block_index=first,
            block_hashes=b"".join(chain[first + 1 : end + 1]),
        )
        for first, end in ((0, 2), (2, 4), (4, 5), (5, 6))
    ]


def test_a_failed_step_ends_its_sequences_and_no_others() -> None:
    rig = Rig(max_sequences=2)
    failing = [rig.add(new_sequence(prompt(6, start=n), greedy())) for n in (0, 50)]
    waiting = rig.add(new_sequence(PROMPT, greedy()))
    rows = rig.begin()
    rig.engine.abort(failing[1])
    assert rig.engine.fail(rows) == [StepProgress(failing[0], finish_reason="failed")]
    rig.check()
    assert [sequence.state for sequence in failing] == [S.FINISHED] * 2
    rig.run()
    assert rig.output(waiting) == TOKENS[:8]
    assert not rig.engine.pool.match(failing[0].block_hashes), "what failed is not cached"


def test_load_figures() -> None:
    rig = Rig(max_batch_tokens=4)
    rig.add(new_sequence(PROMPT, greedy()))
    assert (rig.engine.num_uncomputed_tokens, rig.engine.num_context_tokens) == (10, 0)
    rig.step()
    assert (rig.engine.num_uncomputed_tokens, rig.engine.num_context_tokens) == (6, 4)
    rig.step()
    rig.step()
    assert (rig.engine.num_uncomputed_tokens, rig.engine.num_context_tokens) == (0, 10)


@pytest.mark.parametrize("state", list(S))
@pytest.mark.parametrize("target", list(S))
def test_only_moves_of_the_diagram(state: SequenceState, target: SequenceState) -> None:
    sequence = new_sequence(PROMPT, greedy())
    sequence.state = state
    if target in TRANSITIONS[state]:
        sequence.transition_to(target)
        assert sequence.state is target
    else:
        with pytest.raises(ValueError, match=f"from {state.value} to {target.value}"):
            sequence.transition_to(target)
