"""Choices with penalties and logprobs, with a model: each equals its solo run to the bit."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from shared.engine.batching.sequence import Sequence, SequenceState
from shared.engine.executors.local_executor import LocalExecutor
from shared.engine.step import KvRun
from shared.messages import LogprobsMode, SamplingParams, TokenLogprobs
from tests.support.engine.checkpoints import write_llama
from tests.support.engine.model_worker import Worker, executor_with
from tests.support.engine.rig import new_sequence

PROMPT = [(7 * n + n * n) % 190 + 3 for n in range(75)]  # four blocks and a partial one
NUM_TOKENS = 24

Output = tuple[list[int], list[TokenLogprobs]]
Executors = tuple[LocalExecutor, ...]


class Site:
    """A worker that pushes the prompt, one with room for the choices, and one without."""

    def __init__(self, model_dir: Path, executors: Executors) -> None:
        self.prefill, self.roomy, self.crowded = (
            Worker(model_dir, "", num_blocks=each.num_blocks, executor=each) for each in executors
        )

    async def choices(
        self, worker: Worker, sampling: SamplingParams, outputs: list[list[int]]
    ) -> list[Sequence]:
        """Runs the choices of a prompt whose KV was pushed. Returns the finished sequences."""
        source, shared = (new_sequence(PROMPT[:-1], None) for _ in range(2))
        await self.prefill.run(source)
        assert worker.engine.reserve(shared)
        num_tokens = shared.num_tokens
        payload = bytearray(num_tokens * worker.executor.kv_layout.bytes_per_token)
        pushed = memoryview(payload)
        await self.prefill.executor.read_kv(KvRun(source.block_tables[0], 0, num_tokens), pushed)
        await worker.executor.write_kv(KvRun(shared.block_tables[0], 0, num_tokens), pushed)
        worker.engine.activate(shared, num_tokens)
        children = [
            new_sequence(PROMPT, sampling, output_ids=output, choice_index=index)
            for index, output in enumerate(outputs)
        ]
        for child in children:
            worker.engine.accept(child)
        worker.engine.fork(shared, children)
        await worker.run_on()
        return children


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    write_llama(folder, num_attention_heads=7, num_key_value_heads=1, hidden_size=84)
    return folder


@pytest.fixture(scope="module", params=["bfloat16", "float32"])
def executors(request: pytest.FixtureRequest, model_dir: Path) -> Iterator[Executors]:
    """With 64, 64 and 9 blocks."""
    made = tuple(executor_with(model_dir, request.param, count) for count in (64, 64, 9))
    yield made
    for executor in made:
        asyncio.run(executor.close())


@pytest.fixture
def site(model_dir: Path, executors: Executors) -> Site:
    """New engines without cached blocks, on executors that all tests share."""
    return Site(model_dir, executors)


def to_sampling(mode: LogprobsMode) -> SamplingParams:
    return SamplingParams(
        seed=3,
        max_tokens=NUM_TOKENS,
        temperature=0.9,
        top_p=0.95,
        repetition_penalty=1.3,
        frequency_penalty=0.4,
        presence_penalty=0.7,
        logit_bias=((40, 1.5), (41, -2.0)),
        bad_words=((50,), (60, 61)),
        num_logprobs=3,
        logprobs_mode=mode,
    )


def output_of(worker: Worker, sequence: Sequence) -> Output:
    return worker.tokens[sequence.sequence_id], worker.logprobs[sequence.sequence_id]


async def run_alone(worker: Worker, sampling: SamplingParams, choice_index: int) -> Output:
    tenant_id = f"alone-{choice_index}"  # without cached blocks
    sequence = new_sequence(PROMPT, sampling, choice_index=choice_index, tenant_id=tenant_id)
    await worker.run(sequence)
    assert sequence.num_cached_tokens == 0
    return output_of(worker, sequence)


@pytest.mark.each_value(2)
@pytest.mark.parametrize("mode", ["raw", "processed"])
@pytest.mark.parametrize("num_received", [(0, 0, 0), (0, 1, 3)], ids=["new", "resumed"])
@pytest.mark.parametrize("is_crowded", [False, True], ids=["roomy", "crowded"])
def test_choices_of_pushed_prompt_equal_solo_runs(
    site: Site, is_crowded: bool, num_received: tuple[int, ...], mode: LogprobsMode
) -> None:
    sampling = to_sampling(mode)
    worker = site.crowded if is_crowded else site.roomy

    async def main() -> None:
        expected = [await run_alone(site.roomy, sampling, index) for index in range(3)]
        received = [
            tokens[:count] for (tokens, _), count in zip(expected, num_received, strict=True)
        ]
        children = await site.choices(worker, sampling, received)
        for child, (tokens, logprobs), count in zip(children, expected, num_received, strict=True):
            assert len(tokens) == len(logprobs) == NUM_TOKENS
            assert output_of(worker, child) == (tokens[count:], logprobs[count:])
        assert any(child.num_preemptions for child in children) is is_crowded
        assert all(child.state is SequenceState.FINISHED for child in children)

    asyncio.run(main())
