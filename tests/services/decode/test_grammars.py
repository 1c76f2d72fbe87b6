"""Decode workers sample under the grammar of a request: alone, forked, disaggregated, resumed."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import pytest

from shared.engine.features import FEATURES
from shared.engine.token_masks.worker_grammars import WorkerGrammars
from shared.errors import GrammarFailed, GrammarReplayFailed, InvalidRequest, WorkerUnfit
from shared.grammar.spec import GRAMMAR_FEATURE, GrammarSpec
from shared.messages import Finish, Request
from tests.services.decode.test_handoff import PROMPT, Cluster
from tests.shared.grammar.support import HOSTILE_REGEX, InlineThreads, encode, vocabulary
from tests.support.world.bus import SimulatedNetwork
from tests.support.world.clock import run
from tests.support.world.kv_link import DataPlane
from tests.support.world.workers import EOS, Peer, SimulatedWorker, request_of

VOCAB_SIZE = 32_000
WORDS = GrammarSpec(kind="regex", source="(alpha|beta|gamma|[a-c]{3}) ([0-9]{2} ){2,6}end")
EITHER = pytest.mark.parametrize("candidates", [(), ("prefill-1",)], ids=["local", "handoff"])


class GrammarCluster(Cluster):
    """Its decode worker has grammars whose jobs run at once, unless `threads` holds them."""

    def __init__(self, **options: Any) -> None:
        self.network, plane = SimulatedNetwork(), DataPlane()
        self.peer = Peer(self.network)
        self.threads = InlineThreads()
        grammars = WorkerGrammars(vocabulary(VOCAB_SIZE, EOS), self.threads)
        self.prefills = [
            SimulatedWorker(self.network, plane, "prefill-1", ("prefill",), features=FEATURES)
        ]
        self.decode = SimulatedWorker(
            self.network,
            plane,
            "decode-1",
            ("decode",),
            **{"features": FEATURES, "grammars": grammars, **options},
        )
        self.workers = [*self.prefills, self.decode]

    async def counts(self) -> tuple[int, int]:
        """Late masks and failed grammars, as its heartbeats report them."""
        await asyncio.sleep(2)  # virtual
        heartbeat = self.peer.health_monitor.fleet.heartbeat_of("decode-1")
        assert heartbeat is not None
        assert heartbeat.load is not None
        return heartbeat.load.num_late_masks, heartbeat.load.num_failed_grammars


@asynccontextmanager
async def cluster(**options: Any) -> AsyncIterator[GrammarCluster]:
    made = GrammarCluster(**options)
    for each in (made.peer, *made.workers):
        await each.start()
    try:
        yield made
        await made.settled()
    finally:
        for each in (*made.workers, made.peer):
            await each.stop()


def play(test: Callable[[GrammarCluster], Awaitable[None]], **options: Any) -> None:
    async def main() -> None:
        async with cluster(**options) as it:
            await test(it)

    run(main())


def constrained(spec: GrammarSpec = WORDS, **options: Any) -> Request:
    request = request_of(
        PROMPT, **{"temperature": 1.0, "max_tokens": 100, "grammar": spec, **options}
    )
    return msgspec.structs.replace(request, needs=(GRAMMAR_FEATURE,))


def output_of(
    request: Request, candidates: tuple[str, ...] = (), choice_index: int = 0
) -> list[int]:
    outputs: list[list[int]] = []

    async def test(it: GrammarCluster) -> None:
        placement_id = await it.peer.place("decode-1", request, candidates)
        received = await it.peer.finished(placement_id, choice_index)
        assert received.finish is not None
        assert received.finish.reason == "stop"
        outputs.append(received.output)

    play(test)
    return outputs[0]


def failed(finish: Finish | None) -> str:
    assert finish is not None
    assert finish.failure is not None
    return finish.failure.code


@EITHER
def test_output_matches_the_grammar(candidates: tuple[str, ...]) -> None:
    output = output_of(constrained(), candidates)
    matcher = vocabulary(VOCAB_SIZE, EOS).compile(WORDS.kind, WORDS.source)
    assert matcher.accept(output) == len(output) > 5
    assert matcher.is_complete
    assert output == output_of(constrained())


@EITHER
@pytest.mark.parametrize("num_before", [1, 4])
def test_resumed_output_is_the_undisturbed_one(
    num_before: int, candidates: tuple[str, ...]
) -> None:
    straight = output_of(constrained())
    before = straight[:num_before]
    assert before + output_of(constrained(output=before), candidates) == straight


@EITHER
def test_every_choice_has_its_own_grammar(candidates: tuple[str, ...]) -> None:
    expected = [
        output_of(constrained(outputs={index: []}), choice_index=index) for index in range(3)
    ]
    assert len({tuple(output) for output in expected}) == 3

    async def test(it: GrammarCluster) -> None:
        request = constrained(outputs={0: [], 1: [], 2: expected[2][:3]})
        placement_id = await it.peer.place("decode-1", request, candidates)
        received = [await it.peer.finished(placement_id, index) for index in range(3)]
        outputs = [each.output for each in received]
        assert outputs == [expected[0], expected[1], expected[2][3:]]

    play(test)


def test_preempted_requests_give_the_same_tokens() -> None:
    requests = [constrained(seed=seed) for seed in range(4)]
    expected = [output_of(request) for request in requests]

    async def test(it: GrammarCluster) -> None:
        placed = [await it.peer.place("decode-1", request) for request in requests]
        received = [await it.peer.finished(placement_id) for placement_id in placed]
        assert [each.output for each in received] == expected
        assert sum(each.finish.served.num_preemptions for each in received if each.finish) > 0

    play(test, num_blocks=20)


def test_start_is_answered_before_the_grammar_is_compiled() -> None:
    """No token is sampled before it is; then the tokens are the same."""
    expected = output_of(constrained())

    async def test(it: GrammarCluster) -> None:
        it.threads.is_holding = True
        placement_id = await it.peer.place("decode-1", constrained())
        free = await it.run(request_of(PROMPT[:30]), ())
        assert len(free.output) == 20
        assert not it.peer.of(placement_id).output
        it.threads.release()
        assert (await it.peer.finished(placement_id)).output == expected
        assert await it.counts() == (1, 0)

    play(test)


@pytest.mark.parametrize(
    ("spec", "output", "error"),
    [
        (GrammarSpec(kind="regex", source=HOSTILE_REGEX), "", GrammarFailed),
        (GrammarSpec(kind="regex", source="["), "", InvalidRequest),
        (WORDS, "delta", GrammarReplayFailed),
    ],
)
def test_grammar_that_cannot_be_followed_fails_its_request_alone(
    spec: GrammarSpec, output: str, error: type[Exception]
) -> None:
    expected = output_of(constrained())

    async def test(it: GrammarCluster) -> None:
        request = constrained(spec, output=encode(output))
        bad = await it.peer.place("decode-1", request)
        good = await it.peer.place("decode-1", constrained())
        assert failed((await it.peer.finished(bad)).finish) == error.code
        assert (await it.peer.finished(good)).output == expected
        assert (await it.counts())[1] == (error is not InvalidRequest)

    play(test)


def test_choice_whose_grammar_fails_ends_alone() -> None:
    expected = output_of(constrained(outputs={0: []}))

    async def test(it: GrammarCluster) -> None:
        request = constrained(outputs={0: [], 1: encode("delta")})
        placement_id = await it.peer.place("decode-1", request)
        bad = await it.peer.finished(placement_id, 1)
        assert failed(bad.finish) == GrammarReplayFailed.code
        assert (await it.peer.finished(placement_id, 0)).output == expected

    play(test)


def test_mask_that_takes_too_long_fails_its_request_alone() -> None:
    async def test(it: GrammarCluster) -> None:
        it.threads.is_holding = True
        bad = await it.peer.place("decode-1", constrained())
        await it.run(request_of(PROMPT[:30]), ())
        it.threads.held[0].time_out()
        it.threads.release()
        assert failed((await it.peer.finished(bad)).finish) == GrammarFailed.code

    play(test)


@pytest.mark.parametrize("needs", [(), (GRAMMAR_FEATURE,)])
def test_worker_without_grammars_refuses_the_request(needs: tuple[str, ...]) -> None:
    """Even if the request does not say what it needs: its output would be free."""

    async def test(it: GrammarCluster) -> None:
        request = msgspec.structs.replace(constrained(), needs=needs)
        with pytest.raises(WorkerUnfit, match="decode-1 does not have grammar/1"):
            await it.peer.place("decode-1", request)
        assert it.decode.is_empty

    play(test, features=(), grammars=None)


def test_aborted_request_leaves_no_jobs() -> None:
    async def test(it: GrammarCluster) -> None:
        it.threads.is_holding = True
        placement_id = await it.peer.place("decode-1", constrained())
        await it.peer.abort("decode-1", placement_id)
        await it.settled()
        it.threads.release()
        assert all(job.is_done for job in it.threads.watched)

    play(test)
