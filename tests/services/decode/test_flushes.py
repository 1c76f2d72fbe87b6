"""Results besides tokens (logprobs, prompt logprobs, embeddings), and rejected options."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import numpy as np
import pytest

from shared.engine.executors.timing_executor import STATE_BYTES
from shared.errors import InvalidRequest
from shared.messages import Request
from tests.services.decode.test_handoff import PROMPT, cluster
from tests.support.world.clock import run
from tests.support.world.workers import request_of

ALL = {
    "temperature": 1.0,
    "repetition_penalty": 1.2,
    "frequency_penalty": 0.5,
    "logit_bias": ((40, 1.5),),
    "bad_words": ((50,), (60, 61)),
    "num_logprobs": 2,
}


def embedding_request(pooling: str, **options) -> Request:
    return msgspec.structs.replace(request_of(PROMPT, **options), pooling=pooling)


@pytest.mark.parametrize("mode", ["raw", "processed"])
def test_logprobs_are_equal_if_pushed_resumed_or_resent(mode):
    options = {**ALL, "logprobs_mode": mode}

    async def main():
        async with cluster() as it:
            pushed = await it.run(request_of(PROMPT, **options))
            assert pushed.finish.served.prefill_worker_id == "prefill-1"
            local = await it.run(request_of(PROMPT, **options), ())
            assert len(local.output) == len(local.logprobs) == 20
            assert all(len(each.top_token_ids) == 2 for each in local.logprobs.values())
            assert (pushed.output, pushed.logprobs) == (local.output, local.logprobs)
            output = local.output[:7]
            resumed = await it.run(request_of(PROMPT, output=output, **options), ("prefill-2",))
            assert resumed.output == local.output[7:]
            assert resumed.logprobs == {n: local.logprobs[n] for n in range(7, 20)}
            placement_id = await it.peer.place("decode-1", request_of(PROMPT, **options))
            received = await it.peer.finished(placement_id)
            received.logprobs.clear()
            await it.peer.resend("decode-1", placement_id, 12)
            assert received.logprobs == {n: local.logprobs[n] for n in range(12, 20)}

    run(main())


def test_prompt_logprobs_are_computed_by_local_prefill():
    async def main():
        async with cluster() as it:
            plain = await it.run(request_of(PROMPT))
            with_logprobs = await it.run(request_of(PROMPT, num_prompt_logprobs=1))
            assert with_logprobs.output == plain.output
            assert len(with_logprobs.prompt_logprobs) == len(PROMPT) - 1
            served = with_logprobs.finish.served
            assert (served.prefill_worker_id, served.num_cached_tokens) == (None, 0)
            resumed = await it.run(
                request_of(PROMPT, num_prompt_logprobs=1, output=plain.output[:5])
            )
            assert resumed.prompt_logprobs == with_logprobs.prompt_logprobs
            await it.settled()

    run(main())


@pytest.mark.parametrize("pooling", ["last", "mean"])
def test_embedding_is_computed_locally_and_sent_with_finish(pooling):
    async def main():
        async with cluster() as it:
            vectors = []
            for _ in range(2):  # the second run finds a filled cache
                received = await it.run(embedding_request(pooling))
                assert (received.output, received.finish.reason) == ([], "stop")
                assert received.finish.served.prefill_worker_id is None
                vectors.append(np.frombuffer(received.finish.embedding, dtype="<f4"))
            assert vectors[0].shape == (STATE_BYTES,)
            assert vectors[0].any() and vectors[0].tolist() == vectors[1].tolist()
            await it.settled()

    run(main())


def test_model_without_a_head_gives_embeddings_only():
    async def main():
        async with cluster() as it:
            it.decode.worker.served = replace(it.decode.worker.served, has_head=False)
            with pytest.raises(InvalidRequest, match="embeddings only") as raised:
                await it.peer.place("decode-1", request_of(PROMPT))
            assert raised.value.param == "model"
            assert (await it.run(embedding_request("last"))).finish.reason == "stop"

    run(main())


@pytest.mark.parametrize(
    "options",
    [
        {"logit_bias": ((32_000, 1.0),)},
        {"logit_bias": ((-1, 1.0),)},
        {"bad_words": ((5, 32_000),)},
        {"bad_words": ((-5,),)},
        {"num_prompt_logprobs": 21},
        {"repetition_penalty": 0.0},
    ],
    ids=str,
)
def test_options_that_would_fail_a_step_are_rejected(options):
    async def main():
        async with cluster() as it:
            placement_id = await it.peer.place("decode-1", request_of(PROMPT))
            with pytest.raises(InvalidRequest):
                await it.peer.place("decode-1", request_of(PROMPT, **options))
            assert (await it.peer.finished(placement_id)).finish.reason == "length"
            await it.settled()

    run(main())


def test_prompt_logprobs_too_large_for_a_message_are_rejected():
    async def main():
        async with cluster(num_blocks=1024) as it:
            long = list(range(100, 8000)) + list(range(100, 2000))
            with pytest.raises(InvalidRequest, match="prompt") as raised:
                await it.peer.place("decode-1", request_of(long, num_prompt_logprobs=20))
            assert raised.value.param == "prompt_logprobs"

    run(main())


def test_logprobs_too_large_to_retain_are_rejected():
    """The worker retains a request's output until the gateway acknowledges its end."""

    async def main():
        async with cluster() as it:
            with pytest.raises(InvalidRequest, match="logprobs of this request") as raised:
                await it.peer.place(
                    "decode-1", request_of(PROMPT, num_logprobs=20, max_tokens=400_000)
                )
            assert raised.value.param == "logprobs"

    run(main())
