"""Clients that end their side of the connection: those that wait for the response get it."""

from __future__ import annotations

import asyncio
from asyncio import StreamReader, StreamWriter

import pytest

from services.gateway.http.protocol import half_closed
from tests.services.gateway.http.test_server import (
    GET,
    LEFT,
    OK,
    POST,
    TOLD,
    connected,
    rest_of,
    started,
)
from tests.support.waiting import LIMIT_S, until

WAIT = GET.replace(b"/ ", b"/wait ", 1)


@pytest.fixture(autouse=True)
def _fast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(half_closed, "PROBE_AFTER_S", 0.02)
    LEFT.clear()
    TOLD.clear()


async def test_client_that_ends_its_side_gets_its_response() -> None:
    async with asyncio.timeout(LIMIT_S), connected() as (reader, writer):
        writer.write(GET.replace(b"/ ", b"/told ", 1))
        writer.write_eof()
        probes = half_closed.CONTINUE * half_closed.MAX_PROBES
        assert await reader.readexactly(len(probes)) == probes
        TOLD.set()
        answer = await rest_of(reader)
        assert answer.startswith(OK) and answer.count(OK) == 1 and b"100 Continue" not in answer


async def test_pipelined_requests_before_the_end_are_answered() -> None:
    async with asyncio.timeout(LIMIT_S), connected() as (reader, writer):
        writer.write(GET.replace(b"/ ", b"/parts ", 1) + GET)
        writer.write_eof()
        assert (await rest_of(reader)).count(OK) == 2


async def test_unfinished_request_ends_with_its_client_s_side() -> None:
    async with asyncio.timeout(LIMIT_S), connected() as (reader, writer):
        writer.write(POST + b"ab")
        writer.write_eof()
        assert await rest_of(reader) == b""


@pytest.mark.parametrize("version", [b"1.0", b"1.1"])
async def test_client_that_leaves_is_noticed(version: bytes) -> None:
    async with asyncio.timeout(LIMIT_S), started() as server:
        _, writer = await asyncio.open_connection(*server.address)
        writer.write(WAIT.replace(b"1.1", version))
        writer.write_eof()
        writer.close()
        await until(LEFT.is_set)


async def test_client_that_leaves_behind_a_relay_is_noticed() -> None:
    """The relay passes on the end of the client's side, and learns the rest when it writes."""

    async def copy(reader: StreamReader, writer: StreamWriter) -> None:
        while part := await reader.read(65536):
            writer.write(part)
            await writer.drain()
        writer.write_eof()

    async with asyncio.timeout(LIMIT_S), started() as server:

        async def relay(reader: StreamReader, writer: StreamWriter) -> None:
            answers, requests = await asyncio.open_connection(*server.address)
            try:
                await asyncio.gather(copy(reader, requests), copy(answers, writer))
            except OSError:
                writer.close()
                requests.close()

        listening = await asyncio.start_server(relay, "127.0.0.1", 0)
        _, client = await asyncio.open_connection(*listening.sockets[0].getsockname())
        client.write(WAIT)
        client.close()
        await until(LEFT.is_set)
        listening.close()
