"""The NATS client against a peer that speaks the gateway's side of the protocol."""

from __future__ import annotations

import ast
import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AsyncExitStack, aclosing
from pathlib import Path
from typing import Any

import pytest
from nats.aio.client import Client
from nats.aio.msg import Msg

from services.client import example_summaries, hearth_nats
from services.client.hearth_nats import ApiError, HearthClient, ResponseLost
from shared.subjects import API_REQUESTS, api_cancel, endpoint_and_client
from shared.transport.server_config import NatsUser
from tests.support.nats_clients import connect_ordered
from tests.support.servers import PASSWORD, NatsServer
from tests.support.waiting import LIMIT_S

BODY = {"messages": [], "seed": 7}
CHECK = "_INBOX.gateway-1.-.check"
ERROR = {"error": {"message": "too many", "type": "t", "param": "n", "code": "overloaded"}}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NatsServer]:
    users = [NatsUser("gateway", "gateway-1", PASSWORD), NatsUser("client", "client-1", PASSWORD)]
    server = NatsServer(tmp_path_factory.mktemp("nats"), users)
    yield server
    server.stop()


class Peer:
    """A gateway: `respond` gets each request but cancellations, with the number of those before."""

    def __init__(self, connection: Client) -> None:
        self.connection = connection
        self.requests: list[tuple[str, str, Any, dict[str, str]]] = []
        self.cancelled: asyncio.Queue[str] = asyncio.Queue()
        self.answers: asyncio.Queue[str] = asyncio.Queue()
        self.respond: Callable[[Msg, int], Awaitable[None]] | None = None

    async def start(self) -> None:
        await self.connection.subscribe("_INBOX.gateway-1.*.>", cb=self._on_answer)
        for _ in range(2):
            await self.connection.flush()

    async def serve(self, respond: Callable[[Msg, int], Awaitable[None]]) -> None:
        self.respond = respond
        await self.connection.subscribe(API_REQUESTS, cb=self._on_request)
        await self.connection.subscribe(api_cancel("*", "gateway-1"), cb=self._on_request)
        for _ in range(2):
            await self.connection.flush()

    async def send(self, request: Msg, number: int, data: bytes = b"", **headers: str) -> None:
        fields = {"Hearth-Seq": str(number), "Hearth-Request": "r1"}
        fields |= {} if number else {"Hearth-Gateway": "gateway-1.-"}
        fields |= {name.replace("_", "-"): text for name, text in headers.items()}
        check = f"{CHECK}.{number}" if "reply" in fields else ""
        fields.pop("reply", None)
        await self.connection.publish(request.reply, data, headers=fields, reply=check)

    async def _on_request(self, request: Msg) -> None:
        assert self.respond is not None
        endpoint, client_id = endpoint_and_client(request.subject)
        body = json.loads(request.data)
        if endpoint == "cancel":
            self.cancelled.put_nowait(body["request"])
            if request.reply:
                await self.connection.publish(request.reply, b'{"cancelled": true}')
            return
        self.requests.append((endpoint, client_id, body, request.headers or {}))
        await self.respond(request, len(self.requests) - 1)

    async def _on_answer(self, message: Msg) -> None:
        self.answers.put_nowait(message.subject)


@pytest.fixture
async def stack() -> AsyncIterator[AsyncExitStack]:
    async with AsyncExitStack() as stack:
        yield stack


@pytest.fixture
async def peer(server: NatsServer, stack: AsyncExitStack) -> Peer:
    connection = await connect_ordered(server.api_url("gateway-1"))
    stack.push_async_callback(connection.close)
    peer = Peer(connection)
    await peer.start()
    return peer


@pytest.fixture
async def client(server: NatsServer, stack: AsyncExitStack) -> HearthClient:
    client = await HearthClient.connect(server.url("client-1"))
    stack.push_async_callback(client.close)
    return client


def event(text: str) -> bytes:
    return json.dumps({"choices": [{"delta": {"content": text}}]}).encode() + b"\n"


async def texts(client: HearthClient) -> list[str]:
    return [
        each["choices"][0]["delta"]["content"] async for each in client.stream("chat", dict(BODY))
    ]


def test_client_is_one_short_file_without_our_modules() -> None:
    source = Path(hearth_nats.__file__).read_text()
    assert len(source.splitlines()) <= 150
    nodes = list(ast.walk(ast.parse(source)))
    names = {each.name for node in nodes if isinstance(node, ast.Import) for each in node.names}
    names |= {node.module or "" for node in nodes if isinstance(node, ast.ImportFrom)}
    assert not [name for name in names if name.partition(".")[0] in ("shared", "services")]


async def test_request_returns_the_body_and_answers_checks(
    client: HearthClient, peer: Peer
) -> None:
    async def respond(request: Msg, _: int) -> None:
        await peer.send(request, 0, reply="yes")
        await peer.connection.publish(request.reply, b'{"tokens": [1, 2]}')

    await peer.serve(respond)
    reply = await client.request("tokenize", {"prompt": "x"}, deadline_s=2.5, affinity="s")
    assert reply == {"tokens": [1, 2]}
    headers = {"Hearth-Deadline-S": "2.5", "Hearth-Affinity": "s", "Hearth-Checks": "true"}
    assert peer.requests == [("tokenize", "client-1", {"prompt": "x"}, headers)]
    assert await asyncio.wait_for(peer.answers.get(), timeout=LIMIT_S) == f"{CHECK}.0"


async def test_stream_yields_events_and_answers_checks_of_an_idle_consumer(
    client: HearthClient, peer: Peer
) -> None:
    async def respond(request: Msg, _: int) -> None:
        await peer.send(request, 0, event("a") + event("b"))
        await peer.send(request, 1, reply="yes")
        await peer.send(request, 2, event("c"), reply="yes")
        await peer.send(request, 3, Hearth_End="stop")

    await peer.serve(respond)
    received = []
    async for each in client.stream("chat", dict(BODY)):
        received.append(each["choices"][0]["delta"]["content"])
        if len(received) == 1:  # while the consumer does not read
            for number in (1, 2):
                answered = await asyncio.wait_for(peer.answers.get(), timeout=LIMIT_S)
                assert answered == f"{CHECK}.{number}"
    assert received == ["a", "b", "c"]
    assert peer.requests[0][2] == {**BODY, "stream": True}
    assert peer.cancelled.empty()


@pytest.mark.parametrize("number", [0, 2, 3])
async def test_lost_message_raises_and_cancels(
    client: HearthClient, peer: Peer, number: int
) -> None:
    async def respond(request: Msg, _: int) -> None:
        await peer.send(request, 0, event("a"))
        await peer.send(request, number, b"" if number == 3 else event("b"))

    await peer.serve(respond)
    with pytest.raises(ResponseLost, match="message 1 of r1 was lost"):
        await texts(client)
    assert await asyncio.wait_for(peer.cancelled.get(), timeout=LIMIT_S) == "r1"


async def test_silence_raises(
    client: HearthClient, peer: Peer, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert hearth_nats.MAX_SILENCE_S < 10
    monkeypatch.setattr(hearth_nats, "MAX_SILENCE_S", 0.1)

    async def respond(request: Msg, _: int) -> None:
        await peer.send(request, 0, event("a"))

    await peer.serve(respond)
    with pytest.raises(ResponseLost, match="no message"):
        await texts(client)


@pytest.mark.parametrize("is_started", [False, True])
async def test_error_has_status_code_and_param(
    client: HearthClient, peer: Peer, is_started: bool
) -> None:
    async def respond(request: Msg, _: int) -> None:
        if is_started:
            await peer.send(request, 0, event("a"))
        fields = {"Hearth_End": "error", "Nats_Service_Error_Code": "429"}
        data = json.dumps(ERROR).encode()
        await peer.send(request, int(is_started), data, **fields, Nats_Service_Error="too many")

    await peer.serve(respond)
    with pytest.raises(ApiError) as caught:
        await texts(client)
    error = caught.value
    assert (error.status, error.code, error.param) == (429, "overloaded", "n")
    assert (str(error), error.body) == ("429: too many", ERROR)
    await client.cancel("last", "gateway-1.-")  # the first: the error cancelled nothing
    assert peer.cancelled.get_nowait() == "last"


async def test_stream_closed_early_is_cancelled(client: HearthClient, peer: Peer) -> None:
    async def respond(request: Msg, _: int) -> None:
        await peer.send(request, 0, event("a"))

    await peer.serve(respond)
    async with aclosing(client.stream("chat", dict(BODY))) as events:
        async for _ in events:
            break
    assert await asyncio.wait_for(peer.cancelled.get(), timeout=LIMIT_S) == "r1"
    assert await client.cancel("r2", "gateway-1.-")
    assert peer.cancelled.get_nowait() == "r2"


async def test_request_without_gateway_or_beyond_the_bound_fails_at_once(
    client: HearthClient, peer: Peer
) -> None:
    with pytest.raises(ApiError, match="503: no gateway"):
        await client.request("models", {})
    with pytest.raises(ApiError, match="503: no gateway"):
        await texts(client)
    with pytest.raises(ApiError, match="413: the request has 94"):
        await client.request("chat", {"x": "a" * 9 * 2**20})


async def test_example_repeats_a_lost_response_with_its_seed(
    client: HearthClient, peer: Peer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(example_summaries, "RETRY_S", 0.0)
    parts = ["The ", "model ", "is ", "small."]

    async def respond(request: Msg, number: int) -> None:
        given = parts if number else parts[:2]
        for place, part in enumerate(given):
            await peer.send(request, place, event(part))
        fields = {} if number else {"Nats_Service_Error_Code": "503", "Nats_Service_Error": "gone"}
        await peer.send(request, len(given), Hearth_End="stop" if number else "error", **fields)

    await peer.serve(respond)
    listening = await example_summaries.serve(client, 0)
    reader, writer = await asyncio.open_connection(*listening.sockets[0].getsockname())
    writer.write(b"A long text.\n")
    assert await asyncio.wait_for(reader.readline(), timeout=LIMIT_S) == b"The model is small.\n"
    first, second = (body for _, _, body, _ in peer.requests)
    assert first == second and first["seed"] is not None
    writer.close()
    listening.close()
