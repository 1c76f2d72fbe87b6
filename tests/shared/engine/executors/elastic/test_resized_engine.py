"""The engine under random operations while the size of its KV cache changes, also to nothing.

What a block held is overwritten when its memory is given back. Tokens equal those of runs alone.
"""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, precondition, rule

from shared.engine.batching.sequence import SequenceState
from shared.engine.engine import Engine
from shared.errors import ConfigError, InvalidRequest
from shared.kv_layout import Reach, Window
from tests.shared.engine.test_engine_operations import (
    NUM_BLOCKS,
    REACHES,
    VOCAB_SIZE,
    EngineMachine,
)
from tests.support.engine.rig import Rig, greedy, new_sequence, prompt, solo

GARBAGE = 0xEE


def resize(rig: Rig, num_blocks: int) -> None:
    rig.engine.resize(num_blocks)
    give_back(rig)


def give_back(rig: Rig) -> None:
    """As an allocator that gives the memory to another process, whose bytes come back."""
    retired = rig.engine.pool.take_retired()
    rig.executor._kv.reshape(rig.executor.max_blocks, -1)[retired] = GARBAGE


class ResizedEngineMachine(EngineMachine):
    @initialize(
        budget=st.sampled_from([1, 5, 64]),
        num_sequences=st.sampled_from([1, 2, 5]),
        reaches=st.sampled_from(REACHES),
    )
    def start(self, budget: int, num_sequences: int, reaches: tuple[Reach, ...]) -> None:
        self.most = 2 * NUM_BLOCKS * len(reaches)

        def rig_type(*, num_blocks: int, **options: object) -> Rig:
            rig = Rig(num_blocks=num_blocks, max_blocks=self.most, **options)  # type: ignore[arg-type]
            resize(rig, self.most)
            return rig

        self.rig_type = rig_type  # type: ignore[assignment]
        super().start(budget, num_sequences, reaches)

    @precondition(lambda self: hasattr(self, "rig"))
    @rule(data=st.data())
    def resize(self, data: st.DataObject) -> None:
        least = self.rig.engine.num_least_blocks
        resize(self.rig, data.draw(st.integers(least, self.most)))

    @precondition(lambda self: hasattr(self, "rig"))
    @rule()
    def give_back(self) -> None:
        give_back(self.rig)

    @precondition(lambda self: hasattr(self, "rig") and self.rig.engine.is_idle)
    @rule(data=st.data())
    def park_and_wake(self, data: st.DataObject) -> None:
        resize(self.rig, 0)
        assert self.rig.engine.pool.num_free_blocks == 0
        self.resize(data)


TestResizedEngineMachine = ResizedEngineMachine.TestCase
TestResizedEngineMachine.settings = settings(max_examples=40, stateful_step_count=40, deadline=None)


def test_running_sequences_keep_their_tokens_while_the_cache_shrinks_and_grows() -> None:
    rig = Rig(num_blocks=16, max_blocks=64, max_context_tokens=64, vocab_size=VOCAB_SIZE)
    resize(rig, 64)
    prompts = [prompt(20, start=100 + 50 * index) for index in range(4)]
    sequences = [rig.add(new_sequence(each, greedy(24))) for each in prompts]
    for num_blocks in (64, 16, 40, 20, 64, 16):
        resize(rig, num_blocks)
        for _ in range(4):
            rig.step()
            give_back(rig)
    rig.run()
    for each, ids in zip(sequences, prompts, strict=True):
        assert rig.output(each) == solo(tuple(ids), greedy(24), vocab_size=VOCAB_SIZE)
    assert rig.engine.pool.num_blocks == 16


def test_prefix_cache_is_empty_after_the_engine_was_parked() -> None:
    rig = Rig(num_blocks=16)
    first = rig.complete(new_sequence(prompt(20), greedy()))
    resize(rig, 0)
    resize(rig, 16)
    sequence = new_sequence(prompt(20), greedy())
    assert rig.complete(sequence) == first
    assert sequence.num_cached_tokens == 0


def test_engine_with_sequences_is_not_parked() -> None:
    rig = Rig(num_blocks=16)
    sequence = rig.add(new_sequence(prompt(20), None))
    for _ in range(2):
        with pytest.raises(ValueError, match="an engine with sequences needs blocks"):
            rig.engine.resize(0)
        rig.step()
    assert sequence.state is SequenceState.HELD


def test_limits_follow_the_current_size() -> None:
    """The share of reservations, and what admission leaves free."""
    rig = Rig(num_blocks=8, max_blocks=200, max_context_tokens=32)
    resize(rig, 200)
    batcher = rig.engine.batcher
    assert batcher._watermark_blocks == 2
    prompts = [new_sequence(prompt(32, start=100 * index), None) for index in range(20)]
    assert [rig.reserve(each) for each in prompts].count(True) == 12  # half of 200, 8 each
    resize(rig, 8)
    assert batcher._watermark_blocks == 0
    assert not rig.reserve(new_sequence(prompt(4), None))


@pytest.mark.parametrize("reaches", [(None,), (None, Window(9))])
def test_size_below_the_announced_context_is_refused(reaches: tuple[Reach, ...]) -> None:
    rig = Rig(num_blocks=16, reaches=reaches)
    least = rig.engine.num_least_blocks
    with pytest.raises(InvalidRequest, match=f"which needs {least}$"):
        rig.engine.resize(least - 1)
    rig.engine.resize(least)


def engine(num_blocks: int, num_floor_blocks: int | None) -> Engine:
    return Engine(
        num_blocks=num_blocks,
        num_floor_blocks=num_floor_blocks,
        block_size=4,
        max_context_tokens=4096,
        max_batch_tokens=64,
        max_sequences=4,
    )


def test_context_is_what_the_floor_holds() -> None:
    assert engine(64, None).max_context_tokens == 256
    assert engine(64, 16).max_context_tokens == 64
    assert engine(0, 16).max_context_tokens == 64


def test_cache_below_its_floor_is_a_config_error() -> None:
    with pytest.raises(ConfigError, match="8 blocks is smaller than its floor of 16"):
        engine(8, 16)
