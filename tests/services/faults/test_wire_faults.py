"""Messages of any content, on every subject that a process receives, end no process.

They come from rogue processes and clients with true credentials, beside requests of others.
"""

from __future__ import annotations

import asyncio
import copy
import random
from contextlib import AsyncExitStack
from typing import Any
from urllib.parse import urlsplit

import msgspec
import nats
import pytest
import structlog
from nats.aio.client import Client

from shared.errors import InvalidRequest
from shared.messages import Failure
from shared.subjects import SUBMIT, api_cancel, api_request, permissions, sender_of
from shared.transport.nats_client import DirectClient
from tests.fuzz.mutations import BYTES, LISTS, NUMBERS, TEXTS, paths
from tests.support.services.live_cluster import NATS_PASSWORD, PROCESSES, LiveCluster
from tests.support.waiting import LIMIT_S
from tests.support.world.bus import matches

pytestmark = pytest.mark.asyncio(loop_scope="module")

VALUES = (NUMBERS, TEXTS, BYTES, LISTS, (None, True))
PROMPT = "a request of one tenant, long enough for prefill to push"
ENDPOINTS = ("chat", "completions", "embeddings", "messages", "tokenize", "models", "cancel", "no")
ODD_TRACE = {"Hearth-Checks": "true", "traceparent": "x" * 99}
FAULTS = ("error", "exception", "critical")  # levels of what no handler expects
ODD_HEADERS = (None, {"Hearth-Deadline-S": "nan"}, ODD_TRACE)


def nested(depth: int, opening: bytes, end: bytes) -> bytes:
    return opening * depth + end


RAW = (
    *(b"", b"\x00", b"\xc1", b"\xff" * 9, b"{", b"[[", b'{"a":', b"\x93\x01", b"null", b"\xc0"),
    nested(10_000, b"\x91", b"\xc0"),
    nested(10_000, b"\x81\xa1a", b"\xc0"),
    nested(10_000, b"[", b""),
    nested(10_000, b'{"messages":', b"1"),
    msgspec.msgpack.encode({"request": 2**64 - 1, "first": -(2**63)}),
    msgspec.msgpack.encode([float("nan"), float("inf"), -(2**63), 2**64 - 1]),
    msgspec.msgpack.encode(msgspec.msgpack.Ext(5, b"x" * 40)),
    b"\xdf\xff\xff\xff\xff",  # a map of 2**32 - 1 entries
    b"\xdd\xff\xff\xff\xff",
    b'{"messages": [{"role": "user", "content": "hi"}], "seed": ' + b"9" * 400 + b"}",
    random.Random(1).randbytes(70_000),
    bytes(3 << 20),
)


@pytest.mark.parametrize("per_value", [1, pytest.param(3, marks=pytest.mark.long)])
async def test_no_message_ends_a_process_or_a_request_of_others(
    cluster: LiveCluster, ended: list[object], monkeypatch: pytest.MonkeyPatch, per_value: int
) -> None:
    sent = await recorded(cluster, monkeypatch)
    expected = await text_of(cluster)
    draw = random.Random(7)
    is_over = asyncio.Event()
    others = asyncio.create_task(chats(cluster, is_over))
    async with AsyncExitStack() as stack:
        lines = stack.enter_context(structlog.testing.capture_logs())
        for role in (*PROCESSES, "operator"):
            rogue = await connected(stack, cluster, f"{role}-2")
            for subject, data in messages_of(role, sent):
                for number, payload in enumerate(payloads(data, draw, per_value)):
                    reply = f"_INBOX.{role}-2.-.{len(subject)}.{number}"
                    await rogue.publish(subject, payload, reply=reply)
                await rogue.flush(timeout=30)
            if role == "gateway":
                assert await reply_to_unreadable(rogue) == InvalidRequest.code
        client = await connected(stack, cluster, "client-1")
        for subject in (
            *(api_request(endpoint, "client-1") for endpoint in ENDPOINTS),
            api_cancel("client-1", "gateway-1"),
            *("$SRV.PING", "$SRV.STATS.hearth", "$SRV.>.x"),
        ):
            for payload in RAW:
                headers = draw.choice(ODD_HEADERS)
                await client.publish(subject, payload, reply="_INBOX.client-1.a", headers=headers)
            await client.flush(timeout=30)
    is_over.set()
    async with asyncio.timeout(LIMIT_S):
        texts = await others
        assert texts and set(texts) == {expected}
        assert await text_of(cluster) == expected
    assert ended == []
    assert [each for each in lines if each["log_level"] in FAULTS] == []


async def reply_to_unreadable(rogue: Client) -> str:
    """The code of a scheduler's reply to a request that is no message."""
    inbox = "_INBOX.gateway-2.-.unreadable"
    replies = await rogue.subscribe(inbox)
    await rogue.publish(f"{SUBMIT}.gateway-2.-", b"\xc1", reply=inbox)
    reply = await replies.next_msg(timeout=LIMIT_S)
    return msgspec.msgpack.decode(reply.data, type=Failure).code


async def recorded(
    cluster: LiveCluster, monkeypatch: pytest.MonkeyPatch
) -> dict[str, dict[str, bytes]]:
    """One message of each subject that a process sends for requests, by the sender."""
    found: dict[str, dict[str, bytes]] = {}
    publish = DirectClient.publish

    async def record(self: DirectClient, subject: str, payload: bytes = b"", **fields: Any) -> None:
        if subject.startswith("hearth.v1.") and ".api." not in subject:
            found.setdefault(sender_of(subject), {})[subject] = payload
        await publish(self, subject, payload, **fields)

    with monkeypatch.context() as patch:
        patch.setattr(DirectClient, "publish", record)
        for _ in range(2):
            await text_of(cluster)
        await asyncio.sleep(1.0)  # heartbeats, and KV events
    return found


def messages_of(role: str, sent: dict[str, dict[str, bytes]]) -> list[tuple[str, bytes]]:
    """As `{role}-2` would send them; and one on each further subject that its credential may use,
    to the processes of the cluster.
    """
    own, rogue = f"{role}-1", f"{role}-2"
    found = {
        subject.replace(own, rogue): data.replace(own.encode(), rogue.encode())
        for subject, data in sent.get(own, {}).items()
    }
    any_data = next(iter(found.values()), b"\x80")
    for pattern in permissions(role, rogue).publish:  # type: ignore[arg-type]
        if any(matches(pattern, subject) for subject in found):
            continue
        for target in PROCESSES:
            subject = pattern.replace(f"{rogue}.*", f"{rogue}.-", 2)
            subject = subject.replace("hearth.v1.*.*.*", f"hearth.v1.{target}.{target}-1.-")
            subject = subject.replace(f"hearth.v1.{target}.*.*", f"hearth.v1.{target}.{target}-1.-")
            if "*" not in subject:
                found[subject] = any_data
    return list(found.items())


def payloads(data: bytes, draw: random.Random, per_value: int) -> list[bytes]:
    """Those of any message, and `per_value` for each value of this one."""
    tree = msgspec.msgpack.decode(data)
    others = [spoiled(tree, path, draw) for path in paths(tree) if path for _ in range(per_value)]
    return [*RAW, data[: len(data) // 2], *others]


def spoiled(tree: Any, path: tuple[Any, ...], draw: random.Random) -> bytes:
    """The value at the path is another one, mostly of its kind, or missing."""
    tree = copy.deepcopy(tree)
    parent = tree
    for step in path[:-1]:
        parent = parent[step]
    key, value = path[-1], parent[path[-1]]
    if isinstance(parent, dict) and draw.random() < 0.2:
        del parent[key]
        return msgspec.msgpack.encode(tree)
    kinds: tuple[Any, ...] = VALUES
    if isinstance(value, int | float) and draw.random() < 0.7:
        kinds = (NUMBERS,)
    elif isinstance(value, bytes) and draw.random() < 0.7:
        kinds = (BYTES,)
    parent[key] = draw.choice(draw.choice(kinds))
    return msgspec.msgpack.encode(tree)


async def connected(stack: AsyncExitStack, cluster: LiveCluster, name: str) -> Client:
    port = urlsplit(cluster.gateway._config.nats_url).port
    url = f"nats://{name}:{NATS_PASSWORD}@127.0.0.1:{port}"
    client = await nats.connect(url, pending_size=64 << 20)
    stack.push_async_callback(client.close)
    return client


async def text_of(cluster: LiveCluster) -> str:
    answer = await cluster.chat(PROMPT)
    text: str = answer.json()["choices"][0]["message"]["content"]
    return text


async def chats(cluster: LiveCluster, is_over: asyncio.Event) -> list[str]:
    texts = []
    while not is_over.is_set():
        texts.append(await text_of(cluster))
        await asyncio.sleep(0.05)
    return texts
