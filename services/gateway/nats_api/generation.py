"""Writes the response of a generating request: one body, or events as they arrive."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Iterator

from services.gateway.http.response import joined, joined_in_turns
from services.gateway.nats_api.reply import NatsReply
from services.gateway.output.events import Event, Finished, TextDelta
from services.gateway.output.results import Results
from services.gateway.request.output_merger import OutputMerger
from services.gateway.request.request_output import ClientDisconnected
from services.gateway.request.submission import OpenResponse
from shared.clock import Clock
from shared.errors import Overloaded, PayloadTooLarge


async def write_response(
    opened: OpenResponse, reply: NatsReply, max_reply_bytes: int, clock: Clock
) -> None:
    """Writes the response. Raises the HearthError that ended the request, which the caller must
    send.
    """
    merger = opened.merger
    merger.unsent.watch(
        lambda: merger.fail(Overloaded("the outputs of this tenant that wait are too large")),
        is_streamed=opened.is_streamed,
    )
    try:
        if opened.is_streamed:
            await _write_events(opened, reply, clock)
        else:
            await _write_body(opened, reply, max_reply_bytes, clock)
    finally:
        # has no effect on ended requests
        opened.cancel(ClientDisconnected("the response has ended before its request"))
        merger.close()


async def _write_events(opened: OpenResponse, reply: NatsReply, clock: Clock) -> None:
    merger, encoder, reason = opened.merger, opened.encoder, ""
    while events := await merger.next():
        reason = reason or _reason_of(events)
        for part in joined(encoder.events(events)):
            if part:
                await _timed(reply.send(part), merger, clock)
                await asyncio.sleep(0)  # lets other streams continue
    closing = encoder.closing()
    if closing:
        await _timed(reply.send(closing), merger, clock)
    await reply.finish(reason=reason or "stop", receipt=opened.receipt_hash())


async def _timed(sending: Awaitable[None], merger: OutputMerger, clock: Clock) -> None:
    """Awaits a send and reports its duration. NATS buffers messages of all clients together until
    full.
    """
    began_at = clock.now()
    await sending
    merger.on_send(began_at, clock.now())


def _reason_of(events: list[Event]) -> str:
    """Returns the end reason of the choice that ends first, or "" if none ends."""
    return next((each.reason for each in events if isinstance(each, Finished)), "")


async def _write_body(
    opened: OpenResponse, reply: NatsReply, max_reply_bytes: int, clock: Clock
) -> None:
    results, merger = Results(), opened.merger
    while events := await merger.next():
        for event in events:
            results.add(event)
            if isinstance(event, TextDelta):
                merger.unsent.add(event.num_bytes)
    body = await _whole(opened.encoder.body(results), max_reply_bytes)
    await _timed(reply.finish(body, receipt=opened.receipt_hash()), merger, clock)


async def _whole(parts: Iterator[bytes], max_bytes: int) -> bytes:
    """Returns the joined parts. Raises PayloadTooLarge if they exceed `max_bytes`."""
    found, num_bytes = [], 0
    async for part in joined_in_turns(parts):
        found.append(part)
        num_bytes += len(part)
        if num_bytes > max_bytes:
            raise PayloadTooLarge(
                f"the response has more than {max_bytes} bytes, which one NATS message can hold: "
                "request it as a stream, or less of it"
            )
    return b"".join(found)
