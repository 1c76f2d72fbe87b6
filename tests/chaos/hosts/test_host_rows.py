"""What a row of a host's faults takes for refused, and for a pause."""

from __future__ import annotations

import asyncio

import pytest

from tests.chaos.hosts.rows import _is_refused, _pause
from tests.chaos.hosts.streams import Stream
from tests.support.cluster.clients import Exchange

SILENT = b'data: {"choices":[{"index":0,"delta":{},"finish_reason":null}]}'
TOKEN = b'data: {"choices":[{"index":0,"delta":{"content":"a"},"finish_reason":null}]}'
ERROR = b'data: {"error":{"message":"no worker","code":"no_capacity"}}'


async def stream_of(*events: bytes) -> Stream:
    """A stream that gets an event a second."""
    times = [float(number) for number in range(len(events))]
    exchange = Exchange({}, "gateway", arrivals=times, status=200, events=[*events])
    return Stream("c", 0, exchange, asyncio.create_task(asyncio.sleep(0)))


@pytest.mark.parametrize(
    ("before", "is_refused"), [((), True), ((SILENT,), True), ((TOKEN,), False)]
)
async def test_error_is_a_refusal_if_no_token_precedes_it(
    before: tuple[bytes, ...], is_refused: bool
) -> None:
    """Chunks that fill a silence send the head of the response before its error."""
    assert _is_refused(await stream_of(*before, ERROR)) is is_refused


async def test_chunks_that_fill_a_silence_end_no_pause() -> None:
    assert _pause(await stream_of(TOKEN, SILENT, SILENT, TOKEN, TOKEN)) == 3.0
