"""Blocks before the window of every layer are released while their sequence runs."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
import torch

from shared.engine.batching.sequence import Sequence, SequenceState
from shared.engine.inputs import build_inputs
from shared.engine.runners.load import load_runner
from tests.shared.engine.support.checkpoints import write_model
from tests.shared.engine.support.model_worker import Worker
from tests.shared.engine.support.rig import (
    BLOCK_SIZE,
    Rig,
    greedy,
    new_sequence,
    prompt,
    seeded,
    solo,
)

SPAN = 2 * BLOCK_SIZE + 1
WINDOW = 21


def run_to_end(rig: Rig, sequence: Sequence) -> int:
    """Returns the most blocks that the sequence held after its prompt was computed."""
    most = 0
    while sequence.state is not SequenceState.FINISHED:
        rig.step()
        if sequence.num_output_tokens:
            most = max(most, len(sequence.held_blocks))
    return most


@pytest.mark.parametrize("budget", [5, 64])
def test_long_output_holds_only_blocks_in_the_span(budget: int) -> None:
    rig = Rig(attention_span=SPAN, max_batch_tokens=budget)
    sequence = rig.add(new_sequence(prompt(30), greedy(60)))
    assert run_to_end(rig, sequence) == 3  # of four tokens each
    assert rig.output(sequence) == solo(tuple(prompt(30)), greedy(60))


def test_dropped_blocks_make_room_for_other_sequences() -> None:
    rig = Rig(num_blocks=20, attention_span=SPAN)
    sequences = [rig.add(new_sequence(prompt(30, start=n), greedy(40))) for n in (100, 200, 300)]
    rig.run()
    assert all(each.num_preemptions == 0 for each in sequences)
    for start, each in zip((100, 200, 300), sequences, strict=True):
        assert rig.output(each) == solo(tuple(prompt(30, start=start)), greedy(40))


def test_cached_prefix_is_found_beyond_the_span() -> None:
    rig = Rig(attention_span=SPAN)
    rig.complete(new_sequence(prompt(41), greedy(30)))
    again = new_sequence(prompt(41), greedy(30))
    assert rig.complete(again) == solo(tuple(prompt(41)), greedy(30))
    assert again.num_cached_tokens == 40


@pytest.mark.parametrize("num_taken", [0, 1, 7, 15])
def test_dropped_and_held_blocks_are_evicted_tail_first(num_taken: int) -> None:
    """The sequence dropped its first blocks first."""
    rig = Rig(num_blocks=16, attention_span=SPAN)
    sequence = rig.add(new_sequence(prompt(30), greedy(32)))
    hashes = sequence.block_hashes
    run_to_end(rig, sequence)
    pool = rig.engine.pool
    num_cached = pool.num_cached_blocks
    assert num_cached == 15  # of 61 computed tokens
    num_empty = pool.num_free_blocks - num_cached
    pool.release(pool.allocate(num_empty + num_taken))
    assert len(pool.match(hashes)) == num_cached - num_taken


def test_preempted_sequence_resumes_from_cached_blocks() -> None:
    rig = Rig(attention_span=SPAN)
    sequence = rig.add(new_sequence(prompt(30), seeded(40)))
    for _ in range(20):
        rig.step()
    assert sequence.num_dropped_blocks == 10
    rig.engine.batcher.preempt(sequence)
    before = rig.num_computed_tokens
    rig.run()
    assert rig.output(sequence) == solo(tuple(prompt(30)), seeded(40))
    assert rig.num_computed_tokens - before == 2 + 19  # 48 were cached


def test_prefill_drops_no_blocks() -> None:
    rig = Rig(attention_span=SPAN, max_batch_tokens=5)
    sequence = rig.add(new_sequence(prompt(30), None))
    rig.run()
    assert (sequence.state, len(sequence.held_blocks)) == (SequenceState.HELD, 8)
    children = [new_sequence(prompt(31), seeded(40), choice_index=index) for index in range(2)]
    for index, child in enumerate(rig.fork(sequence, children)):
        rig.run()
        assert rig.output(child) == solo(tuple(prompt(31)), seeded(40), (), index)


# ── with a model ─────────────────────────────────────────────────────────────────────────────────


def tokens(seed: int, count: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, 199, (count,), generator=generator).tolist()


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_model_reads_no_dropped_block(tmp_path: Path, dtype: str) -> None:
    """Every unreferenced block is set to NaN before each step."""
    write_model(tmp_path, "MistralForCausalLM", sliding_window=WINDOW, head_dim=32)
    prompts = [tokens(1, 620), tokens(2, 700)]

    async def main() -> None:
        roomy, crowded = (Worker(tmp_path, dtype, num_blocks=n, budget=256) for n in (128, 88))
        alone = [await roomy.run(new_sequence(ids, greedy(200))) for ids in prompts]
        together = [new_sequence(ids, greedy(200), tenant_id="other") for ids in prompts]
        for each in together:
            crowded.engine.add(each)
        while crowded.engine.batcher.waiting or crowded.engine.batcher.running:
            await poisoned_step(crowded)
        assert [crowded.tokens[each.sequence_id] for each in together] == alone
        assert all(each.num_preemptions == 0 for each in together)
        for worker in (roomy, crowded):
            await worker.runner.close()

    asyncio.run(main())


async def poisoned_step(worker: Worker) -> None:
    engine = worker.engine
    rows, _ = engine.schedule()
    free = [n for n in range(engine.pool.num_blocks) if engine.pool.ref_count(n) == 0]
    worker.runner.executor.kv_cache[:, :, free] = float("nan")
    for each in engine.apply(rows, await worker.runner.run(build_inputs(rows, 16))):
        worker.tokens[each.sequence.sequence_id] += each.token_ids


@pytest.mark.parametrize(
    ("architecture", "options", "attention_span"),
    [
        ("LlamaForCausalLM", {}, None),
        ("MistralForCausalLM", {"sliding_window": WINDOW}, WINDOW + 511),
        ("Gemma2ForCausalLM", {"sliding_window": WINDOW}, None),  # every other layer is full
    ],
)
def test_attention_span_follows_the_windows(
    tmp_path: Path, architecture: str, options: dict[str, int], attention_span: int | None
) -> None:
    write_model(tmp_path, architecture, **options)
    runner = load_runner(tmp_path, dtype="float32", kv_cache_bytes=4 << 20)
    assert runner.attention_span == attention_span
