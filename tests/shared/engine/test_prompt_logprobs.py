"""Prompt logprobs equal those of transformers in any chunks, and are sent once and complete."""

from __future__ import annotations

import asyncio
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from transformers import LlamaForCausalLM

from kernels.cpu.gemm.linear import linear
from shared.engine.batching.sequence import Sequence
from shared.engine.sampling.hidden_state_outputs import prompt_logprobs
from shared.engine.step import PromptSuccessors
from shared.messages import SamplingParams
from tests.support.engine.checkpoints import write_llama
from tests.support.engine.model_worker import Worker
from tests.support.engine.rig import Rig, new_sequence, prompt
from tests.support.engine.steps import Blocks, step_of

PROMPT = [(7 * n + n * n) % 190 + 3 for n in range(75)]
WITH_LOGPROBS = SamplingParams(seed=0, max_tokens=4, temperature=0.0, num_prompt_logprobs=3)
WITHOUT_LOGPROBS = SamplingParams(seed=0, max_tokens=4, temperature=0.0)


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("model")


@pytest.fixture(scope="module")
def model(model_dir: Path) -> LlamaForCausalLM:
    return write_llama(model_dir, num_attention_heads=7, num_key_value_heads=1, hidden_size=84)


@pytest.mark.parametrize("budget", [1, 7, 512])
def test_prompt_logprobs_match_transformers_in_any_chunks(
    model: LlamaForCausalLM, model_dir: Path, budget: int
) -> None:
    with torch.inference_mode():
        expected = model(torch.tensor([PROMPT])).logits[0].log_softmax(-1)
    worker = Worker(model_dir, "float32", budget=budget)
    sequence = new_sequence(PROMPT, WITH_LOGPROBS)
    asyncio.run(worker.run(sequence, new_sequence(PROMPT[:20], WITHOUT_LOGPROBS)))
    asyncio.run(worker.executor.close())
    logprobs = worker.prompt_logprobs[sequence.sequence_id]
    assert len(logprobs) == len(PROMPT) - 1
    own = expected[:-1].gather(1, torch.tensor(PROMPT[1:]).unsqueeze(1)).squeeze(1)
    top = expected[:-1].topk(3)
    np.testing.assert_allclose([each.logprob for each in logprobs], own, atol=1e-4)
    np.testing.assert_allclose([each.top_logprobs for each in logprobs], top.values, atol=1e-4)
    assert [list(each.top_token_ids) for each in logprobs] == top.indices.tolist()
    assert worker.endings.keys() == worker.tokens.keys()


def test_splitting_the_logits_changes_no_bit() -> None:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(75, 84, generator=generator).bfloat16()
    weight = torch.randn(199, 84, generator=generator).bfloat16()
    following = np.array(PROMPT[1:71], dtype=np.int64)
    inputs = msgspec.structs.replace(
        step_of([(Blocks(64).line(PROMPT[:5]), 5), (Blocks(64).line(PROMPT), 70)]),
        prompt_logprobs={1: PromptSuccessors(following, 2)},
    )
    sizes: list[int] = []

    def logits_of(rows: torch.Tensor) -> torch.Tensor:
        sizes.append(len(rows))
        return linear(rows, weight).float()

    found = [
        prompt_logprobs(hidden, inputs, logits_of, vocab_size=199, max_logits=num_rows * 199)
        for num_rows in (100, 16, 1)
    ]
    assert sizes == [70] + [16] * 4 + [6] + [1] * 70
    assert found[0] == found[1] == found[2]
    assert list(found[0]) == [1] and len(found[0][1]) == 70


def test_only_prompt_logprobs_recompute_a_cached_prefix() -> None:
    rig, ids = Rig(max_batch_tokens=16), prompt(45)
    first = rig.add(new_sequence(ids, WITH_LOGPROBS))
    rig.run()
    logprobs = rig.prompt_logprobs[first.sequence_id]
    again, without_logprobs = (
        rig.add(new_sequence(ids, WITH_LOGPROBS)),
        rig.add(new_sequence(ids, WITHOUT_LOGPROBS)),
    )
    rig.run()
    assert rig.prompt_logprobs == {first.sequence_id: logprobs, again.sequence_id: logprobs}
    assert len(logprobs) == 44
    assert (again.num_cached_tokens, without_logprobs.num_cached_tokens) == (0, 44)
    assert rig.output(again) == rig.output(without_logprobs) == rig.output(first)


@pytest.mark.parametrize("num_steps", [1, 2, 3, 4])
def test_preempted_sequence_starts_over_until_logprobs_are_sent(num_steps: int) -> None:
    """The prompt takes three steps, the last of which samples the first token."""
    ids, reference, rig = prompt(45), Rig(), Rig(max_batch_tokens=16)
    expected = reference.add(new_sequence(ids, WITH_LOGPROBS))
    reference.run()
    sequence = rig.add(new_sequence(ids, WITH_LOGPROBS))
    for _ in range(num_steps):
        rig.step()
    rig.engine.batcher.preempt(sequence)
    before = rig.num_computed_tokens
    rig.run()
    logprobs = rig.prompt_logprobs[sequence.sequence_id]
    assert logprobs == reference.prompt_logprobs[expected.sequence_id]
    assert rig.output(sequence) == reference.output(expected)
    num_cached = 0 if num_steps < 3 else 44
    assert rig.num_computed_tokens - before == 45 + 3 - num_cached


def test_prompt_logprobs_are_sent_if_the_first_token_stops() -> None:
    first = Rig().complete(new_sequence(prompt(9), WITH_LOGPROBS))[0]
    rig = Rig()
    stopped = new_sequence(prompt(9), WITH_LOGPROBS, stop=(first,))
    assert rig.complete(stopped) == []
    assert len(rig.prompt_logprobs[stopped.sequence_id]) == 8


def test_one_token_prompt_has_no_logprobs() -> None:
    rig = Rig()
    assert len(rig.complete(new_sequence([5], WITH_LOGPROBS))) == 4
    assert rig.prompt_logprobs == {}


@pytest.mark.parametrize("budget", [7, 512])
def test_prefill_computes_logprobs_for_its_children(budget: int) -> None:
    """The logprobs include the last prompt token, which the prefill does not have."""
    ids, rig, reference = prompt(45), Rig(max_batch_tokens=budget), Rig()
    expected = reference.add(new_sequence(ids, WITH_LOGPROBS))
    reference.run()
    parent = Sequence(
        sequence_id=b"shared",
        tenant_id="tenant-a",
        cache_root=expected.cache_root,
        token_ids=ids[:-1],
        num_prompt_tokens=44,
        num_prompt_logprobs=3,
        next_token_id=ids[-1],
    )
    rig.add(parent)
    rig.run()
    before = rig.num_computed_tokens
    with_logprobs, without_logprobs = rig.fork(
        parent, [new_sequence(ids, WITH_LOGPROBS), new_sequence(ids, WITHOUT_LOGPROBS)]
    )
    rig.run()
    logprobs = reference.prompt_logprobs[expected.sequence_id]
    assert rig.prompt_logprobs == {with_logprobs.sequence_id: logprobs}
    assert rig.output(with_logprobs) == rig.output(without_logprobs) == reference.output(expected)
    assert (before, rig.num_computed_tokens - before) == (44, 2 * 4)
