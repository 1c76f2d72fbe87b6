"""The engine core: request checks, finish reasons, reservations, and aborts in every state."""

from __future__ import annotations

from typing import Any

import pytest

from shared.block_hash import extend_chain
from shared.engine.batching.sequence import TRANSITIONS, Sequence, SequenceState
from shared.engine.engine import StepProgress
from shared.errors import ContextFull, InvalidRequest, StepFailed
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
PROMPT = tuple(prompt(10))
TOKENS = solo(PROMPT, greedy(30))


@pytest.mark.parametrize("max_tokens", [1, 2, 30])
def test_max_tokens_ends_the_sequence(max_tokens: int) -> None:
    rig = Rig()
    sequence = new_sequence(PROMPT, greedy(max_tokens))
    assert rig.complete(sequence) == TOKENS[:max_tokens]
    assert rig.endings[sequence.sequence_id] == StepProgress(
        sequence, (TOKENS[max_tokens - 1],), finish_reason="length"
    )
    assert sequence.state is S.FINISHED


@pytest.mark.parametrize("stop_index", [0, 1, 12])
def test_stop_token_is_reported_but_not_output(stop_index: int) -> None:
    rig = Rig()
    sequence = new_sequence(PROMPT, greedy(30), stop=(5, TOKENS[stop_index]))
    assert rig.complete(sequence) == TOKENS[:stop_index]
    assert rig.endings[sequence.sequence_id] == StepProgress(
        sequence, finish_reason="stop", stop_token_id=TOKENS[stop_index]
    )


def test_without_stop_ids_output_reaches_max_tokens() -> None:
    rig = Rig()
    assert rig.complete(new_sequence(PROMPT, greedy(30), stop=())) == TOKENS


@pytest.mark.parametrize(("min_tokens", "num_output"), [(3, 3), (4, 4), (5, None)])
def test_no_stop_token_is_sampled_before_min_tokens(
    min_tokens: int, num_output: int | None
) -> None:
    """One of two tokens stops, so only the other is sampled before `min_tokens`."""
    rig = Rig(vocab_size=18)
    sequence = new_sequence(PROMPT, greedy(200, min_tokens=min_tokens), stop=(17,))
    tokens = rig.complete(sequence)
    assert len(tokens) >= min_tokens
    assert set(tokens) == {16}
    assert rig.ending(sequence) == "stop"
    assert rig.endings[sequence.sequence_id].stop_token_id == 17


def test_min_tokens_counts_received_tokens() -> None:
    stop = TOKENS[5]
    for min_tokens, is_stopped in ((5, True), (6, False)):
        rig = Rig()
        sampling = greedy(7, min_tokens=min_tokens)
        sequence = new_sequence(PROMPT, sampling, output_ids=TOKENS[:5], stop=(stop,))
        assert (rig.complete(sequence) == []) is is_stopped


def test_context_limit_ends_with_length() -> None:
    rig = Rig(max_context_tokens=14)
    sequence = new_sequence(PROMPT, greedy(30))
    assert rig.complete(sequence) == TOKENS[:4]
    assert rig.ending(sequence) == "length"


def test_end_of_the_pool_is_no_end_of_the_request() -> None:
    """Its 16 tokens of KV give 7 tokens after the prompt of 10: the last needs no KV."""
    rig = Rig(num_blocks=4, max_context_tokens=4096)
    assert rig.engine.max_context_tokens == 16
    for max_tokens, ending in ((7, "length"), (8, "failed")):
        sequence = new_sequence(PROMPT, greedy(max_tokens))
        assert rig.complete(sequence) == TOKENS[:7]
        assert rig.ending(sequence) == ending
    assert isinstance(rig.endings[sequence.sequence_id].error, ContextFull)
    assert rig.engine.is_idle


def longer_than_the_context() -> Sequence:
    return new_sequence(prompt(15), greedy())


def more_hashes_than_blocks() -> Sequence:
    sequence = new_sequence(PROMPT, greedy())
    sequence.block_hashes = [b"x" * 16] * 3
    return sequence


def no_tokens() -> Sequence:
    return new_sequence([], greedy())


def nothing_left_to_sample() -> Sequence:
    return new_sequence(PROMPT, greedy(2), output_ids=TOKENS[:2])


def seed_out_of_uint64() -> Sequence:
    return new_sequence(PROMPT, seeded(seed=-1))


def top_k_beyond_int64() -> Sequence:
    return new_sequence(PROMPT, SamplingParams(seed=0, max_tokens=1, top_k=2**63))


def choice_index_beyond_int64() -> Sequence:
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
def test_rejects_sampling_options_out_of_range(options: dict[str, Any]) -> None:
    rig = Rig(num_blocks=64)
    params = SamplingParams(seed=0, max_tokens=1, **options)
    for submit in (rig.engine.add, rig.engine.reserve):
        with pytest.raises(InvalidRequest):
            submit(new_sequence(PROMPT, params))
    assert rig.engine.is_idle


def test_accepts_sampling_options_at_their_limits() -> None:
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
    "rejected",
    [
        longer_than_the_context,
        more_hashes_than_blocks,
        no_tokens,
        nothing_left_to_sample,
        seed_out_of_uint64,
        top_k_beyond_int64,
        choice_index_beyond_int64,
    ],
)
def test_rejects_sequences_it_can_never_compute(rejected) -> None:  # type: ignore[no-untyped-def]
    rig = Rig(num_blocks=4, max_context_tokens=14)
    for submit in (rig.engine.add, rig.engine.reserve):
        with pytest.raises(InvalidRequest):
            submit(rejected())
    rig.check()
    assert rig.engine.is_idle


def test_callers_lists_are_not_changed() -> None:
    """The choices of one request may share one list of tokens and one of hashes."""
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


def test_reservations_are_limited_to_their_share() -> None:
    rig = Rig(num_blocks=16)
    first, second, third = (new_sequence(prompt(16, start=n), greedy()) for n in (0, 50, 90))
    assert rig.reserve(first)
    assert rig.reserve(second)
    assert rig.engine.num_reserved_blocks == 8
    assert not rig.reserve(third)
    assert not third.block_tables
    rig.engine.abort(first)
    assert rig.reserve(third)
    rig.check()


def test_single_reservation_may_exceed_the_share() -> None:
    rig = Rig(num_blocks=16)
    assert rig.reserve(new_sequence(prompt(50), greedy()))
    assert not rig.reserve(new_sequence(prompt(4), greedy()))


def test_reservation_fails_without_free_blocks() -> None:
    rig = Rig(num_blocks=8)
    rig.add(new_sequence(prompt(24), greedy()))
    rig.step()
    rejected = new_sequence(prompt(12, start=500), greedy())
    assert not rig.reserve(rejected)
    assert not rejected.block_tables
    rig.check()


def test_activation_leaves_a_token_to_compute() -> None:
    rig = Rig()
    sequence = new_sequence(PROMPT, greedy())
    assert rig.reserve(sequence)
    with pytest.raises(ValueError, match="10 of 10 tokens"):
        rig.engine.activate(sequence, 10)
    rig.receive_kv(sequence, pushed_kv(PROMPT, 0, 9), 9)
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
def test_abort_releases_at_once_and_is_idempotent(state: SequenceState) -> None:
    rig = Rig()
    sequence = in_state(rig, state)
    output_before = list(rig.output(sequence))
    for _ in range(2):
        rig.engine.abort(sequence)
        rig.check()
        assert sequence.state is S.FINISHED
    assert rig.engine.is_idle
    assert rig.step() == []
    assert rig.output(sequence) == output_before


@pytest.mark.parametrize("is_prefill", [False, True])
def test_abort_during_a_step_releases_when_it_ends(is_prefill: bool) -> None:
    rig = Rig()
    other = rig.add(new_sequence(prompt(6, start=500), greedy()))
    aborted = rig.add(new_sequence(PROMPT, None if is_prefill else greedy()))
    rows = rig.begin()
    for _ in range(2):
        rig.engine.abort(aborted)
        assert (aborted.state, aborted.num_held_blocks) == (S.RUNNING, 3)
        rig.check()
    rig.end(rows)
    assert (aborted.state, aborted.num_held_blocks) == (S.FINISHED, 0)
    rig.run()
    assert rig.output(aborted) == []
    assert aborted.sequence_id not in rig.endings
    assert rig.output(other) == solo(tuple(prompt(6, start=500)), greedy())


def test_token_sampled_for_aborted_sequence_is_dropped() -> None:
    rig = Rig()
    aborted = rig.add(new_sequence(prompt(6, start=500), greedy()))
    remaining = rig.add(new_sequence(PROMPT, greedy()))
    rows = rig.begin()
    rig.engine.abort(aborted)
    rig.end(rows)
    rig.run()
    assert rig.output(aborted) == []
    assert rig.output(remaining) == TOKENS[:8]


def test_blocks_are_announced_as_one_chain() -> None:
    rig = Rig(max_batch_tokens=10)
    sequence = rig.add(new_sequence(prompt(19), greedy(6)))
    rig.run()
    hashes = extend_chain(sequence.cache_root, prompt(19) + rig.output(sequence), BLOCK_SIZE)
    chain = [sequence.cache_root, *hashes]
    # computed: 10, then 19, then one a step; the last sampled token is never computed
    assert rig.engine.pool.take_events() == [
        BlocksStored(
            tenant_id="tenant-a",
            parent_hash=chain[first],
            first_block_index=first,
            block_hashes=b"".join(chain[first + 1 : end + 1]),
        )
        for first, end in ((0, 2), (2, 4), (4, 5), (5, 6))
    ]


def test_failed_step_ends_only_its_own_sequences() -> None:
    rig = Rig(max_sequences=2)
    failing = [rig.add(new_sequence(prompt(6, start=n), greedy())) for n in (0, 50)]
    waiting = rig.add(new_sequence(PROMPT, greedy()))
    rows = rig.begin()
    rig.engine.abort(failing[1])
    error = StepFailed("the device says no")
    expected = StepProgress(failing[0], finish_reason="failed", error=error)
    assert rig.engine.fail(rows, error) == [expected]
    rig.check()
    assert [sequence.state for sequence in failing] == [S.FINISHED] * 2
    rig.run()
    assert rig.output(waiting) == TOKENS[:8]
    assert not rig.engine.pool.match(failing[0].block_hashes).num_blocks, (
        "blocks of a failed step are not cached"
    )


def test_load_counts_uncomputed_and_context_tokens() -> None:
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
def test_only_transitions_of_the_diagram_are_allowed(
    state: SequenceState, target: SequenceState
) -> None:
    sequence = new_sequence(PROMPT, greedy())
    sequence.state = state
    if target in TRANSITIONS[state]:
        sequence.transition_to(target)
        assert sequence.state is target
    else:
        with pytest.raises(ValueError, match=f"from {state.value} to {target.value}"):
            sequence.transition_to(target)
