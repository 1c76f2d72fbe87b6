"""The sampler of a model forces the end of reasoning, beside a row without a budget."""

from __future__ import annotations

from pathlib import Path

import pytest

from shared.engine.batching.sequence import Sequence
from shared.engine.executors.local_executor import LocalExecutor
from shared.engine.token_masks.budgeted_output import BudgetedOutput
from shared.grammar.thinking import ThinkingBudget
from shared.messages import SamplingParams
from tests.support.engine.checkpoints import write_llama
from tests.support.engine.model_worker import Worker, executor_with
from tests.support.engine.rig import greedy, new_sequence, prompt

PROMPT = prompt(9, start=20)
BUDGET = ThinkingBudget(max_tokens=5, closes=((7, 8, 9),), is_open=True)


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    write_llama(folder)
    return folder


@pytest.fixture(scope="module")
def executor(model_dir: Path) -> LocalExecutor:
    return executor_with(model_dir, "float32", 64)


@pytest.mark.parametrize(
    "sampling",
    [
        greedy(16),
        SamplingParams(seed=7, max_tokens=16, temperature=1.0),
        SamplingParams(seed=7, max_tokens=16, top_k=5, top_p=0.9, num_logprobs=1),
    ],
    ids=["greedy", "seeded", "truncated"],
)
async def test_output_of_a_model(
    model_dir: Path, executor: LocalExecutor, sampling: SamplingParams
) -> None:
    async def run(*sequences: Sequence) -> list[int]:
        return await Worker(model_dir, "float32", executor=executor).run(*sequences)

    free = await run(new_sequence(PROMPT, sampling))
    budgeted, other = new_sequence(PROMPT, sampling), new_sequence(PROMPT, sampling)
    budgeted.grammar = BudgetedOutput(BUDGET, executor.vocab_size)
    worker = Worker(model_dir, "float32", executor=executor)
    output = await worker.run(budgeted, other)
    assert worker.tokens[other.sequence_id] == free
    assert output[:8] == [*free[:5], 7, 8, 9]
    assert output[8:] == await run(new_sequence(PROMPT, sampling, output_ids=output[:8]))
    assert len(output) == 16
