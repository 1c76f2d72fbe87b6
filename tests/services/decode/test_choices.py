"""Requests with several choices: one prefill of the prompt, then an output for each choice."""

from __future__ import annotations

import asyncio
from functools import cache

import msgspec
import pytest

from shared.engine.executors.timing_executor import StepCost
from shared.errors import InvalidRequest, UnknownPlacement
from shared.messages import Choice
from tests.services.decode.test_handoff import PROMPT, cluster
from tests.support.world.clock import run
from tests.support.world.workers import request_of

EITHER = pytest.mark.parametrize("candidates", [(), ("prefill-1",)], ids=["local", "handoff"])
THREE = {0: [], 1: [], 2: []}
SLOW = StepCost(base_s=0.5)


def choices_request(outputs=THREE, prompt=PROMPT, **options):
    return request_of(prompt, outputs=outputs, **{"temperature": 1.0, **options})


def solo_outputs(choice_indices=(0, 1, 2), prompt=PROMPT, **options) -> dict[int, list[int]]:
    """Runs each choice as a placement of its own, on a fresh worker."""
    found = (solo_output(each, tuple(prompt), **options) for each in choice_indices)
    return dict(zip(choice_indices, found, strict=True))


@cache
def solo_output(choice_index: int, prompt: tuple[int, ...], **options) -> list[int]:
    async def main():
        async with cluster() as it:
            request = choices_request({choice_index: []}, list(prompt), **options)
            placement_id = await it.peer.place("decode-1", request)
            return (await it.peer.finished(placement_id, choice_index)).output

    return run(main())


async def finished(it, placement_id, choice_indices=(0, 1, 2)) -> dict[int, list[int]]:
    received = [await it.peer.finished(placement_id, index) for index in choice_indices]
    assert all(each.finish.reason == "length" for each in received)
    return {index: each.output for index, each in zip(choice_indices, received, strict=True)}


@pytest.mark.each_value
@EITHER
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("num_tokens", [1, 2, 16, 17, 18, 250])
def test_every_choice_equals_its_solo_run(num_tokens, temperature, candidates):
    prompt = PROMPT[:num_tokens]
    expected = solo_outputs(prompt=prompt, temperature=temperature)
    assert len({tuple(output) for output in expected.values()}) == (3 if temperature else 1)

    async def main():
        async with cluster() as it:
            request = choices_request(prompt=prompt, temperature=temperature)
            placement_id = await it.peer.place("decode-1", request, candidates)
            assert await finished(it, placement_id) == expected
            await it.settled()

    run(main())


def test_prompt_is_pushed_once_and_its_blocks_are_shared():
    async def main():
        async with cluster(cost=SLOW) as it:
            placement_id = await it.peer.place("decode-1", choices_request(), ("prefill-1",))
            for choice_index in range(3):
                received = await it.peer.has_tokens(placement_id, 1, choice_index)
                assert received.served.prefill_worker_id == "prefill-1"
                assert received.served.num_pushed_tokens == len(PROMPT) - 1
                assert received.served.num_cached_tokens == 0
            pool = it.decode.engine.pool
            assert pool.num_blocks - pool.num_free_blocks == 15 + 3  # 249 tokens, 16 per block
            await finished(it, placement_id)

    run(main())


@EITHER
@pytest.mark.parametrize("num_tokens", [241, 250])
def test_cached_prompt_tokens_are_not_pushed(num_tokens, candidates):
    """240 tokens are cached: of 241 tokens none is pushed, of 250 tokens 9, by a handoff only."""
    prompt = PROMPT[:num_tokens]
    expected = solo_outputs(prompt=prompt)
    num_pushed = num_tokens - 241 if candidates else 0

    async def main():
        async with cluster() as it:
            first = await it.peer.place("decode-1", choices_request({7: []}, [*PROMPT[:241], 9]))
            await it.peer.finished(first, 7)
            placement_id = await it.peer.place(
                "decode-1", choices_request(prompt=prompt), candidates
            )
            assert await finished(it, placement_id) == expected
            served = it.peer.of(placement_id).served
            assert served.num_pushed_tokens == num_pushed
            # after a push, num_cached_tokens is that of the prefill worker
            assert served.num_cached_tokens == (0 if num_pushed else 240)
            await it.settled()

    run(main())


@EITHER
@pytest.mark.parametrize("num_tokens", [1, 2, 250])
def test_choices_resume_where_each_stopped(num_tokens, candidates):
    prompt = PROMPT[:num_tokens]
    expected = solo_outputs((1, 2, 5), prompt)
    received = {5: expected[5][:19], 1: expected[1][:3], 2: []}

    async def main():
        async with cluster() as it:
            placement_id = await it.peer.place(
                "decode-1", choices_request(received, prompt), candidates
            )
            rest = await finished(it, placement_id, (1, 2, 5))
            assert {index: received[index] + rest[index] for index in rest} == expected
            await it.settled()

    run(main())


@pytest.mark.parametrize("candidates", [("prefill-1",), ("prefill-1", "prefill-2")])
def test_prefill_killed_midway_loses_no_token(candidates):
    expected = solo_outputs()

    async def main():
        async with cluster(cost=SLOW) as it:
            placement_id = await it.peer.place("decode-1", choices_request(), candidates)
            await asyncio.sleep(0.8)  # the first chunk is pushed, the second computes
            await it.prefills[0].kill()
            it.workers.remove(it.prefills[0])
            assert await finished(it, placement_id) == expected
            await it.settled()

    run(main())


def test_more_choices_than_batch_rows_equal_solo_runs():
    indices = tuple(range(40))  # the worker runs 32 at once
    expected = solo_outputs((0, 31, 32, 39), max_tokens=3)

    async def main():
        async with cluster() as it:
            request = choices_request({index: [] for index in indices}, max_tokens=3)
            placement_id = await it.peer.place("decode-1", request, ("prefill-1",))
            outputs = await finished(it, placement_id, indices)
            assert len({tuple(output) for output in outputs.values()}) == 40
            assert expected == {index: outputs[index] for index in expected}
            await it.settled()

    run(main())


@EITHER
def test_lost_tokens_of_each_choice_are_resent_until_ack(candidates):
    expected = solo_outputs()

    async def main():
        async with cluster() as it:
            it.network.is_dropped = lambda subject, *_: subject.endswith(".tokens")
            placement_id = await it.peer.place("decode-1", choices_request(), candidates)
            await asyncio.sleep(5)
            for choice_index in (2, 0, 1):
                assert it.peer.of(placement_id, choice_index).output == []
                await it.peer.resend("decode-1", placement_id, 0, choice_index)
                received = it.peer.of(placement_id, choice_index)
                assert received.output == expected[choice_index]
                assert received.finish is not None and received.served is not None
            with pytest.raises(UnknownPlacement):
                await it.peer.resend("decode-1", placement_id, 0, 3)
            await it.peer.acknowledge("decode-1", placement_id)
            await asyncio.sleep(0.1)
            for choice_index in range(3):
                with pytest.raises(UnknownPlacement):
                    await it.peer.resend("decode-1", placement_id, 0, choice_index)

    run(main())


@pytest.mark.each_value
@EITHER
@pytest.mark.parametrize("delay_s", [0.0, 0.3, 1.2, 2.4, 2.8, 4.0, 8.0])
def test_aborting_one_choice_does_not_affect_the_others(delay_s, candidates):
    expected = solo_outputs()

    async def main():
        async with cluster(cost=SLOW) as it:
            placement_id = await it.peer.place("decode-1", choices_request(), candidates)
            await asyncio.sleep(delay_s)
            for _ in range(2):
                await it.peer.abort("decode-1", placement_id, 1)
            await it.peer.has_tokens(placement_id, 16)
            assert len(it.decode.engine.batcher.running) == 2
            outputs = await finished(it, placement_id, (0, 2))
            assert outputs == {0: expected[0], 2: expected[2]}
            assert len(it.peer.of(placement_id, 1).output) < 20
            await it.settled()
            with pytest.raises(UnknownPlacement):
                await it.peer.resend("decode-1", placement_id, 0, 1)

    run(main())


@pytest.mark.each_value
@EITHER
@pytest.mark.parametrize("delay_s", [0.0, 0.3, 1.2, 2.4, 2.8, 4.0, 30.0])
@pytest.mark.parametrize("is_one_by_one", [False, True])
def test_aborting_all_choices_frees_all_blocks(delay_s, is_one_by_one, candidates):
    async def main():
        async with cluster(cost=SLOW) as it:
            placement_id = await it.peer.place("decode-1", choices_request(), candidates)
            await asyncio.sleep(delay_s)
            for choice_index in (2, 0, 1) if is_one_by_one else (None, None):
                await it.peer.abort("decode-1", placement_id, choice_index)
            async with asyncio.timeout(5):
                await it.settled()
            for choice_index in range(3):
                with pytest.raises(UnknownPlacement):
                    await it.peer.resend("decode-1", placement_id, 0, choice_index)

    run(main())


def test_finished_choice_is_retained_when_others_abort():
    expected = solo_outputs()

    async def main():
        async with cluster(cost=SLOW) as it:
            received = {0: expected[0][:19], 1: []}
            placement_id = await it.peer.place("decode-1", choices_request(received))
            await it.peer.finished(placement_id, 0)
            await it.peer.abort("decode-1", placement_id, 1)
            async with asyncio.timeout(5):
                await it.settled()
            await it.peer.resend("decode-1", placement_id, 0, 0)
            draining = asyncio.create_task(it.decode.drain())
            await asyncio.sleep(1)
            assert not draining.done()
            await it.peer.acknowledge("decode-1", placement_id)
            await draining
            with pytest.raises(UnknownPlacement):
                await it.peer.resend("decode-1", placement_id, 0, 0)

    run(main())


@EITHER
@pytest.mark.parametrize("deadline_s", [1.0, 4.0])
def test_deadline_ends_all_choices(deadline_s, candidates):
    async def main():
        async with cluster(cost=SLOW) as it:
            request = choices_request(max_tokens=10_000, deadline_s=deadline_s)
            await it.peer.place("decode-1", request, candidates)
            await it.settled()

    run(main())


@pytest.mark.parametrize("failing_step", [1, 3, 5])
def test_failed_step_fails_all_choices(failing_step):
    """Four steps of up to 64 tokens compute the prompt; each later step samples all choices. The
    device works again, as its check shows, but not with these rows.
    """

    async def main():
        async with cluster() as it:
            compute, num_steps = it.decode.executor.run, 0

            async def fail_from(inputs):
                nonlocal num_steps
                num_steps += 1
                if num_steps >= failing_step:
                    raise RuntimeError("out of memory")
                return await compute(inputs)

            it.decode.executor.run = fail_from
            placement_id = await it.peer.place("decode-1", choices_request())
            for choice_index in range(3):
                received = await it.peer.finished(placement_id, choice_index)
                assert received.finish.reason == "failed"
                assert received.finish.failure is not None
                assert received.output == []
            await it.settled()
            it.decode.executor.run = compute
            again = await it.peer.place("decode-1", choices_request())
            await finished(it, again)

    run(main())


def test_choices_finish_after_preemptions_in_a_small_pool():
    expected = solo_outputs(max_tokens=60)

    async def main():
        async with cluster(num_blocks=26) as it:
            first = await it.peer.place("decode-1", choices_request(max_tokens=60), ("prefill-1",))
            second = await it.peer.place(
                "decode-1", choices_request(prompt=PROMPT[:40], max_tokens=60, tenant_id="b")
            )
            assert await finished(it, first) == expected
            await finished(it, second)
            served = [it.peer.of(p, n).finish.served for p in (first, second) for n in range(3)]
            assert sum(each.num_preemptions for each in served) > 0
            await it.settled()

    run(main())


@pytest.mark.parametrize(
    ("indices", "message"),
    [
        ((), "0 choices"),
        ((0, 1, 1), "two choices have the same choice_index"),
        ((0, -1), "choice_index"),
        ((0, 2**63), "choice_index"),
        (tuple(range(129)), "129 choices"),
    ],
)
def test_invalid_choice_indices_are_rejected(indices, message):
    async def main():
        async with cluster() as it:
            choices = tuple(Choice(choice_index=index) for index in indices)
            request = msgspec.structs.replace(choices_request(), choices=choices)
            for candidates in ((), ("prefill-1",)):
                with pytest.raises(InvalidRequest, match=message):
                    await it.peer.place("decode-1", request, candidates)
            await it.settled()

    run(main())


@EITHER
def test_one_invalid_choice_rejects_the_request(candidates):
    async def main():
        async with cluster() as it:
            requests = (
                choices_request(prompt=list(range(9000))),
                choices_request({0: [], 1: [5] * 20}),  # max_tokens are sampled already
                choices_request({0: [], 1: [32_000]}),
                choices_request({0: [32_000], 1: []}),
                choices_request(stop_token_ids=(32_000,)),
            )
            for request in requests:
                with pytest.raises(InvalidRequest):
                    await it.peer.place("decode-1", request, candidates)
            await it.settled()

    run(main())
