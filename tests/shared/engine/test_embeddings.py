"""Embeddings equal pooled hidden states of transformers in any chunks, cached or preempted."""

from __future__ import annotations

import asyncio
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from transformers import LlamaForCausalLM

from shared.engine.batching.sequence import Sequence, SequenceState
from shared.engine.engine import StepProgress
from shared.messages import Pooling
from tests.support.engine.checkpoints import write_llama
from tests.support.engine.model_worker import Worker
from tests.support.engine.rig import Rig, greedy, new_sequence, prompt, solo
from tests.support.grids import in_short_run

PROMPT = [(7 * n + n * n) % 190 + 3 for n in range(75)]
EACH_POOLING = pytest.mark.parametrize("pooling", ["last", "mean"])


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


@EACH_POOLING
@pytest.mark.parametrize("budget", [1, 7, 512])
def test_embedding_matches_transformers_in_any_chunks(
    model: LlamaForCausalLM, model_dir: Path, pooling: Pooling, budget: int
) -> None:
    with torch.inference_mode():
        hidden = model.model(torch.tensor([PROMPT])).last_hidden_state[0]
    expected = hidden.mean(0) if pooling == "mean" else hidden[-1]
    worker = Worker(model_dir, "float32", budget=budget)
    sequence = new_sequence(PROMPT, None, pooling=pooling)
    asyncio.run(worker.run(sequence, new_sequence(PROMPT[:20], greedy())))
    asyncio.run(worker.executor.close())
    actual = embedding_of(worker.endings[sequence.sequence_id])
    np.testing.assert_allclose(actual, expected, atol=1e-4)
    assert worker.tokens[sequence.sequence_id] == []


@pytest.mark.parametrize(
    ("pooling", "dtype"),
    in_short_run([("mean", "bfloat16")], product(("last", "mean"), ("bfloat16", "float32"))),
)
def test_chunks_change_no_bit(
    model: LlamaForCausalLM, model_dir: Path, pooling: Pooling, dtype: str
) -> None:
    vectors = []
    for budget in (1, 7, 64, 512):
        worker = Worker(model_dir, dtype, budget=budget)
        sequence = new_sequence(PROMPT, None, pooling=pooling)
        asyncio.run(worker.run(sequence))
        asyncio.run(worker.executor.close())
        vectors.append(embedding_of(worker.endings[sequence.sequence_id]).tolist())
    assert vectors[0] == vectors[1] == vectors[2] == vectors[3]


def embedded(rig: Rig, sequence: Sequence) -> list[float]:
    """Adds the sequence if it is new and runs all sequences. Returns its embedding."""
    if sequence not in rig.sequences:
        rig.add(sequence)
    rig.run()
    assert sequence.state is SequenceState.FINISHED
    return embedding_of(rig.endings[sequence.sequence_id]).tolist()


@EACH_POOLING
def test_cached_prefix_is_used_for_last_pooling_only(pooling: Pooling) -> None:
    rig, ids = Rig(max_batch_tokens=16), prompt(44)
    expected = embedded(Rig(), new_sequence(ids, None, pooling=pooling))
    rig.complete(new_sequence(ids, greedy(1)))
    before = rig.num_computed_tokens
    sequence = new_sequence(ids, None, pooling=pooling)
    assert embedded(rig, sequence) == expected
    assert sequence.num_cached_tokens == (40 if pooling == "last" else 0)
    assert rig.num_computed_tokens - before == 44 - sequence.num_cached_tokens


def test_embedding_depends_on_every_token() -> None:
    for pooling in ("last", "mean"):
        vectors = [
            embedded(Rig(), new_sequence(ids, None, pooling=pooling))  # type: ignore[arg-type]
            for ids in (prompt(9), prompt(8), [7, *prompt(9)[1:]])
        ]
        assert vectors[0] != vectors[1] != vectors[2] != vectors[0]


@EACH_POOLING
@pytest.mark.parametrize("num_steps", [1, 2])
def test_embedding_is_unchanged_by_preemption(pooling: Pooling, num_steps: int) -> None:
    ids, rig = prompt(45), Rig(max_batch_tokens=16)
    sequence = rig.add(new_sequence(ids, None, pooling=pooling))
    for _ in range(num_steps):
        rig.step()
    rig.engine.batcher.preempt(sequence)
    expected = embedded(Rig(), new_sequence(ids, None, pooling=pooling))
    assert embedded(rig, sequence) == expected


@EACH_POOLING
def test_embedding_holds_no_blocks_after_its_end(pooling: Pooling) -> None:
    """Unlike a prefill, which holds its blocks until they are pushed."""
    rig = Rig(num_blocks=14, max_batch_tokens=8)
    answer = rig.add(new_sequence(prompt(9), greedy(20)))
    sequence = rig.add(new_sequence(prompt(45, start=200), None, pooling=pooling))
    expected = embedded(Rig(), new_sequence(prompt(45, start=200), None, pooling=pooling))
    assert embedded(rig, sequence) == expected
    assert rig.output(answer) == solo(tuple(prompt(9)), greedy(20))
    assert rig.engine.is_idle


@EACH_POOLING
def test_failed_step_ends_the_embedding(pooling: Pooling) -> None:
    rig = Rig(max_batch_tokens=16)
    sequence = rig.add(new_sequence(prompt(45), None, pooling=pooling))
    (progress,) = rig.fail(rig.begin())
    assert (progress.finish_reason, sequence.state) == ("failed", SequenceState.FINISHED)
    rig.check()
    assert rig.engine.is_idle


@EACH_POOLING
def test_aborted_embedding_ends_with_its_step(pooling: Pooling) -> None:
    rig = Rig(max_batch_tokens=64)
    sequence = rig.add(new_sequence(prompt(45), None, pooling=pooling))
    rows = rig.begin()
    rig.engine.abort(sequence)
    rig.end(rows)
    assert rig.endings == {} and rig.engine.is_idle
