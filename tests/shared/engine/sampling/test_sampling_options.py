"""With any options, a resumed, preempted or batched sequence gives the output of its solo run."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from shared.engine.batching.sequence import SequenceState
from shared.messages import SamplingParams, TokenLogprobs
from tests.support.engine.checkpoints import write_llama
from tests.support.engine.model_worker import Worker
from tests.support.engine.rig import Rig, new_sequence, prompt

NUM_TOKENS = 12
TOKEN_IDS = st.integers(3, 40)
PENALTY = st.sampled_from([-1.5, 0.0, 0.0, 0.5, 2.0])


@st.composite
def options(draw: Callable[..., Any]) -> SamplingParams:
    is_greedy = draw(st.booleans())
    return SamplingParams(
        seed=draw(st.integers(0, 2**64 - 1)),
        max_tokens=NUM_TOKENS,
        temperature=0.0 if is_greedy else draw(st.sampled_from([0.3, 1.0, 1.6])),
        top_k=draw(st.sampled_from([0, 1, 5])),
        top_p=draw(st.sampled_from([0.4, 1.0])),
        min_p=draw(st.sampled_from([0.0, 0.1])),
        min_tokens=draw(st.integers(0, NUM_TOKENS)),
        repetition_penalty=draw(st.sampled_from([0.7, 1.0, 1.0, 1.4])),
        frequency_penalty=draw(PENALTY),
        presence_penalty=draw(PENALTY),
        logit_bias=tuple(draw(st.dictionaries(TOKEN_IDS, st.floats(-9, 9), max_size=3)).items()),
        bad_words=tuple(draw(st.lists(st.lists(TOKEN_IDS, min_size=1, max_size=3).map(tuple)))),
        num_logprobs=draw(st.sampled_from([None, 0, 4])),
        num_prompt_logprobs=draw(st.sampled_from([None, 0, 2])),
        logprobs_mode=draw(st.sampled_from(["raw", "processed"])),
    )


Output = tuple[list[int], list[TokenLogprobs], tuple[TokenLogprobs, ...]]


def output_of(machine: Rig | Worker, sequence_id: bytes) -> Output:
    return (
        machine.tokens[sequence_id],
        machine.logprobs[sequence_id],
        machine.prompt_logprobs.get(sequence_id, ()),
    )


@settings(max_examples=60, deadline=None)
@given(
    params=options(),
    num_received=st.integers(0, NUM_TOKENS - 1),
    budget=st.integers(1, 40),
    num_steps=st.integers(1, 20),
)
def test_output_equals_solo_run_with_timing_executor(
    params: SamplingParams, num_received: int, budget: int, num_steps: int
) -> None:
    ids, stop = prompt(17, start=16), (18, 19)
    solo = Rig(vocab_size=64)
    first = solo.add(new_sequence(ids, params, stop=stop))
    solo.run()
    tokens, logprobs, prompt_logprobs = output_of(solo, first.sequence_id)
    received = tokens[: max(0, min(num_received, len(tokens) - 1))]

    other = Rig(max_batch_tokens=budget, vocab_size=64)
    for start in (30, 40):
        other.add(new_sequence(prompt(9, start=start), params))
    resumed = other.add(new_sequence(ids, params, output_ids=received, stop=stop))
    for _ in range(num_steps):
        other.step()
    if resumed.state is SequenceState.RUNNING:
        other.engine.batcher.preempt(resumed)
    other.run()
    rest = (tokens[len(received) :], logprobs[len(received) :], prompt_logprobs)
    assert output_of(other, resumed.sequence_id) == rest


@pytest.mark.parametrize(
    "changed",
    [
        {"repetition_penalty": 1.2},
        {"frequency_penalty": 0.1},
        {"presence_penalty": 0.1},
        {"logit_bias": ((500, 1.0),)},
    ],
)
def test_every_option_changes_the_timing_runners_tokens(changed: dict[str, Any]) -> None:
    outputs = []
    for each in ({}, changed):
        params = SamplingParams(seed=0, max_tokens=9, temperature=0.0, **each)
        outputs.append(Rig().complete(new_sequence(prompt(9), params)))
    assert outputs[0] != outputs[1]


def test_timing_executor_never_completes_a_bad_word() -> None:
    without_ban = SamplingParams(seed=0, max_tokens=9, temperature=0.0)
    free = Rig().complete(new_sequence(prompt(9), without_ban))
    banning = SamplingParams(
        seed=0, max_tokens=9, temperature=0.0, bad_words=((free[3], free[4]), (free[1], free[4]))
    )
    banned = Rig().complete(new_sequence(prompt(9), banning))
    assert banned[:4] == free[:4]
    assert banned[4] == free[4] + 1


@pytest.fixture(scope="module")
def workers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Worker, Worker]]:
    """A worker with enough blocks, and one with blocks for two and a half sequences."""
    folder: Path = tmp_path_factory.mktemp("model")
    write_llama(folder, num_attention_heads=7, num_key_value_heads=1, hidden_size=84)
    made = Worker(folder, "bfloat16"), Worker(folder, "bfloat16", num_blocks=7, budget=13)
    yield made
    for each in made:
        asyncio.run(each.executor.close())


@cache
def model_prompt(start: int) -> list[int]:
    return [(7 * n + n * n + start) % 30 + 3 for n in range(25)]


@settings(
    max_examples=6, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(params=options(), num_received=st.integers(0, NUM_TOKENS - 1))
def test_output_equals_solo_run_with_model(
    workers: tuple[Worker, Worker], params: SamplingParams, num_received: int
) -> None:
    roomy, crowded = workers
    ids, stop = model_prompt(0), (7, 8)
    first = new_sequence(ids, params, stop=stop, tenant_id="tenant-a")
    asyncio.run(roomy.run(first))
    tokens, logprobs, prompt_logprobs = output_of(roomy, first.sequence_id)
    received = tokens[: max(0, min(num_received, len(tokens) - 1))]
    resumed = new_sequence(ids, params, output_ids=received, stop=stop)
    others = [new_sequence(model_prompt(n), params) for n in (1, 2, 3)]
    asyncio.run(crowded.run(*others, resumed))
    rest = (tokens[len(received) :], logprobs[len(received) :], prompt_logprobs)
    assert output_of(crowded, resumed.sequence_id) == rest
