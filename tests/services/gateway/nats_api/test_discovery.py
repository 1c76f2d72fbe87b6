"""PING, INFO and STATS, byte for byte from a socket."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import pytest

from services.gateway.dialects.openai.chat import (
    ChatCompletion,
    ChatCompletionChunk,
    ChatCompletionRequest,
)
from services.gateway.nats_api.discovery import (
    MAX_PER_CLIENT,
    MAX_PER_SECOND,
    Discovery,
    EndpointInfo,
    schema_of,
)
from services.gateway.nats_api.endpoint_counts import EndpointCounts
from shared.errors import Overloaded
from shared.transport.bus import NatsBus
from shared.transport.server_config import NatsUser
from tests.support.servers import PASSWORD, NatsServer
from tests.support.waiting import LIMIT_S

INBOX = "_INBOX.client-1.abc"
METADATA = {"gateway": "gateway-1"}
ENDPOINTS = [
    EndpointInfo(name="chat", subject="a.chat.*", queue_group="g", metadata={"streams": "true"}),
    EndpointInfo(name="cancel", subject="a.cancel.*", queue_group="", metadata={}),
]
IDENTITY = {"name": "hearth", "id": "id1", "version": "0.1.0", "metadata": METADATA}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NatsServer]:
    users = [
        NatsUser("gateway", "gateway-1", PASSWORD),
        NatsUser("client", "client-1", PASSWORD),
        NatsUser("client", "client-2", PASSWORD),
    ]
    server = NatsServer(tmp_path_factory.mktemp("nats"), users)
    yield server
    server.stop()


@pytest.fixture
async def bus(server: NatsServer) -> AsyncIterator[NatsBus]:
    bus = await NatsBus.connect(server.url("gateway-1"), process_id="gateway-1", to_clients=True)
    yield bus
    await bus.close()


def discovery_of(
    bus: NatsBus, *, version: str = "0.1.0", now: Callable[[], float] = lambda: 1.0
) -> Discovery:
    counts = {each.name: EndpointCounts() for each in ENDPOINTS}
    counts["chat"].num_requests = 3
    counts["chat"].ended(0.5)
    counts["chat"].ended(0.000_000_5, Overloaded("the secret of another client"))
    return Discovery(
        bus.untyped,
        now,
        ENDPOINTS,
        counts,
        service_id="id1",
        version=version,
        metadata=METADATA,
        started_at=1_700_000_000.25,
    )


class RawClient:
    """Speaks NATS's protocol by hand."""

    def __init__(
        self, server: NatsServer, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        self.server = server
        self._reader = reader
        self._writer = writer

    @classmethod
    async def connect(cls, server: NatsServer, name: str = "client-1") -> RawClient:
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        await reader.readline()  # INFO
        login = {"user": name, "pass": PASSWORD, "verbose": False, "headers": True}
        writer.write(f"CONNECT {json.dumps(login)}\r\nSUB _INBOX.{name}.abc 1\r\n".encode())
        return cls(server, reader, writer)

    async def request(self, subject: str, reply: str = INBOX) -> bytes:
        """Returns the next message's data."""
        self._writer.write(f"PUB {subject} {reply} 0\r\n\r\n".encode())
        return await self.next()

    async def next(self) -> bytes:
        async with asyncio.timeout(LIMIT_S):
            while not (line := await self._reader.readline()).startswith((b"MSG ", b"HMSG ")):
                assert line in (b"PING\r\n", b"PONG\r\n"), line
                self._writer.write(b"PONG\r\n")
            data = await self._reader.readexactly(int(line.split()[-1]) + 2)
        return data[:-2]

    def close(self) -> None:
        self._writer.close()


@pytest.fixture
async def raw(server: NatsServer) -> AsyncIterator[RawClient]:
    client = await RawClient.connect(server)
    yield client
    client.close()


@pytest.mark.parametrize("suffix", ["", ".hearth", ".hearth.id1"])
async def test_responses_have_exactly_the_fields_of_the_protocol(
    bus: NatsBus, raw: RawClient, suffix: str
) -> None:
    stop = await discovery_of(bus).start()
    await bus.flush()
    prefix = "io.nats.micro.v1"
    ping = json.loads(await raw.request(f"$SRV.PING{suffix}"))
    assert ping == {"type": f"{prefix}.ping_response", **IDENTITY}
    info = json.loads(await raw.request(f"$SRV.INFO{suffix}"))
    description = info.pop("description")
    assert isinstance(description, str) and description
    chat = {"name": "chat", "subject": "a.chat.*", "queue_group": "g"}
    cancel = {"name": "cancel", "subject": "a.cancel.*", "queue_group": ""}
    endpoints: list[dict[str, Any]] = [
        {**chat, "metadata": {"streams": "true"}},
        {**cancel, "metadata": {}},
    ]
    assert info == {"type": f"{prefix}.info_response", **IDENTITY, "endpoints": endpoints}
    stats = json.loads(await raw.request(f"$SRV.STATS{suffix}"))
    names = ("num_requests", "num_errors", "last_error")
    times = ("processing_time", "average_processing_time")
    numbers = zip((*names, *times), (3, 1, "429 overloaded", 500_000_500, 166_666_833), strict=True)
    nothing = zip((*names, *times), (0, 0, "", 0, 0), strict=True)
    assert stats == {
        "type": f"{prefix}.stats_response",
        **IDENTITY,
        "started": "2023-11-14T22:13:20.250000Z",
        "endpoints": [{**chat, **dict(numbers)}, {**cancel, **dict(nothing)}],
    }
    await stop()


async def test_other_services_and_other_reply_subjects_get_no_response(
    bus: NatsBus, raw: RawClient
) -> None:
    """A gateway that sent to any reply subject would lend its permissions to the client."""
    sent: list[str] = []
    discovery = discovery_of(bus)
    send = discovery._messages.send

    async def recorded(subject: str, *arguments: Any) -> None:
        sent.append(subject)
        await send(subject, *arguments)

    discovery._messages.send = recorded  # type: ignore[method-assign]
    await discovery.start()
    await bus.flush()
    command = "hearth.v1.decode.decode-1.-.control.gateway-1.-"
    of_process = "_INBOX.gateway-1.-.abc.check.1.1"
    for subject, reply in (
        *(("$SRV.PING.other", INBOX), ("$SRV.PING.hearth.id2", INBOX), ("$SRV.PONG", INBOX)),
        *(
            ("$SRV.PING", command),
            ("$SRV.PING", of_process),
            ("$SRV.PING", "_INBOX.client-1"),
            ("$SRV.STATS.hearth", ""),
            ("$SRV.INFO", "$SRV.PING"),
        ),
    ):
        raw._writer.write(f"PUB {subject} {reply} 0\r\n\r\n".encode())
    assert json.loads(await raw.request("$SRV.PING"))["id"] == "id1"
    assert sent == [INBOX]


async def test_responses_of_a_second_are_limited(bus: NatsBus, raw: RawClient) -> None:
    """Of each client: one that asks more takes nothing from another."""
    time = 1.0
    await discovery_of(bus, now=lambda: time).start()
    await bus.flush()
    for _ in range(MAX_PER_CLIENT):
        await raw.request("$SRV.PING")
    raw._writer.write(f"PUB $SRV.PING.hearth {INBOX} 0\r\n\r\n".encode())
    raw._writer.write(b"PING\r\n")
    assert await raw._reader.readline() == b"PONG\r\n"
    await bus.flush()
    other = await RawClient.connect(raw.server, "client-2")
    assert json.loads(await other.request("$SRV.PING", "_INBOX.client-2.abc"))["id"] == "id1"
    other.close()
    time = 2.0
    assert "endpoints" in json.loads(await raw.request("$SRV.INFO")), "the last PING has a response"


async def test_responses_to_false_names_are_limited(bus: NatsBus) -> None:
    discovery = discovery_of(bus)
    turns = [discovery._take_turn(f"client-{number}") for number in range(2 * MAX_PER_SECOND)]
    assert turns.count(True) == MAX_PER_SECOND


@pytest.mark.parametrize(("version", "shown"), [("0", "0.0.0"), ("1.2.3-rc.1+a", "1.2.3-rc.1+a")])
async def test_version_is_semantic(bus: NatsBus, version: str, shown: str) -> None:
    assert discovery_of(bus, version=version).stats().version == shown


def test_schemas_describe_requests_and_both_kinds_of_responses() -> None:
    schema = json.loads(schema_of((ChatCompletionRequest,)))
    request = schema["$defs"]["ChatCompletionRequest"]
    assert request["required"] == ["messages"]
    assert {"temperature", "seed", "stream"} <= set(request["properties"])
    both = json.loads(schema_of((ChatCompletion, ChatCompletionChunk)))
    assert [each["$ref"].rpartition("/")[2] for each in both["anyOf"]] == [
        "ChatCompletion",
        "ChatCompletionChunk",
    ]
    for reference in json.dumps(both).split('"$ref": "')[1:]:
        path = reference.partition('"')[0]
        assert path.startswith("#/$defs/") and path.rpartition("/")[2] in both["$defs"], path
