"""Reads from a prefill worker's heartbeats how much KV it has pushed."""

from __future__ import annotations

import asyncio
import os

import msgspec

from shared.messages import Heartbeat
from shared.subjects import HEARTBEATS
from shared.tls import TlsFiles
from shared.transport.bus import NatsBus

TIMEOUT_S = 5.0


class PushedKv(msgspec.Struct, frozen=True, kw_only=True):
    """Counts since the start of the worker. `push_s` are the seconds with at least one frame in
    flight.
    """

    num_tokens: int
    num_bytes: int
    push_s: float

    @property
    def megabytes_per_s(self) -> float:
        return self.num_bytes / 1e6 / self.push_s if self.push_s else 0.0


async def pushed_kv(
    nats_url: str, process_id: str, worker_id: str, *, num_tokens: int
) -> PushedKv | None:
    """Returns the counts of `worker_id` once they reach `num_tokens`; None after TIMEOUT_S.

    `process_id` is the observer whose credential is in the URL. Raises DependencyUnavailable if
    NATS cannot be reached.
    """
    found: asyncio.Future[PushedKv] = asyncio.get_running_loop().create_future()

    def on_heartbeat(beat: Heartbeat) -> None:
        load, card = beat.load, beat.model
        if beat.process_id != worker_id or load is None or card is None or found.done():
            return
        if load.num_pushed_tokens >= num_tokens:
            pushed = PushedKv(
                num_tokens=load.num_pushed_tokens,
                num_bytes=load.num_pushed_tokens * card.kv_bytes_per_token,
                push_s=load.push_s,
            )
            found.set_result(pushed)

    bus = await NatsBus.connect(
        nats_url,
        process_id=process_id,
        timeout_s=TIMEOUT_S,
        tls=TlsFiles.of_environ("NATS", os.environ),
    )
    try:
        await bus.subscribe(HEARTBEATS, Heartbeat, on_heartbeat)
        async with asyncio.timeout(TIMEOUT_S):
            return await found
    except TimeoutError:
        return None
    finally:
        await bus.close()
