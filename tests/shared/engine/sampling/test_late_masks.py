"""A row whose mask is late is computed again, and samples the token that it would have sampled."""

from __future__ import annotations

import random
from functools import cache
from pathlib import Path

import pytest

from shared.engine.batching.sequence import Sequence, SequenceState
from shared.engine.executors.local_executor import LocalExecutor
from shared.messages import SamplingParams
from tests.support.engine.checkpoints import write_llama
from tests.support.engine.masked import MODULUS, SumGrammar
from tests.support.engine.model_worker import Worker, executor_with
from tests.support.engine.rig import VOCAB_SIZE, Rig, greedy, new_sequence, prompt, seeded

NUM_TOKENS = 16
EACH_SAMPLING = pytest.mark.parametrize(
    "sampling", [greedy(NUM_TOKENS), seeded(NUM_TOKENS)], ids=["greedy", "seeded"]
)


def constrained(
    prompt_ids: list[int],
    sampling: SamplingParams,
    vocab_size: int = VOCAB_SIZE,
    *,
    late_at: tuple[int, ...] = (),
    choice_index: int = 0,
) -> Sequence:
    sequence = new_sequence(prompt_ids, sampling, choice_index=choice_index)
    sequence.grammar = SumGrammar(vocab_size, late_at=late_at)
    return sequence


def num_late(sequences: list[Sequence]) -> int:
    return sum(
        each.grammar.num_late_masks for each in sequences if isinstance(each.grammar, SumGrammar)
    )


def late_positions(seed: int) -> tuple[int, ...]:
    return (0, *random.Random(seed).sample(range(1, NUM_TOKENS), 5))


@cache
def undisturbed(
    prompt_ids: tuple[int, ...], sampling: SamplingParams, choice_index: int = 0
) -> list[int]:
    sequence = constrained(list(prompt_ids), sampling, choice_index=choice_index)
    tokens = Rig().complete(sequence)
    assert all(
        token_id % MODULUS == (sum(tokens[:position]) + 1) % MODULUS
        for position, token_id in enumerate(tokens)
    )
    assert len(set(tokens)) > NUM_TOKENS // 2
    return tokens


@EACH_SAMPLING
@pytest.mark.parametrize(
    "limits",
    [{}, {"max_batch_tokens": 5}, {"num_blocks": 14, "max_batch_tokens": 16}],
    ids=["alone", "chunked", "preempted"],
)
def test_late_masks_change_no_token(limits: dict[str, int], sampling: SamplingParams) -> None:
    rig = Rig(**limits)
    prompts = [prompt(9 + n, start=n * 50) for n in range(4)]
    sequences = [
        rig.add(constrained(ids, sampling, late_at=late_positions(seed)))
        for seed, ids in enumerate(prompts)
    ]
    free = rig.add(new_sequence(prompt(9, start=500), sampling))
    rig.run()
    assert num_late(sequences) == 4 * 6
    assert "num_blocks" not in limits or sum(each.num_preemptions for each in sequences)
    for ids, sequence in zip(prompts, sequences, strict=True):
        assert rig.output(sequence) == undisturbed(tuple(ids), sampling)
    assert rig.output(free) == Rig().complete(new_sequence(prompt(9, start=500), sampling))


@EACH_SAMPLING
def test_late_masks_of_choices_change_no_token(sampling: SamplingParams) -> None:
    """The choices start from shared blocks, which a late row's last token is not written to."""
    rig = Rig()
    ids = prompt(11)
    parent = rig.add(new_sequence(ids[:-1], None))
    while parent.state is not SequenceState.HELD:
        rig.step()
    choices = [
        constrained(ids, sampling, late_at=late_positions(index), choice_index=index)
        for index in range(3)
    ]
    rig.fork(parent, choices)
    rig.run()
    assert num_late(choices) == 3 * 6
    for index, choice in enumerate(choices):
        assert rig.output(choice) == undisturbed(tuple(ids), sampling, index)


def test_a_late_row_advances_to_its_last_token() -> None:
    rig = Rig()
    sequence = rig.add(constrained(prompt(9), greedy(), late_at=(0,)))
    rig.step()
    assert (sequence.num_computed_tokens, sequence.num_tokens) == (8, 9)
    assert sequence.num_committed_blocks == 2
    assert rig.engine.num_generated_tokens == 0
    assert rig.step() == []
    rig.run()
    assert rig.engine.num_computed_prompt_tokens == 9
    assert rig.engine.num_generated_tokens == 8


def test_a_sequence_that_is_aborted_with_its_late_row_ends() -> None:
    rig = Rig()
    sequence = rig.add(constrained(prompt(9), greedy(), late_at=(0,)))
    rows = rig.begin()
    rig.engine.abort(sequence)
    rig.end(rows)
    assert sequence.state is SequenceState.FINISHED
    assert rig.output(sequence) == []


def test_prompt_logprobs_are_complete_although_the_last_token_is_computed_twice() -> None:
    sampling = SamplingParams(seed=0, max_tokens=4, temperature=0.0, num_prompt_logprobs=1)
    rig, other = Rig(max_batch_tokens=4), Rig()
    late = rig.add(constrained(prompt(11), sampling, late_at=(0, 2)))
    rig.run()
    in_time = other.add(constrained(prompt(11), sampling))
    other.run()
    expected = other.prompt_logprobs[in_time.sequence_id]
    assert rig.prompt_logprobs[late.sequence_id] == expected
    assert len(expected) == 10


def test_processed_logprobs_of_the_formula_are_of_allowed_tokens() -> None:
    params = SamplingParams(
        seed=0, max_tokens=6, temperature=0.0, num_logprobs=3, logprobs_mode="processed"
    )
    rig = Rig()
    sequence = rig.add(constrained(prompt(9), params))
    rig.run()
    for token_id, logprobs in zip(
        rig.output(sequence), rig.logprobs[sequence.sequence_id], strict=True
    ):
        assert logprobs.top_token_ids[0] == token_id
        assert {each % MODULUS for each in logprobs.top_token_ids} == {token_id % MODULUS}


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    write_llama(folder)
    return folder


@pytest.fixture(scope="module")
def executor(model_dir: Path) -> LocalExecutor:
    return executor_with(model_dir, "float32", 64)


@EACH_SAMPLING
async def test_late_masks_change_no_token_of_a_model(
    model_dir: Path, executor: LocalExecutor, sampling: SamplingParams
) -> None:
    """Beside a free sequence, with prompts in chunks."""
    prompts = [[(7 * n + n * n + 31 * row) % 190 + 3 for n in range(40)] for row in range(3)]

    def constrained_by(late: bool) -> list[Sequence]:
        return [
            constrained(ids, sampling, 199, late_at=late_positions(seed) if late else ())
            for seed, ids in enumerate(prompts)
        ]

    async def run(budget: int, *sequences: Sequence) -> list[list[int]]:
        worker = Worker(model_dir, "float32", budget=budget, executor=executor)
        await worker.run(*sequences)
        return [worker.tokens[each.sequence_id] for each in sequences]

    expected = [(await run(64, each))[0] for each in constrained_by(late=False)]
    free = [new_sequence(prompts[0], sampling) for _ in range(2)]
    (expected_free,) = await run(64, free[0])
    late = constrained_by(late=True)
    assert await run(24, *late, free[1]) == [*expected, expected_free]
    assert num_late(late) == 3 * 6
    assert len({token_id for tokens in expected for token_id in tokens}) > NUM_TOKENS
