"""Every path of a prompt through the engine, with a model, gives the same tokens."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from shared.engine.executors.local_executor import LocalExecutor
from shared.kv_layout import first_sent
from shared.messages import SamplingParams
from tests.support.engine.families import FAMILIES, Family
from tests.support.engine.model_worker import Worker, executor_with, push_kv
from tests.support.engine.rig import new_sequence

PROMPT = [(7 * n + n * n) % 190 + 3 for n in range(75)]
OTHERS = [[(11 * n + k) % 190 + 3 for n in range(20 + 9 * k)] for k in range(6)]
SAMPLINGS = {
    "greedy": SamplingParams(seed=3, max_tokens=24, temperature=0.0),
    "seeded": SamplingParams(seed=3, max_tokens=24, temperature=0.9, top_k=40, top_p=0.95),
}


# Windows are shorter than the prompt; one is longer than a step of 64 tokens.
LLAMA = Family(
    "LlamaForCausalLM", {"num_attention_heads": 7, "hidden_size": 84, "num_hidden_layers": 2}
)
MODELS = {
    "llama": LLAMA,
    "mistral": Family("MistralForCausalLM", {"sliding_window": 70}),
    "gemma3": FAMILIES["gemma3"],
    "llama4": FAMILIES["llama4"],
    "phi3": FAMILIES["phi3, longrope"],
    "deepseek": FAMILIES["deepseek"],  # latents
}
CASES = [
    ("llama", "bfloat16", "greedy"),
    ("llama", "bfloat16", "seeded"),
    ("llama", "float32", "greedy"),
    ("llama", "float32", "seeded"),
    ("mistral", "float32", "greedy"),
    ("gemma3", "bfloat16", "greedy"),
    ("llama4", "bfloat16", "greedy"),
    ("phi3", "float32", "seeded"),
    ("deepseek", "bfloat16", "seeded"),
    ("llama", "bfloat16 with fp8 kv", "seeded"),
    ("gemma3", "bfloat16 with fp8 kv", "greedy"),
    ("deepseek", "bfloat16 with fp8 kv", "seeded"),
]


@pytest.fixture(scope="module")
def model_dirs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folders = {name: tmp_path_factory.mktemp("model") for name in MODELS}
    for name, folder in folders.items():
        MODELS[name].write(folder)
    return folders


SHORT = [  # a cache of FP32, of BF16 and of FP8; all positions, windows, latents
    ("llama", "float32", "seeded"),
    ("gemma3", "bfloat16", "greedy"),
    ("deepseek", "bfloat16 with fp8 kv", "seeded"),
]


@pytest.fixture(
    params=[pytest.param(each, marks=() if each in SHORT else pytest.mark.long) for each in CASES],
    ids="-".join,
)
def case(request: pytest.FixtureRequest) -> tuple[str, str, str]:
    return request.param


Idle = dict[tuple[str, str, int], list[LocalExecutor]]


@pytest.fixture(scope="module")
def idle(model_dirs: dict[str, Path]) -> Iterator[Idle]:
    """Unused executors, by model, dtype and number of blocks."""
    idle: Idle = defaultdict(list)
    yield idle
    for executors in idle.values():
        for executor in executors:
            asyncio.run(executor.close())


@pytest.fixture
def workers(case: tuple[str, str, str], model_dirs: dict[str, Path], idle: Idle) -> Iterator[type]:
    """Makes workers: new engines, with executors that other tests may have used before."""
    taken: list[tuple[tuple[str, str, int], LocalExecutor]] = []

    def make(num_blocks: int = 64, budget: int = 64) -> Worker:
        model, dtype, _ = case
        key = model, dtype, num_blocks
        folder, has_fp8_kv = model_dirs[model], dtype.endswith("fp8 kv")
        dtype = dtype.partition(" ")[0]
        executor = idle[key].pop() if idle[key] else None
        executor = executor or executor_with(folder, dtype, num_blocks, has_fp8_kv=has_fp8_kv)
        taken.append((key, executor))
        return Worker(folder, dtype, num_blocks=num_blocks, budget=budget, executor=executor)

    yield make  # type: ignore[misc]
    for key, executor in taken:
        idle[key].append(executor)


@pytest.fixture
def sampling(case: tuple[str, str, str]) -> SamplingParams:
    return SAMPLINGS[case[2]]


@pytest.fixture(scope="module")
def known() -> dict[tuple[Any, ...], list[int]]:
    """What `local` has returned, by case and choice."""
    return {}


@pytest.fixture
def local(case, workers, sampling, known) -> Callable[..., list[int]]:
    """Returns a choice's tokens, of an engine that runs nothing else."""

    def run(choice_index: int = 0) -> list[int]:
        key = *case, choice_index
        if key not in known:
            sequence = new_sequence(PROMPT, sampling, choice_index=choice_index)
            known[key] = asyncio.run(workers().run(sequence))
            assert len(known[key]) == 24 and len(set(known[key])) > 4
        return known[key]

    return run


@pytest.mark.each_value
@pytest.mark.parametrize("budget", [1, 7, 512])
def test_chunk_budget_changes_no_token(workers, local, sampling, budget):
    output = asyncio.run(workers(budget=budget).run(new_sequence(PROMPT, sampling)))
    assert output == local()


def test_batch_changes_no_token(workers, local, sampling):
    others = [new_sequence(each, sampling) for each in OTHERS]
    output = asyncio.run(workers().run(new_sequence(PROMPT, sampling), *others))
    assert output == local()


def test_cached_prefix_changes_no_token(workers, sampling):
    async def main() -> None:
        worker = workers()
        expected = await worker.run(new_sequence(PROMPT, sampling))
        before = worker.num_computed_tokens
        again = new_sequence(PROMPT, sampling)
        assert await worker.run(again) == expected
        assert again.num_cached_tokens == 64
        assert worker.num_computed_tokens - before == len(PROMPT) - 64 + 23

    asyncio.run(main())


def test_preemption_changes_no_token(case, workers, local, sampling):
    """Four sequences run in blocks for two and a half. Short steps leave chunks few blocks."""
    sequences = [new_sequence(PROMPT, sampling, tenant_id=f"tenant-{n}") for n in range(4)]
    has_chunks = case[0] == "llama4"
    worker = workers(num_blocks=9, budget=16) if has_chunks else workers(num_blocks=15)
    asyncio.run(worker.run(*sequences))
    assert sum(each.num_preemptions for each in sequences) > 0
    outputs = [worker.tokens[each.sequence_id] for each in sequences]
    assert outputs == [local()] * 4


@pytest.mark.each_value
@pytest.mark.parametrize("num_received", [1, 5, 23])
def test_resuming_changes_no_token(workers, local, sampling, num_received):
    expected = local()
    resumed = new_sequence(PROMPT, sampling, output_ids=expected[:num_received])
    assert asyncio.run(workers().run(resumed)) == expected[num_received:]


@pytest.mark.each_value
@pytest.mark.parametrize("budget", [7, 64])
def test_disaggregation_changes_no_token(workers, local, sampling, budget):
    expected = local()

    async def main() -> None:
        prefill, decode = workers(budget=budget), workers()
        source = new_sequence(PROMPT[:-1], None)
        await prefill.run(source)
        target = new_sequence(PROMPT, sampling)
        assert decode.engine.reserve(target)
        num_tokens = len(PROMPT) - 1
        await push_kv(prefill, source, decode, target)
        decode.engine.activate(target, num_tokens)
        await decode.run_on()
        assert decode.tokens[target.sequence_id] == expected
        assert decode.num_computed_tokens == 24  # the last prompt token and 23 sampled tokens

    asyncio.run(main())


@pytest.mark.each_value
@pytest.mark.parametrize("received", [(0, 0, 0), (0, 5, 23)])
def test_choices_equal_their_solo_runs(workers, local, sampling, received):
    """Three choices share a prompt of four full blocks and a partial one."""
    expected = [local(choice_index) for choice_index in range(3)]

    async def main() -> None:
        worker = workers()
        shared = new_sequence(PROMPT[:-1], None)
        await worker.run(shared)
        children = [
            new_sequence(
                PROMPT, sampling, output_ids=output_ids_of_choice[:count], choice_index=index
            )
            for index, (output_ids_of_choice, count) in enumerate(
                zip(expected, received, strict=True)
            )
        ]
        for child in children:
            worker.engine.accept(child)
        worker.engine.fork(shared, children)
        await worker.run_on()
        assert [child.token_ids[len(PROMPT) :] for child in children] == expected
        assert worker.num_computed_tokens == len(PROMPT) - 1 + 3 * 24

    asyncio.run(main())


def test_choices_share_all_but_the_partial_block(workers, sampling):
    async def main() -> None:
        worker, ids = workers(), [*PROMPT, *PROMPT[:25]]
        shared = new_sequence(ids[:-1], None)
        await worker.run(shared)
        children = [new_sequence(ids, sampling, choice_index=index) for index in range(4)]
        worker.engine.fork(shared, children)
        worker.engine.schedule()
        pool = worker.engine.pool
        firsts = [first_sent(reach, 100, 16) // 16 for reach in pool.reaches]
        # of 100 tokens and 16 a block, in each group from what is sent of it
        assert pool.num_blocks - pool.num_free_blocks == sum(6 - first + 4 for first in firsts)

    asyncio.run(main())
