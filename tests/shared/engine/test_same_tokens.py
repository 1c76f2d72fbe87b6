"""The same tokens by every path: local, cached, pushed, resumed, preempted, in any chunks."""

from __future__ import annotations

import pytest

from shared.engine.batching.sequence import SequenceState
from shared.messages import SamplingParams
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

PROMPT = prompt(45)
EACH_SAMPLING = pytest.mark.parametrize(
    "sampling", [greedy(20), seeded(20)], ids=["greedy", "seeded"]
)


@EACH_SAMPLING
@pytest.mark.parametrize("budget", [1, 7, 64, 4096])
def test_chunk_budget_changes_no_token(budget: int, sampling: SamplingParams) -> None:
    rig = Rig(max_batch_tokens=budget)
    assert rig.complete(new_sequence(PROMPT, sampling)) == solo(tuple(PROMPT), sampling)


@EACH_SAMPLING
@pytest.mark.parametrize("num_tokens", [1, 3, 4, 5, 44, 45])
def test_pushed_kv_changes_no_token(num_tokens: int, sampling: SamplingParams) -> None:
    ids = prompt(num_tokens)
    rig = Rig()
    sequence = new_sequence(ids, sampling)
    assert rig.reserve(sequence)
    payload = pushed_kv(ids, 0, num_tokens - 1) if num_tokens > 1 else b""
    rig.receive_kv(sequence, payload, num_tokens - 1)
    rig.run()
    assert rig.output(sequence) == solo(tuple(ids), sampling)
    assert rig.num_computed_tokens == 1 + 19  # the last prompt token, all outputs but the last


@EACH_SAMPLING
@pytest.mark.parametrize("num_pushed", [20, 21, 44])
def test_push_after_cached_prefix_changes_no_token(
    num_pushed: int, sampling: SamplingParams
) -> None:
    rig = Rig()
    rig.complete(new_sequence([*PROMPT[:16], 7], greedy(1)))
    sequence = new_sequence(PROMPT, sampling)
    assert rig.reserve(sequence)
    assert sequence.num_cached_tokens == sequence.num_computed_tokens == 16
    before = rig.num_computed_tokens
    rig.receive_kv(sequence, pushed_kv(PROMPT, 16, num_pushed - 16), num_pushed)
    rig.run()
    assert rig.num_computed_tokens - before == 45 - num_pushed + 19
    assert rig.output(sequence) == solo(tuple(PROMPT), sampling)


@EACH_SAMPLING
def test_pushed_prefix_is_cached_for_next_request(sampling: SamplingParams) -> None:
    rig = Rig()
    first = new_sequence(PROMPT, sampling)
    assert rig.reserve(first)
    rig.receive_kv(first, pushed_kv(PROMPT, 0, 44), 44)
    rig.run()
    before = rig.num_computed_tokens
    assert rig.complete(new_sequence(PROMPT, sampling)) == solo(tuple(PROMPT), sampling)
    assert rig.num_computed_tokens - before == 1 + 19


@EACH_SAMPLING
@pytest.mark.parametrize("num_received", [1, 7, 19])
def test_resuming_changes_no_token(num_received: int, sampling: SamplingParams) -> None:
    expected = solo(tuple(PROMPT), sampling)
    for rig in (Rig(), Rig(max_batch_tokens=7)):
        resumed = new_sequence(PROMPT, sampling, output_ids=expected[:num_received])
        assert rig.complete(resumed) == expected[num_received:]
        assert rig.ending(resumed) == "length"


@EACH_SAMPLING
def test_preemption_changes_no_token(sampling: SamplingParams) -> None:
    rig = Rig(num_blocks=12, max_batch_tokens=16)
    sequences = [rig.add(new_sequence(prompt(9, start=n * 50), sampling)) for n in range(4)]
    rig.run()
    assert sum(sequence.num_preemptions for sequence in sequences) > 0
    for n, sequence in enumerate(sequences):
        assert rig.output(sequence) == solo(tuple(prompt(9, start=n * 50)), sampling)


@EACH_SAMPLING
def test_batch_of_32_changes_no_token(sampling: SamplingParams) -> None:
    rig = Rig(num_blocks=512, max_sequences=32)
    prompts = [prompt(3 + 5 * n % 41, start=n // 4 * 100) for n in range(32)]
    sequences = [rig.add(new_sequence(ids, sampling)) for ids in prompts]
    rig.run()
    for ids, sequence in zip(prompts, sequences, strict=True):
        assert rig.output(sequence) == solo(tuple(ids), sampling)


def test_choices_of_one_prompt_are_sampled_separately() -> None:
    rig = Rig()
    first = new_sequence(PROMPT, seeded())
    second = new_sequence(PROMPT, seeded(), choice_index=1)
    rig.add(first)
    rig.step()
    rig.add(second)
    rig.run()
    assert rig.output(first) == solo(tuple(PROMPT), seeded())
    assert rig.output(second) == solo(tuple(PROMPT), seeded(), choice_index=1)
    assert second.num_cached_tokens == 44


@pytest.mark.parametrize(
    ("num_shared", "num_rest", "num_cached"),
    [(40, 5, 40), (42, 5, 40), (44, 1, 44), (3, 9, 0)],
)
def test_request_with_cached_prefix_computes_only_the_rest(
    num_shared: int, num_rest: int, num_cached: int
) -> None:
    rig = Rig()
    shared = prompt(num_shared)
    rig.complete(new_sequence([*shared, *prompt(6, start=500)], greedy(1)))
    before = rig.num_computed_tokens
    ids = [*shared, *prompt(num_rest, start=700)]
    second = new_sequence(ids, greedy(1))
    assert rig.complete(second) == solo(tuple(ids), greedy(1))
    assert rig.num_computed_tokens - before == len(ids) - num_cached
    assert second.num_cached_tokens == num_cached


def test_next_turn_hits_the_cached_answer() -> None:
    rig = Rig()
    answer = rig.complete(new_sequence(PROMPT, greedy(20)))
    before = rig.num_computed_tokens
    ids = [*PROMPT, *answer, 7, 8, 9]
    assert rig.complete(new_sequence(ids, greedy(1))) == solo(tuple(ids), greedy(1))
    # the first turn computed 45 + 19 tokens: 16 full blocks
    assert rig.num_computed_tokens - before == 68 - 16 * BLOCK_SIZE


def test_other_tenant_gets_no_cache_hit() -> None:
    rig = Rig()
    rig.complete(new_sequence(PROMPT, greedy(1), tenant_id="tenant-a"))
    before = rig.num_computed_tokens
    other = new_sequence(PROMPT, greedy(1), tenant_id="tenant-b")
    assert rig.complete(other) == solo(tuple(PROMPT), greedy(1))
    assert rig.num_computed_tokens - before == len(PROMPT)
    assert other.num_cached_tokens == 0
    tenants = [block.tenant_id for block in rig.engine.pool.cached_blocks()]
    assert tenants == ["tenant-a"] * 11 + ["tenant-b"] * 11


def test_evicted_prefix_is_computed_again() -> None:
    rig = Rig(num_blocks=14, max_batch_tokens=64)
    rig.complete(new_sequence(PROMPT, greedy(4)))
    rig.complete(new_sequence(prompt(20, start=900), greedy(1)))
    again = new_sequence(PROMPT, greedy(4))
    assert rig.complete(again) == solo(tuple(PROMPT), greedy(4))
    assert 0 < again.num_cached_tokens < 44


@pytest.mark.parametrize("damage", ["flipped", "stale", "moved", "foreign"])
def test_wrong_kv_changes_the_tokens(damage: str) -> None:
    rig = Rig()
    sequence = new_sequence(PROMPT, greedy())
    assert rig.reserve(sequence)
    payload = pushed_kv(PROMPT, 0, 44)
    match damage:
        case "flipped":
            payload[-1] ^= 1
        case "stale":
            payload = bytearray(len(payload))
        case "moved":
            payload = payload[8:] + payload[:8]
        case "foreign":
            payload = pushed_kv(prompt(44, start=500), 0, 44)
    rig.receive_kv(sequence, payload, 44)
    rig.run()
    assert rig.output(sequence) != solo(tuple(PROMPT), greedy())


def test_prefill_holds_its_blocks_until_released() -> None:
    rig = Rig(max_batch_tokens=16)
    prefill = rig.add(new_sequence(PROMPT[:44], None))
    states = []
    for _ in range(3):
        rig.step()
        states.append((prefill.state, prefill.num_computed_tokens))
    running, held = SequenceState.RUNNING, SequenceState.HELD
    assert states == [(running, 16), (running, 32), (held, 44)]
    assert rig.output(prefill) == []
    assert rig.read_kv(prefill, 0, 44) == pushed_kv(PROMPT[:44], 0, 44)
    rig.engine.release(prefill)
    rig.check()
    assert rig.engine.is_idle
    found = rig.add(new_sequence(PROMPT[:44], None))
    assert rig.step() == []
    assert (found.state, found.num_cached_tokens) == (held, 44)
    assert rig.read_kv(found, 0, 44) == pushed_kv(PROMPT[:44], 0, 44)
