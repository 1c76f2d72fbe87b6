"""A TCP link with a given bandwidth and a codec with a given speed.

Both advance a simulated clock, so tests do not wait and do not depend on the machine's speed.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

import msgspec

from shared.engine.kv.kv_codec import Bf16FrameCodec
from shared.kv_wire.compression import FrameCodec
from shared.kv_wire.dialer import Dialer
from shared.kv_wire.kv_server import KvServer
from shared.kv_wire.sealing.link_keys import LinkKeys
from shared.messages import DataPlaneAddress, LinkKey, LinkSecurity
from shared.randomness import SystemRandomness
from tests.shared.kv_wire.support import DEADLINE_S, INSTANCE

CODEC = Bf16FrameCodec()


class SimulatedClock:
    """Its time changes only when code adds to `time_s` or sleeps."""

    def __init__(self) -> None:
        self.time_s = 0.0

    def now(self) -> float:
        return self.time_s

    async def sleep(self, delay_s: float) -> None:
        self.time_s += delay_s


class PacedCodec:
    """The real codec, with `encode` and `decode` in bytes/s. `corrupt` damages encoded frames;
    threads wait for `may_run`.
    """

    name = CODEC.name

    def __init__(self, clock: SimulatedClock, encode: float = 5e9, decode: float = 15e9) -> None:
        self.num_encoded = self.num_decoded = 0
        self.corrupt = False
        self.may_run = threading.Event()
        self.may_run.set()
        self._clock = clock
        self._encode, self._decode = encode, decode

    def encode(self, payload: memoryview, out: memoryview) -> int:
        self.num_encoded += 1
        assert self.may_run.wait(DEADLINE_S)
        self._clock.time_s += len(payload) / self._encode
        num_bytes = CODEC.encode(payload, out)
        if self.corrupt:
            out[num_bytes // 2] ^= 0x10
        return num_bytes

    def decode(self, coded: memoryview, out: memoryview) -> bool:
        self.num_decoded += 1
        assert self.may_run.wait(DEADLINE_S)
        self._clock.time_s += len(out) / self._decode
        return CODEC.decode(coded, out)


class Throttle:
    """A proxy between sender and receiver: bytes from the sender take 1 / bandwidth s each."""

    def __init__(self, address: DataPlaneAddress, clock: SimulatedClock, bandwidth: float) -> None:
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

        async def forward_replies() -> None:
            with contextlib.suppress(OSError):
                while data := await from_receiver.read(1 << 16):
                    to_sender.write(data)
            to_sender.close()

        replies = asyncio.ensure_future(forward_replies())
        with contextlib.suppress(OSError):  # either peer may close its connection
            while data := await from_sender.read(1 << 16):
                self.num_bytes += len(data)
                self._clock.time_s += len(data) / self.bandwidth
                to_receiver.write(data)
                await to_receiver.drain()
        to_receiver.close()
        await replies


@dataclass
class ThrottledPair:
    clock: SimulatedClock
    codec: PacedCodec
    server: KvServer
    dialer: Dialer
    throttle: Throttle
    address: DataPlaneAddress  # of the throttle; `server.address` bypasses it
    link_key: LinkKey | None


@asynccontextmanager
async def throttled_pair(
    bandwidth: float,
    *,
    encode: float = 5e9,
    decode: float = 15e9,
    sender_has_codec: bool = True,
    receiver_codec: FrameCodec | str | None = "same",
    security: LinkSecurity | None = None,
) -> AsyncIterator[ThrottledPair]:
    clock = SimulatedClock()
    codec = PacedCodec(clock, encode, decode)
    codec_of_receiver = codec if isinstance(receiver_codec, str) else receiver_codec
    link_keys = None if security is None else LinkKeys(security, SystemRandomness())
    server = await KvServer.start(
        instance_id=INSTANCE, codec=codec_of_receiver, clock=clock, link_keys=link_keys
    )
    throttle = Throttle(server.address, clock, bandwidth)
    relay = await asyncio.start_server(throttle.accept, "127.0.0.1", 0)
    port = relay.sockets[0].getsockname()[1]
    address = msgspec.structs.replace(server.address, port=port, unix_path="")
    dialer = Dialer(5.0, codec=codec if sender_has_codec else None, clock=clock)
    try:
        link_key = None if link_keys is None else link_keys.key_for("prefill-1")
        yield ThrottledPair(clock, codec, server, dialer, throttle, address, link_key)
    finally:
        await dialer.close()
        await server.close()
        relay.close()
