"""Embeddings: those of transformers' last hidden states, in any chunks, cached or preempted."""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from transformers import LlamaForCausalLM

from shared.engine.batching.sequence import Sequence, SequenceState
from shared.engine.engine import StepProgress
from shared.messages import Pooling
from tests.shared.engine.support.checkpoints import write_llama
from tests.shared.engine.support.model_worker import Worker
from tests.shared.engine.support.rig import Rig, greedy, new_sequence, prompt, solo

PROMPT = [(7 * n + n * n) % 190 + 3 for n in range(75)]
EITHER = pytest.mark.parametrize("pooling", ["last", "mean"])


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("model")


@pytest.fixture(scope="module")
def model(model_dir: Path) -> LlamaForCausalLM:
    return write_llama(model_dir, num_attention_heads=7, num_key_value_heads=1, hidden_size=84)


def embedding_of(ending: StepProgress) -> NDArray[np.float32]:
    assert ending.finish_reason == "stop"
    assert ending.embedding is not None
    assert ending.embedding.dtype == np.float32
    return ending.embedding


@EITHER
@pytest.mark.parametrize("budget", [1, 7, 512])
def test_it_is_that_of_transformers_in_any_chunks(
    model: LlamaForCausalLM, model_dir: Path, pooling: Pooling, budget: int
) -> None:
    with torch.inference_mode():
        hidden = model.model(torch.tensor([PROMPT])).last_hidden_state[0]
    expected = hidden.mean(0) if pooling == "mean" else hidden[-1]
    worker = Worker(model_dir, "float32", budget=budget)
    sequence = new_sequence(PROMPT, None, pooling=pooling)
    asyncio.run(worker.run(sequence, new_sequence(PROMPT[:20], greedy())))
    asyncio.run(worker.runner.close())
    actual = embedding_of(worker.endings[sequence.sequence_id])
    np.testing.assert_allclose(actual, expected, atol=1e-4)
    assert worker.tokens[sequence.sequence_id] == []


@EITHER
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_chunks_change_no_bit(
    model: LlamaForCausalLM, model_dir: Path, pooling: Pooling, dtype: str
) -> None:
    vectors = []
    for budget in (1, 7, 64, 512):
        worker = Worker(model_dir, dtype, budget=budget)
        sequence = new_sequence(PROMPT, None, pooling=pooling)
        asyncio.run(worker.run(sequence))
        asyncio.run(worker.runner.close())
        vectors.append(embedding_of(worker.endings[sequence.sequence_id]).tolist())
    assert vectors[0] == vectors[1] == vectors[2] == vectors[3]


def embedded(rig: Rig, sequence: Sequence) -> list[float]:
    """Runs all; the sequence is added if it is new."""
    if sequence not in rig.sequences:
        rig.add(sequence)
    rig.run()
    assert sequence.state is SequenceState.FINISHED
    return embedding_of(rig.endings[sequence.sequence_id]).tolist()


@EITHER
def test_a_cache_is_used_where_all_but_the_last_token_may_come_from_it(pooling: Pooling) -> None:
    rig, ids = Rig(max_batch_tokens=16), prompt(44)
    expected = embedded(Rig(), new_sequence(ids, None, pooling=pooling))
    rig.complete(new_sequence(ids, greedy(1)))
    before = rig.num_computed_tokens
    sequence = new_sequence(ids, None, pooling=pooling)
    assert embedded(rig, sequence) == expected
    assert sequence.num_cached_tokens == (40 if pooling == "last" else 0)
    assert rig.num_computed_tokens - before == 44 - sequence.num_cached_tokens


def test_every_token_counts_in_a_mean_and_the_last_states_all() -> None:
    for pooling in ("last", "mean"):
        vectors = [
            embedded(Rig(), new_sequence(ids, None, pooling=pooling))  # type: ignore[arg-type]
            for ids in (prompt(9), prompt(8), [7, *prompt(9)[1:]])
        ]
        assert vectors[0] != vectors[1] != vectors[2] != vectors[0]


@EITHER
@pytest.mark.parametrize("num_steps", [1, 2])
def test_a_preempted_one_starts_over(pooling: Pooling, num_steps: int) -> None:
    ids, rig = prompt(45), Rig(max_batch_tokens=16)
    sequence = rig.add(new_sequence(ids, None, pooling=pooling))
    for _ in range(num_steps):
        rig.step()
    rig.engine.batcher.preempt(sequence)
    expected = embedded(Rig(), new_sequence(ids, None, pooling=pooling))
    assert embedded(rig, sequence) == expected


@EITHER
def test_it_makes_room_for_others_and_never_holds_blocks(pooling: Pooling) -> None:
    """Unlike a prefill, whose blocks wait for a push."""
    rig = Rig(num_blocks=14, max_batch_tokens=8)
    answer = rig.add(new_sequence(prompt(9), greedy(20)))
    sequence = rig.add(new_sequence(prompt(45, start=200), None, pooling=pooling))
    expected = embedded(Rig(), new_sequence(prompt(45, start=200), None, pooling=pooling))
    assert embedded(rig, sequence) == expected
    assert rig.output(answer) == solo(tuple(prompt(9)), greedy(20))
    assert rig.engine.is_idle


@EITHER
def test_a_failed_step_ends_it(pooling: Pooling) -> None:
    rig = Rig(max_batch_tokens=16)
    sequence = rig.add(new_sequence(prompt(45), None, pooling=pooling))
    (progress,) = rig.engine.fail(rig.begin())
    assert (progress.finish_reason, sequence.state) == ("failed", SequenceState.FINISHED)
    rig.check()
    assert rig.engine.is_idle


@EITHER
def test_an_aborted_one_is_gone_with_its_step(pooling: Pooling) -> None:
    rig = Rig(max_batch_tokens=64)
    sequence = rig.add(new_sequence(prompt(45), None, pooling=pooling))
    rows = rig.begin()
    rig.engine.abort(sequence)
    rig.end(rows)
    assert rig.endings == {} and rig.engine.is_idle
