"""Several choices with penalties and logprobs: each equals its solo run, to the bit."""

from __future__ import annotations

import asyncio
from functools import cache

import msgspec
import pytest

from shared.engine.executors.timing_executor import StepCost
from shared.errors import InvalidRequest
from shared.messages import TokenLogprobs
from tests.services.decode.test_handoff import PROMPT, cluster
from tests.support.world.clock import run
from tests.support.world.workers import request_of

EITHER = pytest.mark.parametrize("candidates", [(), ("prefill-1",)], ids=["local", "handoff"])
MODES = pytest.mark.parametrize("mode", ["raw", "processed"])
THREE = {0: [], 1: [], 2: []}
OPTIONS = {
    "temperature": 1.0,
    "repetition_penalty": 1.2,
    "frequency_penalty": 0.5,
    "presence_penalty": -0.25,
    "logit_bias": ((40, 1.5),),
    "bad_words": ((50,), (60, 61)),
    "num_logprobs": 2,
}

TokensAndLogprobs = tuple[list[int], dict[int, TokenLogprobs]]


@cache
def solo(choice_index: int, mode: str, max_tokens: int = 20) -> TokensAndLogprobs:
    """Runs the choice as a placement of its own, on a fresh worker."""

    async def main() -> TokensAndLogprobs:
        async with cluster() as it:
            request = choices_request({choice_index: []}, mode, max_tokens=max_tokens)
            received = await it.peer.finished(
                await it.peer.place("decode-1", request), choice_index
            )
            assert len(received.output) == len(received.logprobs) == max_tokens
            return received.output, received.logprobs

    return run(main())


def choices_request(outputs=THREE, mode="raw", **options):
    return request_of(PROMPT, outputs=outputs, **{**OPTIONS, "logprobs_mode": mode, **options})


def rest_of(results: TokensAndLogprobs, num_received: int) -> TokensAndLogprobs:
    output, logprobs = results
    return output[num_received:], {n: each for n, each in logprobs.items() if n >= num_received}


async def results_of(it, placement_id, choice_indices=(0, 1, 2)) -> dict[int, TokensAndLogprobs]:
    received = {index: await it.peer.finished(placement_id, index) for index in choice_indices}
    return {index: (each.output, each.logprobs) for index, each in received.items()}


@EITHER
@MODES
@pytest.mark.parametrize("num_received", [(0, 0, 0), (3, 0, 19)], ids=["full", "resumed"])
def test_tokens_and_logprobs_equal_solo_runs(num_received, mode, candidates):
    alone = [solo(index, mode) for index in range(3)]
    assert len({tuple(output) for output, _ in alone}) == 3

    async def main():
        async with cluster() as it:
            received = {n: alone[n][0][:count] for n, count in enumerate(num_received)}
            placement_id = await it.peer.place(
                "decode-1", choices_request(received, mode), candidates
            )
            results = await results_of(it, placement_id)
            assert results == {n: rest_of(alone[n], count) for n, count in enumerate(num_received)}
            for n, count in enumerate(num_received):
                again = it.peer.of(placement_id, n)
                again.logprobs.clear()
                await it.peer.resend("decode-1", placement_id, count, n)
                assert again.logprobs == results[n][1]
            await it.settled()

    run(main())


@EITHER
@MODES
def test_preempted_choices_equal_solo_runs(mode, candidates):
    """The prompt takes 15 of 24 blocks; the three choices need 5 each, but 9 are left."""
    alone = {n: solo(n, mode, 60) for n in range(3)}

    async def main():
        async with cluster(num_blocks=24) as it:
            request = choices_request(mode=mode, max_tokens=60)
            placement_id = await it.peer.place("decode-1", request, candidates)
            assert await results_of(it, placement_id) == alone
            assert num_preemptions(it, placement_id) > 0
            await it.settled()

    run(main())


def num_preemptions(it, placement_id) -> int:
    received = [it.peer.of(placement_id, index) for index in range(3)]
    return sum(each.finish.served.num_preemptions for each in received)


def test_prefill_killed_midway_changes_no_token_or_logprob():
    alone = {n: solo(n, "raw") for n in range(3)}

    async def main():
        async with cluster(cost=StepCost(base_s=0.5)) as it:
            candidates = ("prefill-1", "prefill-2")
            placement_id = await it.peer.place("decode-1", choices_request(), candidates)
            await asyncio.sleep(0.8)  # the first chunk is pushed, the second computes
            await it.prefills[0].kill()
            it.workers.remove(it.prefills[0])
            assert await results_of(it, placement_id) == alone
            assert it.peer.of(placement_id).served.prefill_worker_id == "prefill-2"
            await it.settled()

    run(main())


@EITHER
@pytest.mark.parametrize("indices", [(0, 1, 2), (7, 2, 1)])
@pytest.mark.parametrize("num_blocks", [256, 24])
def test_only_the_first_choice_has_prompt_logprobs(num_blocks, indices, candidates):
    expected = {n: solo(n, "raw", 60) for n in indices}

    async def main():
        async with cluster() as it:
            request = choices_request({9: []}, num_prompt_logprobs=1)
            alone = await it.peer.finished(await it.peer.place("decode-1", request), 9)
            assert len(alone.prompt_logprobs) == len(PROMPT) - 1
        async with cluster(num_blocks=num_blocks) as it:
            earlier = await it.peer.place("decode-1", choices_request(max_tokens=1))
            await results_of(it, earlier)  # the prompt is in the cache
            request = choices_request(
                {n: [] for n in indices}, max_tokens=60, num_prompt_logprobs=1
            )
            placement_id = await it.peer.place("decode-1", request, candidates)
            assert await results_of(it, placement_id, indices) == expected
            received = [it.peer.of(placement_id, index) for index in indices]
            assert [each.prompt_logprobs for each in received] == [
                alone.prompt_logprobs,
                *[()] * (len(indices) - 1),
            ]
            counts = [each.finish.served.num_preemptions for each in received]
            assert (sum(counts) > 0) is (num_blocks == 24)
            assert received[0].served.num_cached_tokens == 0
            await it.settled()

    run(main())


@pytest.mark.parametrize("max_batch_tokens", [64, 4096])
def test_prompt_with_prompt_logprobs_is_computed_once(max_batch_tokens):
    async def main():
        async with cluster(max_batch_tokens=max_batch_tokens) as it:
            compute, counts = it.decode.executor.run, []

            async def counted(inputs):
                counts.append(len(inputs.input_ids))
                return await compute(inputs)

            it.decode.executor.run = counted
            request = choices_request({n: [] for n in range(8)}, num_prompt_logprobs=0)
            placement_id = await it.peer.place("decode-1", request, ("prefill-1",))
            await results_of(it, placement_id, range(8))
            assert sum(counts) == len(PROMPT) - 1 + 8 * 20

    run(main())


@pytest.mark.parametrize("pooling", ["last", "mean"])
def test_embedding_with_several_choices_is_rejected(pooling):
    async def main():
        async with cluster() as it:
            request = msgspec.structs.replace(choices_request(), pooling=pooling)
            with pytest.raises(InvalidRequest, match="3 choices of an embedding"):
                await it.peer.place("decode-1", request)
            await it.settled()

    run(main())
