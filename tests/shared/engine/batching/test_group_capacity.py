"""The share of a cache that sequences of hybrid models take: the formula's, not one table's."""

from __future__ import annotations

import pytest

from shared.engine.batching.sequence import Sequence
from shared.kv_layout import Chunk, PagedKv, Reach, Window, group_layers
from tests.support.engine.rig import BLOCK_SIZE, Rig, greedy, new_sequence, prompt
from tests.support.grids import in_short_run

NUM_TOKENS = 2048
# a Scout has 12 full layers and 36 chunked ones; of a gpt-oss every other layer has a window
RATIOS: dict[str, tuple[Reach, ...]] = {
    "scout": tuple(None if layer % 4 == 3 else Chunk(128) for layer in range(48)),
    "gpt-oss": tuple(None if layer % 2 else Window(16) for layer in range(24)),
}
LEAST_GAIN = {"scout": 3.0, "gpt-oss": 1.8}


def reaches_of(name: str) -> tuple[Reach, ...]:
    groups = group_layers([PagedKv(1, 8, "uint8", reach) for reach in RATIOS[name]])
    return tuple(group.state.reach for group in groups)


def decoding(rig: Rig, count: int) -> list[Sequence]:
    """Sequences of NUM_TOKENS, computed one after the other, that all decode."""
    sequences = []
    for index in range(count):
        sequences.append(rig.add(new_sequence(prompt(NUM_TOKENS, start=index * 5000), greedy(150))))
        while sequences[-1].num_uncomputed_tokens > 1:
            rig.step()
    return sequences


@pytest.mark.parametrize("name", RATIOS)
def test_long_sequence_takes_what_the_formula_says(name: str) -> None:
    reaches = reaches_of(name)
    rig = Rig(
        num_blocks=8 * NUM_TOKENS // BLOCK_SIZE,
        max_context_tokens=2 * NUM_TOKENS,
        max_batch_tokens=256,
        reaches=reaches,
    )
    (sequence,) = decoding(rig, 1)
    seen = [
        NUM_TOKENS if reach is None else min(NUM_TOKENS, reach.tokens) for reach in RATIOS[name]
    ]
    layers_per_block = len(RATIOS[name]) // len(reaches)
    for _ in range(20):
        rig.step()
        live = sequence.num_held_blocks * BLOCK_SIZE * layers_per_block
        assert live <= 1.05 * sum(seen)


@pytest.mark.parametrize("name", in_short_run(["gpt-oss"], RATIOS))
def test_more_sequences_fit_than_with_one_table(name: str) -> None:
    """A cache for five sequences of all layers."""
    reaches = reaches_of(name)
    rig = Rig(
        num_blocks=5 * len(reaches) * (NUM_TOKENS + 150) // BLOCK_SIZE,
        max_context_tokens=2 * NUM_TOKENS,
        max_batch_tokens=256,
        max_sequences=16,
        reaches=reaches,
    )
    count = round(5 * LEAST_GAIN[name])
    sequences = decoding(rig, count)
    assert sum(each.num_preemptions for each in sequences) == 0
    assert len(rig.engine.batcher.running) == count
