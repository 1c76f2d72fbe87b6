"""Someone on the path of a sealed KV link: whatever is sent, only genuine frames are delivered.

Frames are delivered unaltered, in order and at most once; a foreign key delivers none.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import socket
from dataclasses import dataclass, field
from typing import Literal

from hypothesis import given
from hypothesis import strategies as st

from shared.kv_wire.frames import PREFIX, Frame, Hello, decode_prefix, encode_record
from shared.kv_wire.kv_server import KvServer
from shared.kv_wire.sealing.cipher_choice import AES, CHACHA, NONCE_BYTES, TAG_BYTES
from shared.kv_wire.sealing.ciphers import DirectionCipher, ciphers_of_sender
from shared.kv_wire.sealing.link_keys import LinkKeys
from shared.messages import LinkKey, LinkSecurity
from shared.randomness import SystemRandomness
from tests.fuzz.profile import fuzz
from tests.shared.kv_wire.support import INSTANCE, RecordingSink, eventually, header

PAYLOADS = tuple(random.Random(seed).randbytes(size) for seed, size in enumerate((1, 300, 5000, 7)))
NUM_UNITS = 2 * len(PAYLOADS)  # records and payloads, in turn
unit_indices = st.integers(0, NUM_UNITS - 1)


@dataclass(frozen=True)
class Tampering:
    """What happens to the sealed records and payloads on their way."""

    kind: Literal["flip", "replay", "swap", "drop", "cut", "foreign key"]
    first: int = 0
    second: int = 0
    position: float = 0.0  # of a bit or a byte, as a share of what is altered

    def __call__(self, units: list[bytes]) -> bytes:
        units = list(units)
        match self.kind:
            case "flip":
                units[self.first] = _flipped(units[self.first], self.position)
            case "replay":
                units.insert(self.second, units[self.first])
            case "swap":
                units[self.first], units[self.second] = units[self.second], units[self.first]
            case "drop":
                del units[self.first]
            case "cut":
                sent = b"".join(units)
                return sent[: int(self.position * len(sent))]
        return b"".join(units)


def _flipped(data: bytes, position: float) -> bytes:
    bit = int(position * (8 * len(data) - 1))
    flipped = bytearray(data)
    flipped[bit // 8] ^= 1 << bit % 8
    return bytes(flipped)


tamperings = st.builds(
    Tampering,
    st.sampled_from(("flip", "flip", "replay", "swap", "drop", "cut", "foreign key")),
    unit_indices,
    unit_indices,
    st.floats(0, 1),
)


@dataclass
class Victim:
    """A receiver that expects one placement, and the bytes that its genuine sender seals."""

    security: LinkSecurity
    ciphers: tuple[str, ...]
    sink: RecordingSink = field(default_factory=RecordingSink)

    async def attacked(self, tampering: Tampering) -> KvServer:
        """Returns the closed server."""
        keys = LinkKeys(self.security, SystemRandomness())
        server = await KvServer.start(instance_id=INSTANCE, link_keys=keys)
        server.expect(b"placement-a", self.sink)
        link_key = keys.key_for("prefill-1")
        if tampering.kind == "foreign key":
            link_key = LinkKey(key_id=link_key.key_id, key=bytes(32), security=self.security)
        with socket.socket() as sock:
            sealing = await self._shake_hands(sock, server, link_key)
            await _send_all(sock, tampering(_sealed_units(sealing)))
        await eventually(lambda: server.num_connections == 0)
        await server.close()
        return server

    async def _shake_hands(
        self, sock: socket.socket, server: KvServer, link_key: LinkKey
    ) -> DirectionCipher:
        loop = asyncio.get_running_loop()
        sock.setblocking(False)
        await loop.sock_connect(sock, (server.address.host, server.address.port))
        hello = Hello(INSTANCE, link_key.key_id, os.urandom(NONCE_BYTES), self.ciphers)
        await loop.sock_sendall(sock, encode_record(hello))
        welcome = b""
        while len(welcome) < PREFIX.size or len(welcome) < PREFIX.size + decode_prefix(
            welcome[: PREFIX.size]
        ):
            welcome += await loop.sock_recv(sock, 4096)
        cipher = AES if AES.encode() in welcome else CHACHA
        return ciphers_of_sender(link_key, cipher, encode_record(hello), welcome).sealing


def _sealed_units(sealing: DirectionCipher) -> list[bytes]:
    units = []
    for number, payload in enumerate(PAYLOADS):
        record = encode_record(Frame(number, header(len(payload), sequence_number=number)))
        prefix, body = record[: PREFIX.size], record[PREFIX.size :]
        buffer = memoryview(bytearray(payload + bytes(TAG_BYTES)))
        sealing.seal_payload(number, buffer)
        units += [prefix + sealing.seal_record(prefix, body), bytes(buffer)]
    return units


async def _send_all(sock: socket.socket, data: bytes) -> None:
    """Sends, then reads until the receiver has replied to everything and ended."""
    loop = asyncio.get_running_loop()
    with contextlib.suppress(OSError):  # the receiver may have closed the connection
        await loop.sock_sendall(sock, data)
        sock.shutdown(socket.SHUT_WR)
        while await loop.sock_recv(sock, 65_536):
            pass


@fuzz(100)
@given(
    tamperings,
    st.sampled_from(("aead", "mac")),
    st.sampled_from(((AES, CHACHA), (CHACHA,))),
)
def test_only_genuine_frames_are_delivered(
    tampering: Tampering, security: LinkSecurity, ciphers: tuple[str, ...]
) -> None:
    victim = Victim(security, ciphers)
    server = asyncio.run(victim.attacked(tampering))
    delivered = [(made.sequence_number, payload) for made, payload in victim.sink.frames]
    numbers = [number for number, _ in delivered]
    assert numbers == sorted(set(numbers)), "reordered or delivered twice"
    assert all(payload == PAYLOADS[number] for number, payload in delivered)
    is_altered = tampering.kind in ("flip", "replay", "foreign key", "drop") or (
        tampering.kind == "swap" and tampering.first != tampering.second
    )
    detected = server.counts.num_bad_peers + server.counts.num_corrupt
    is_cut_short = tampering.kind == "drop" and tampering.first >= NUM_UNITS - 2
    assert detected or is_cut_short or not is_altered
    assert not (tampering.kind == "foreign key" and delivered)
    if not is_altered and tampering.kind != "cut":
        assert len(delivered) == len(PAYLOADS)
