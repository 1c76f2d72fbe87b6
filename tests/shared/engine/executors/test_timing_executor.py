"""The timing executor: tokens depend on the KV, and the time of a step on its work."""

from __future__ import annotations

import math

import msgspec
import numpy as np
import pytest
from structlog.testing import capture_logs

from shared.engine.executors.timing_executor import FIRST_TOKEN_ID, StepCost, TimingExecutor
from shared.engine.step import KvRun, StepInputs, StepOutput
from shared.messages import LogprobsMode, SamplingParams
from tests.support.engine.rig import (
    BLOCK_SIZE,
    Rig,
    greedy,
    new_sequence,
    prefilled,
    prompt,
    pushed_kv,
    seeded,
    solo,
)
from tests.support.world.clock import VirtualClock, run


def test_tokens_are_a_function_of_the_prompt() -> None:
    tokens = solo(tuple(prompt(10)), greedy(20))
    assert tokens == Rig().complete(new_sequence(prompt(10), greedy(20)))
    assert len(tokens) == 20
    assert len(set(tokens)) > 10
    for other in (prompt(9), prompt(10, start=101), [*prompt(9), 7], [7, *prompt(10)[1:]]):
        assert solo(tuple(other), greedy(20)) != tokens


@pytest.mark.parametrize("vocab_size", [17, 20, 32_000])
def test_tokens_are_in_the_vocabulary_and_never_special(vocab_size: int) -> None:
    tokens = solo(tuple(range(10)), greedy(100), vocab_size=vocab_size)
    assert all(FIRST_TOKEN_ID <= token_id < vocab_size for token_id in tokens)


def test_seed_and_choice_change_all_but_greedy_tokens() -> None:
    ids = tuple(prompt(10))
    assert solo(ids, seeded(seed=1)) != solo(ids, seeded(seed=2))
    assert solo(ids, seeded()) != solo(ids, seeded(), choice_index=1)
    assert solo(ids, greedy()) != solo(ids, seeded())
    cold = [SamplingParams(seed=seed, max_tokens=8, temperature=0.0) for seed in (1, 2)]
    assert solo(ids, cold[0]) == solo(ids, cold[1], choice_index=3)
    assert solo(ids, seeded(seed=2**64 - 1)) != solo(ids, seeded(seed=0))


def test_banned_token_is_not_sampled() -> None:
    params = SamplingParams(seed=0, max_tokens=60, temperature=0.0, min_tokens=40)
    stop = (17, 18, 19)
    tokens = solo(tuple(prompt(5)), params, stop, vocab_size=20)
    assert tokens[:40] == [16] * 40
    free = solo(tuple(prompt(5)), greedy(60), vocab_size=20)
    assert set(free) == {16, *stop}


def test_ban_does_not_change_other_tokens() -> None:
    ids, params = tuple(prompt(5)), SamplingParams(seed=0, max_tokens=20, temperature=0.0)
    banning = SamplingParams(seed=0, max_tokens=20, temperature=0.0, min_tokens=20)
    absent = next(each for each in range(16, 1000) if each not in solo(ids, params))
    assert solo(ids, banning, (absent,)) == solo(ids, params)


@pytest.mark.parametrize("mode", ["raw", "processed"])
def test_logprobs_match_the_formulas_distribution(mode: LogprobsMode) -> None:
    cold = SamplingParams(seed=0, max_tokens=9, temperature=0.0, num_logprobs=3)
    rig = Rig()
    sequence = rig.add(new_sequence(prompt(9), msgspec.structs.replace(cold, logprobs_mode=mode)))
    rig.run()
    for token_id, reported in zip(
        rig.output(sequence), rig.logprobs[sequence.sequence_id], strict=True
    ):
        assert reported.top_token_ids[0] == token_id
        assert reported.logprob == reported.top_logprobs[0]
        assert [math.exp(each) for each in reported.top_logprobs] == pytest.approx(
            [1 / 2, 1 / 4, 1 / 8]
        )


def test_only_processed_logprobs_include_the_noise() -> None:
    for mode, is_top in (("raw", False), ("processed", True)):
        warm = SamplingParams(
            seed=3, max_tokens=9, num_logprobs=1, logprobs_mode=mode, presence_penalty=1.0
        )
        rig = Rig()
        sequence = rig.add(new_sequence(prompt(9), warm))
        rig.run()
        reported = rig.logprobs[sequence.sequence_id]
        tops = [each.top_token_ids[0] for each in reported]
        assert (tops == rig.output(sequence)) is is_top


def test_step_succeeds_with_every_token_banned() -> None:
    params = SamplingParams(
        seed=0, max_tokens=3, temperature=0.0, bad_words=tuple((n,) for n in range(20))
    )
    assert len(Rig(vocab_size=20).complete(new_sequence(prompt(5), params))) == 3


@pytest.mark.parametrize("position", [0, 3, 4, 10, 11])
def test_tokens_depend_on_the_last_kv_only(position: int) -> None:
    """The next KV is a digest of the last one, which is a digest of the KV before it."""
    ids = prompt(13)
    rig = Rig()
    sequence = new_sequence(ids, greedy())
    assert rig.reserve(sequence)
    payload = pushed_kv(ids, 0, 12)
    payload[position * 8] ^= 1
    rig.receive_kv(sequence, payload, 12)
    rig.run()
    is_last = position == 11
    assert (rig.output(sequence) != solo(tuple(ids), greedy())) is is_last


def test_kv_is_read_in_parts_in_wire_layout() -> None:
    rig, sequence = prefilled(tuple(prompt(13)))
    full = np.frombuffer(pushed_kv(prompt(13), 0, 13), dtype=np.uint8).reshape(2, 13, 8)
    for first, count in ((0, 1), (2, 5), (4, 4), (11, 2)):
        part = np.frombuffer(rig.read_kv(sequence, first, count), dtype=np.uint8)
        assert part.reshape(2, count, 8).tolist() == full[:, first : first + count].tolist()
    assert len({row.tobytes() for half in full for row in half}) == 26


def test_kv_of_wrong_size_is_rejected() -> None:
    rig, sequence = prefilled(tuple(prompt(13)))
    wrong = bytearray(rig.executor.kv_layout.bytes_per_token * 3)
    with pytest.raises(ValueError):
        rig.executor.read_kv(KvRun(sequence.block_tables[0], 0, 4), memoryview(wrong)).send(None)
    with pytest.raises(ValueError):
        rig.executor.write_kv(KvRun(sequence.block_tables[0], 0, 4), memoryview(wrong)).send(None)


def test_step_takes_the_time_of_the_cost_model() -> None:
    cost = StepCost(base_s=1.0, per_token_s=0.1, per_context_token_s=0.01)

    async def scenario() -> None:
        clock = VirtualClock()
        executor = TimingExecutor(clock, num_blocks=8, block_size=BLOCK_SIZE, cost=cost)
        rig = Rig(max_batch_tokens=8)
        rig.add(new_sequence(prompt(12), greedy()))
        for expected_s in (1.0 + 0.8 + 0.08, 1.0 + 0.4 + 0.12, 1.0 + 0.1 + 0.13):
            rows = rig.begin()
            before = clock.now()
            sampled = await executor.result(executor.submit(rows))
            assert clock.now() - before == pytest.approx(expected_s)
            assert executor.step_budget_s > expected_s
            rig.engine.apply(rows, sampled)

    run(scenario())


def test_failure_of_a_step_that_runs_ahead_is_its_callers_alone() -> None:
    class Failing(TimingExecutor):
        async def run(self, inputs: StepInputs) -> StepOutput:
            raise RuntimeError("the device says no")

    async def scenario() -> None:
        executor = Failing(VirtualClock(), num_blocks=8, block_size=BLOCK_SIZE, depth=2)
        rig = Rig(max_batch_tokens=8)
        rig.add(new_sequence(prompt(5), greedy()))
        step = executor.submit(rig.begin())
        with pytest.raises(RuntimeError, match="the device says no"):
            await executor.result(step)

    with capture_logs() as logs:
        run(scenario())
    assert logs == []
