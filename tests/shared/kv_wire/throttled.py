"""A TCP link of a stated bandwidth, and a codec of a stated speed: both spend a clock's time, so
that tests neither wait nor depend on the machine.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

import msgspec

from shared.engine.kv_codec import Bf16FrameCodec
from shared.kv_wire.compression import FrameCodec
from shared.kv_wire.dialer import Dialer
from shared.kv_wire.kv_server import KvServer
from shared.messages import DataPlaneAddress
from tests.shared.kv_wire.support import DEADLINE_S, INSTANCE

CODEC = Bf16FrameCodec()


class SpentClock:
    """Time passes only where somebody spends it."""

    def __init__(self) -> None:
        self.time_s = 0.0

    def now(self) -> float:
        return self.time_s

    async def sleep(self, delay_s: float) -> None:
        self.time_s += delay_s


class PacedCodec:
    """The real codec at so many bytes a second each way; `spoil` damages what it encodes, `go`
    holds its threads up.
    """

    name = CODEC.name

    def __init__(self, clock: SpentClock, encode: float = 5e9, decode: float = 15e9) -> None:
        self.num_encoded = self.num_decoded = 0
        self.spoil = False
        self.go = threading.Event()
        self.go.set()
        self._clock = clock
        self._encode, self._decode = encode, decode

    def encode(self, payload: memoryview, out: memoryview) -> int:
        self.num_encoded += 1
        assert self.go.wait(DEADLINE_S)
        self._clock.time_s += len(payload) / self._encode
        num_bytes = CODEC.encode(payload, out)
        if self.spoil:
            out[num_bytes // 2] ^= 0x10
        return num_bytes

    def decode(self, coded: memoryview, out: memoryview) -> bool:
        self.num_decoded += 1
        assert self.go.wait(DEADLINE_S)
        self._clock.time_s += len(out) / self._decode
        return CODEC.decode(coded, out)


class Throttle:
    """Stands between a sender and a receiver; each byte takes its time."""

    def __init__(self, address: DataPlaneAddress, clock: SpentClock, bandwidth: float) -> None:
        self.bandwidth = bandwidth
        self.num_bytes = 0  # from the sender
        self._address = address
        self._clock = clock

    async def accept(
        self, from_sender: asyncio.StreamReader, to_sender: asyncio.StreamWriter
    ) -> None:
        from_receiver, to_receiver = await asyncio.open_connection(
            self._address.host, self._address.port
        )

        async def answer() -> None:
            with contextlib.suppress(OSError):
                while data := await from_receiver.read(1 << 16):
                    to_sender.write(data)
            to_sender.close()

        answers = asyncio.ensure_future(answer())
        with contextlib.suppress(OSError):  # one of the two may die
            while data := await from_sender.read(1 << 16):
                self.num_bytes += len(data)
                self._clock.time_s += len(data) / self.bandwidth
                to_receiver.write(data)
                await to_receiver.drain()
        to_receiver.close()
        await answers


@dataclass
class ThrottledPair:
    clock: SpentClock
    codec: PacedCodec
    server: KvServer
    dialer: Dialer
    throttle: Throttle
    address: DataPlaneAddress  # of the throttle; `server.address` is the way around it


@asynccontextmanager
async def throttled_pair(
    bandwidth: float,
    *,
    encode: float = 5e9,
    decode: float = 15e9,
    sender_has_codec: bool = True,
    receiver_codec: FrameCodec | str | None = "same",
) -> AsyncIterator[ThrottledPair]:
    clock = SpentClock()
    codec = PacedCodec(clock, encode, decode)
    theirs = codec if isinstance(receiver_codec, str) else receiver_codec
    server = await KvServer.start(instance_id=INSTANCE, codec=theirs, clock=clock)
    throttle = Throttle(server.address, clock, bandwidth)
    relay = await asyncio.start_server(throttle.accept, "127.0.0.1", 0)
    port = relay.sockets[0].getsockname()[1]
    address = msgspec.structs.replace(server.address, port=port, unix_path="")
    dialer = Dialer(5.0, codec=codec if sender_has_codec else None, clock=clock)
    try:
        yield ThrottledPair(clock, codec, server, dialer, throttle, address)
    finally:
        await dialer.close()
        await server.close()
        relay.close()
