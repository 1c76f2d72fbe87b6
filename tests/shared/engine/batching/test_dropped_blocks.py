"""Blocks that no later token sees are released while their sequence runs, group by group."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
import torch

from shared.engine.batching.sequence import Sequence, SequenceState
from shared.kv_layout import Chunk, Window, first_sent
from tests.support.engine.checkpoints import write_model
from tests.support.engine.model_worker import Worker
from tests.support.engine.rig import (
    BLOCK_SIZE,
    Rig,
    greedy,
    new_sequence,
    prompt,
    seeded,
    solo,
)
from tests.support.grids import in_short_run

SPAN = 2 * BLOCK_SIZE + 1
WINDOW = 21


def run_to_end(rig: Rig, sequence: Sequence) -> int:
    """Returns the most blocks that the sequence held after its prompt was computed."""
    most = 0
    while sequence.state is not SequenceState.FINISHED:
        rig.step()
        if sequence.num_output_tokens:
            most = max(most, sequence.num_held_blocks)
    return most


@pytest.mark.parametrize("budget", [5, 64])
def test_long_output_holds_only_blocks_in_the_span(budget: int) -> None:
    rig = Rig(reaches=(Window(SPAN),), max_batch_tokens=budget)
    sequence = rig.add(new_sequence(prompt(30), greedy(60)))
    # of four tokens each: SPAN reaches into three, and each step may write one more
    assert run_to_end(rig, sequence) <= -(-(SPAN + budget) // BLOCK_SIZE) + 1
    assert rig.output(sequence) == solo(tuple(prompt(30)), greedy(60))


def test_dropped_blocks_make_room_for_other_sequences() -> None:
    rig = Rig(num_blocks=20, reaches=(Window(SPAN),))
    sequences = [rig.add(new_sequence(prompt(30, start=n), greedy(40))) for n in (100, 200, 300)]
    rig.run()
    assert all(each.num_preemptions == 0 for each in sequences)
    for start, each in zip((100, 200, 300), sequences, strict=True):
        assert rig.output(each) == solo(tuple(prompt(30, start=start)), greedy(40))


def test_cached_prefix_is_found_beyond_the_span() -> None:
    rig = Rig(reaches=(Window(SPAN),))
    rig.complete(new_sequence(prompt(41), greedy(30)))
    again = new_sequence(prompt(41), greedy(30))
    assert rig.complete(again) == solo(tuple(prompt(41)), greedy(30))
    assert again.num_cached_tokens == 40


def test_preempted_sequence_resumes_from_cached_blocks() -> None:
    rig = Rig(reaches=(Window(SPAN),))
    sequence = rig.add(new_sequence(prompt(30), seeded(40)))
    for _ in range(20):
        rig.step()
    assert sequence.first_blocks == [10]
    rig.engine.batcher.preempt(sequence)
    before = rig.num_computed_tokens
    rig.run()
    assert rig.output(sequence) == solo(tuple(prompt(30)), seeded(40))
    assert rig.num_computed_tokens - before == 2 + 19  # 48 were cached


def test_prefill_holds_what_is_sent_of_it() -> None:
    rig = Rig(reaches=(Window(SPAN),), max_batch_tokens=5)
    sequence = rig.add(new_sequence(prompt(30), None))
    rig.run()
    first = first_sent(Window(SPAN), 30, BLOCK_SIZE) // BLOCK_SIZE
    assert (sequence.state, sequence.first_blocks) == (SequenceState.HELD, [first])
    children = [new_sequence(prompt(31), seeded(40), choice_index=index) for index in range(2)]
    for index, child in enumerate(rig.fork(sequence, children)):
        rig.run()
        assert rig.output(child) == solo(tuple(prompt(31)), seeded(40), (), index)


def test_full_groups_keep_what_bounded_ones_drop() -> None:
    rig = Rig(reaches=(None, Window(SPAN), Chunk(16)))
    sequence = rig.add(new_sequence(prompt(30), greedy(30)))
    for _ in range(25):
        rig.step()
    num_computed = sequence.num_computed_tokens
    assert num_computed == 54
    assert sequence.first_blocks == [0, (54 - SPAN + 1) // BLOCK_SIZE, 48 // BLOCK_SIZE]
    assert [len(table) for table in sequence.block_tables] == [14, 14, 14]


# ── with a model ─────────────────────────────────────────────────────────────────────────────────


def tokens(seed: int, count: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, 199, (count,), generator=generator).tolist()


@pytest.mark.parametrize(
    ("architecture", "num_blocks", "dtype"),
    in_short_run(
        [("MistralForCausalLM", 60, "float32"), ("Gemma2ForCausalLM", 80, "bfloat16")],
        [
            (*model, dtype)  # every other layer of Gemma is full
            for model in (("MistralForCausalLM", 60), ("Gemma2ForCausalLM", 80))
            for dtype in ("bfloat16", "float32")
        ],
    ),
)
def test_model_reads_no_dropped_block(
    tmp_path: Path, architecture: str, num_blocks: int, dtype: str
) -> None:
    """Every unreferenced block is set to NaN before each step."""
    write_model(tmp_path, architecture, sliding_window=WINDOW, head_dim=32)
    prompts = [tokens(1, 620), tokens(2, 700)]

    async def main() -> None:
        roomy, crowded = (
            Worker(tmp_path, dtype, num_blocks=n, budget=256) for n in (256, num_blocks)
        )
        alone = [await roomy.run(new_sequence(ids, greedy(60))) for ids in prompts]
        together = [new_sequence(ids, greedy(60), tenant_id="other") for ids in prompts]
        for each in together:
            crowded.engine.add(each)
        while crowded.engine.batcher.waiting or crowded.engine.batcher.running:
            await poisoned_step(crowded)
        assert [crowded.tokens[each.sequence_id] for each in together] == alone
        assert all(each.num_preemptions == 0 for each in together)
        for worker in (roomy, crowded):
            await worker.executor.close()

    asyncio.run(main())


async def poisoned_step(worker: Worker) -> None:
    engine = worker.engine
    rows, _ = engine.schedule()
    free = [n for n in range(engine.pool.num_blocks) if engine.pool.ref_count(n) == 0]
    worker.executor.computer.kv_cache[:, :, free] = float("nan")
    output = await worker.executor.result(worker.executor.submit(rows))
    for each in engine.apply(rows, output):
        worker.tokens[each.sequence.sequence_id] += each.token_ids
