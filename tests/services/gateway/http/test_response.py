"""The body messages that GenerationResponse sends to the web server."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest

from services.gateway.dialects.openai.errors import OpenAIEncoder
from services.gateway.http.connection import EXTENSION, ClientConnection
from services.gateway.http.response import TURN_PARTS, GenerationResponse, joined_in_turns
from services.gateway.output.events import Event, Finished, TextDelta, with_ends
from services.gateway.output.framing import SSE
from services.gateway.output.results import Results
from services.gateway.request.endpoint import ResponseContext
from services.gateway.request.output_merger import OutputMerger
from services.gateway.request.request_output import ClientSlow, RequestOutput
from services.gateway.request.submission import OpenResponse
from services.gateway.streams.receiver import StreamEnd
from services.gateway.text.model_files import ModelFiles
from shared.clock import MonotonicClock
from shared.config import GatewayConfig
from shared.errors import HearthError, Overloaded
from shared.messages import TokenLogprobs
from tests.services.gateway.request.test_request_output import LENGTH, delivery_of
from tests.support.world.clock import VirtualClock, run

BODY = "http.response.body"


KEEP_ALIVE = b"(still here)"


class ShortEncoder(OpenAIEncoder):
    """Each text in parentheses; nothing for an end without a text."""

    def events(self, events: Sequence[Event]) -> Iterator[bytes]:
        for event, _ in with_ends(events):
            match event:
                case TextDelta():
                    yield f"({event.text})".encode()
                case Finished():
                    yield b"()"

    def keep_alive(self) -> bytes:
        return KEEP_ALIVE

    def closing(self) -> bytes:
        return b"(closing)"

    def body(self, results: Results) -> Iterator[bytes]:
        return iter([each.text.encode() for each in results.choices])


def opened(merger: OutputMerger, cancel: Callable[[HearthError | None], None]) -> OpenResponse:
    context = ResponseContext(merger, {}, "r", "m", 0, SSE)  # type: ignore[arg-type]  # no tokens
    return OpenResponse(merger, ShortEncoder(context), is_streamed=True, headers={}, cancel=cancel)


class IdleTransport(asyncio.Transport):
    """A transport on which no byte ever waits."""

    is_aborted = False

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        assert high == 0

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return SimpleNamespace(setsockopt=lambda *option: None) if name == "socket" else default

    def abort(self) -> None:
        self.is_aborted = True


def scope() -> Any:
    connection = ClientConnection(IdleTransport(), 30.0, lambda: None)
    return {"extensions": {EXTENSION: connection}}


async def bodies_of(
    config: GatewayConfig, files: ModelFiles, error: HearthError | None
) -> list[Any]:
    """Body messages of a response whose last token and stream end arrive together."""
    output = delivery_of(config, files, max_tokens=8)
    response = GenerationResponse(
        opened(OutputMerger([output]), lambda error: None), clock=MonotonicClock()
    )
    messages: list[Any] = []

    async def receive() -> Any:
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        messages.append(message)

    output.on_tokens(0, files.tokenizer.encode(["a"]), ())
    if error is None:
        output.on_finish(0, LENGTH)
    output.on_end(StreamEnd(error, "w", 0))
    await response(scope(), receive, send)
    return [(each["body"], each["more_body"]) for each in messages if each["type"] == BODY]


async def test_closing_is_sent_with_the_last_delta(
    gateway_config: GatewayConfig, model_files: ModelFiles
) -> None:
    bodies = await bodies_of(gateway_config, model_files, None)
    assert bodies == [(b"(a)(closing)", False)]


async def test_body_of_many_short_parts_leaves_turns_to_others() -> None:
    """Such as the offsets of a long prompt: its bytes are few, and its items take as long."""
    num_computed, seen = 0, [0]

    def parts() -> Iterator[bytes]:
        nonlocal num_computed
        for _ in range(100 * TURN_PARTS):
            num_computed += 1
            yield b"12345678"

    async def watch() -> None:
        while True:
            seen.append(num_computed)
            await asyncio.sleep(0)

    other = asyncio.create_task(watch())
    (body,) = [each async for each in joined_in_turns(parts())]
    other.cancel()
    assert body == b"12345678" * 100 * TURN_PARTS
    assert max(after - before for before, after in pairwise(seen)) == TURN_PARTS


async def test_text_before_a_failure_is_sent_before_the_error(
    gateway_config: GatewayConfig, model_files: ModelFiles
) -> None:
    bodies = await bodies_of(gateway_config, model_files, HearthError("broken"))
    assert bodies[0] == (b"(a)", True)
    assert b"broken" in bodies[1][0] and b"[DONE]" not in bodies[1][0]


# ── silence ──────────────────────────────────────────────────────────────────────────────────────


class Case:
    """A streamed response on the virtual clock; `sent`: (seconds, status or body) of each send."""

    def __init__(self, output: RequestOutput) -> None:
        self.output = output
        self.sent: list[tuple[float, Any]] = []
        self.errors: list[HearthError] = []
        self.num_polls = 0  # of the clock
        self.scope = scope()
        self.transport = self.scope["extensions"][EXTENSION]._transport
        self.can_send = asyncio.Event()
        self.can_send.set()
        self.merger = OutputMerger([output])
        self.response = GenerationResponse(opened(self.merger, self._cancel), clock=self)

    def _cancel(self, error: HearthError | None) -> None:
        assert error is not None
        self.errors.append(error)

    def now(self) -> float:
        self.num_polls += 1
        assert self.num_polls < 1000, "the response never waits"
        return VirtualClock().now()

    async def sleep(self, delay_s: float) -> None:
        await VirtualClock().sleep(delay_s)

    async def receive(self) -> Any:
        while not self.transport.is_aborted:
            await asyncio.sleep(0.01)
        return {"type": "http.disconnect"}

    async def send(self, message: Any) -> None:
        await self.can_send.wait()
        self.sent.append((VirtualClock().now(), message.get("status", message.get("body"))))

    def start(self) -> asyncio.Task[None]:
        return asyncio.create_task(self.response(self.scope, self.receive, self.send))


def test_silent_stream_sends_head_and_comments(
    gateway_config: GatewayConfig, model_files: ModelFiles
) -> None:
    async def main() -> None:
        case = Case(delivery_of(gateway_config, model_files, max_tokens=8))
        response = case.start()
        await asyncio.sleep(25)
        assert case.sent == [(10, 200), (10, KEEP_ALIVE), (20, KEEP_ALIVE)]
        case.output.on_tokens(0, model_files.tokenizer.encode(["a"]), ())
        await asyncio.sleep(14)
        case.output.on_finish(0, LENGTH)
        case.output.on_end(StreamEnd(None, "w", 0))
        await response
        assert case.sent[3:] == [(25, b"(a)"), (35, KEEP_ALIVE), (39, b"()(closing)")]

    run(main())


@pytest.mark.parametrize("after_s", [9.9, 10.1])
def test_error_has_its_status_for_ten_seconds(
    gateway_config: GatewayConfig, model_files: ModelFiles, after_s: float
) -> None:
    async def main() -> None:
        case = Case(delivery_of(gateway_config, model_files, max_tokens=8))
        response = case.start()
        await asyncio.sleep(after_s)
        case.output.on_end(StreamEnd(Overloaded("full"), None, 0))
        await response
        (_, status), *_, (ended_s, body) = case.sent
        assert ended_s == after_s and b"overloaded" in body
        if after_s < 10:
            assert status == 429 and len(case.sent) == 2
        else:
            assert status == 200 and body.startswith(b"data: ") and case.sent[1][1] == KEEP_ALIVE

    run(main())


def test_no_comment_follows_an_end_that_waited(
    gateway_config: GatewayConfig, model_files: ModelFiles
) -> None:
    """The client reads nothing for 15 s, also not the head that the silence has caused."""

    async def main() -> None:
        case = Case(delivery_of(gateway_config, model_files, max_tokens=8))
        response = case.start()
        case.can_send.clear()
        await asyncio.sleep(12)
        case.output.on_end(StreamEnd(Overloaded("full"), None, 0))
        await asyncio.sleep(15)
        case.can_send.set()
        await response
        bodies = [body for _, body in case.sent]
        assert bodies[0] == 200 and b"overloaded" in bodies[1] and len(bodies) == 2

    run(main())


def test_comments_end_with_the_response(
    gateway_config: GatewayConfig, model_files: ModelFiles
) -> None:
    """The client leaves the end unread for longer than the silence before a comment."""

    async def main() -> None:
        case = Case(delivery_of(gateway_config, model_files, max_tokens=8))
        connection = case.scope["extensions"][EXTENSION]
        connection._is_empty.clear()
        response = case.start()
        case.output.on_finish(0, LENGTH)
        case.output.on_end(StreamEnd(None, "w", 0))
        await asyncio.sleep(25)
        assert not response.done() and case.num_polls < 10
        connection.bytes_sent()
        await response
        assert [body for _, body in case.sent] == [200, b"()(closing)"]

    run(main())


# ── bounds ───────────────────────────────────────────────────────────────────────────────────────


def test_stream_with_too_much_unread_output_is_aborted(
    gateway_config: GatewayConfig, model_files: ModelFiles
) -> None:
    async def main() -> None:
        output = delivery_of(gateway_config, model_files, max_tokens=400, num_logprobs=20)
        case = Case(output)
        bound = case.merger.unsent._unsent.max_response_bytes = 8 * 1024
        case.start()
        case.can_send.clear()
        (token_id,) = model_files.tokenizer.encode(["a"])
        scored = TokenLogprobs(-1.0, tuple(range(20)), (-1.0,) * 20)
        num_fed = 0
        while not case.transport.is_aborted:
            output.on_tokens(0, (token_id,), (scored,))
            num_fed += 1
            await asyncio.sleep(0.01)
        assert bound / 250 < num_fed < bound / 176 + 4
        await asyncio.sleep(0.1)
        assert isinstance(case.errors[-1], ClientSlow)

    run(main())
