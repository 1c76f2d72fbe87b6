"""One connection as a stream of records, with payloads received directly into their buffers.

The states of the receiving half:

    prefix ──▶ body ──▶ prefix                   a record without payload
                   └──▶ payload ──▶ prefix       the owner returned a buffer to fill
    any ──▶ ended                                loss, close, a stall, or a protocol violation
"""

from __future__ import annotations

import asyncio
from enum import Enum
from typing import TYPE_CHECKING, Protocol, cast

import xxhash

from shared.errors import LinkLost
from shared.kv_wire.frames import (
    MAX_REASON_CHARS,
    MAX_RECORD_BYTES,
    PREFIX,
    Frame,
    Goodbye,
    ProtocolError,
    Record,
    decode_prefix,
    decode_record,
    encode_record,
)
from shared.kv_wire.sealing.cipher_choice import TAG_BYTES

if TYPE_CHECKING:
    from shared.kv_wire.sealing.ciphers import LinkCiphers

# The maximum size of one read, so that its bytes are summed while they are still cached.
READ_BYTES = 256 * 1024
# Records are small: with this many unsent bytes of them, the peer does not read.
MAX_UNSENT_BYTES = 1024 * 1024
STALL_LIMIT_S = 10.0  # time without a byte of a record that has begun to arrive


class StreamOwner(Protocol):
    def record_arrived(self, record: Record) -> memoryview | None:
        """Returns the buffer for the payload that follows, or None. Raises ProtocolError."""
        ...

    def payload_arrived(self, checksum: int) -> None:
        """Called with the xxh3-64 of the payload; it is undefined if the stream has ciphers."""
        ...

    def ended(self, error: LinkLost) -> None:
        """Called exactly once, for any cause."""
        ...


class _Phase(Enum):
    PREFIX = "prefix"
    BODY = "body"
    PAYLOAD = "payload"
    ENDED = "ended"


class RecordStream(asyncio.BufferedProtocol):
    """Reads records for its owner and writes the owner's records, without a task.

    With ciphers every record is sealed. The owner allocates `tag_bytes` behind each payload, sent
    or received; `send` seals a payload, and the owner opens a received one.
    """

    def __init__(self, owner: StreamOwner, ciphers: LinkCiphers | None = None) -> None:
        self.ciphers = ciphers
        self.tag_bytes = 0 if ciphers is None else TAG_BYTES
        self._owner = owner
        self._transport: asyncio.Transport | None = None
        self._scratch = memoryview(bytearray(MAX_RECORD_BYTES + self.tag_bytes))
        self._prefix = b""
        self._hasher = xxhash.xxh3_64()
        self._num_filled = 0
        self._num_received = 0  # bytes, of all records
        self._stall_timer: asyncio.TimerHandle | None = None
        self._closed = asyncio.get_running_loop().create_future()
        self._expect(_Phase.PREFIX, self._scratch[: PREFIX.size])

    # ── reading ──────────────────────────────────────────────────────────────────────────────────

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._target[self._num_filled : self._num_filled + READ_BYTES]

    def buffer_updated(self, nbytes: int) -> None:
        if self._phase is _Phase.ENDED:
            return
        start = self._num_filled
        self._num_filled += nbytes
        self._num_received += nbytes
        if self._phase is _Phase.PAYLOAD and self.ciphers is None:
            self._hasher.update(self._target[start : self._num_filled])
        if self._num_filled == len(self._target):
            try:
                self._advance()
            except ProtocolError as error:
                self._fail(error)
        if self._stall_timer is None and self._is_within_record:
            self._watch_for_stall()

    @property
    def _is_within_record(self) -> bool:
        if self._phase is _Phase.PREFIX:
            return self._num_filled > 0
        return self._phase is not _Phase.ENDED

    def _watch_for_stall(self) -> None:
        self._stall_timer = asyncio.get_running_loop().call_later(
            STALL_LIMIT_S, self._check_progress, self._num_received
        )

    def _check_progress(self, num_received_before: int) -> None:
        """A peer that announces more bytes than it sends would be waited for without end."""
        self._stall_timer = None
        if not self._is_within_record:
            return
        if self._num_received > num_received_before:
            self._watch_for_stall()
        else:
            self._fail(ProtocolError(f"no byte of a record for {STALL_LIMIT_S:g} s"))

    def _fail(self, error: ProtocolError) -> None:
        self.send(Goodbye(error.message[:MAX_REASON_CHARS]))
        self.end(error)

    def connection_lost(self, exc: Exception | None) -> None:
        reason = "the peer closed the connection" if exc is None else f"link lost: {exc}"
        is_within = self._is_within_record
        self.end(ProtocolError(f"{reason} within a record") if is_within else LinkLost(reason))
        if not self._closed.done():
            self._closed.set_result(None)

    def _advance(self) -> None:
        match self._phase:
            case _Phase.PREFIX:
                self._prefix = bytes(self._target)
                body_bytes = decode_prefix(self._prefix) + self.tag_bytes
                self._expect(_Phase.BODY, self._scratch[:body_bytes])
            case _Phase.BODY:
                self._take_record(decode_record(self._opened(self._target)))
            case _Phase.PAYLOAD:
                checksum = self._hasher.intdigest()
                self._hasher.reset()
                self._expect(_Phase.PREFIX, self._scratch[: PREFIX.size])
                self._owner.payload_arrived(checksum)
            case _Phase.ENDED:
                pass

    def _opened(self, body: memoryview) -> bytes | memoryview:
        if self.ciphers is None:
            return body
        opened = self.ciphers.opening.open_record(self._prefix, body)
        if opened is None:
            raise ProtocolError("a record is not the next one that the peer sealed")
        return opened

    def _take_record(self, record: Record) -> None:
        if isinstance(record, Goodbye):
            self.end(LinkLost(f"the peer ended the connection: {record.reason}"))
            return
        payload = self._owner.record_arrived(record)
        if payload is None:
            self._expect(_Phase.PREFIX, self._scratch[: PREFIX.size])
        else:
            self._expect(_Phase.PAYLOAD, payload)

    def _expect(self, phase: _Phase, target: memoryview) -> None:
        self._phase, self._target, self._num_filled = phase, target, 0

    # ── writing ──────────────────────────────────────────────────────────────────────────────────

    def send(self, record: Record, payload: memoryview | None = None) -> None:
        """Writes a record, and seals its payload in place; the payload must not change until the
        peer has acknowledged it.
        """
        data = encode_record(record)
        if self.ciphers is not None:
            prefix, body = data[: PREFIX.size], data[PREFIX.size :]
            data = prefix + self.ciphers.sealing.seal_record(prefix, body)
            if payload is not None:
                assert isinstance(record, Frame), "only frames have a payload"
                self.ciphers.sealing.seal_payload(record.frame_id, payload)
        self._write(data)
        if payload is not None:
            self._write(payload)

    def send_reply(self, record: Record) -> None:
        """Sends a reply. Ends the connection if more than MAX_UNSENT_BYTES of replies remain
        unread.
        """
        self.send(record)
        transport = self._transport
        if transport is not None and transport.get_write_buffer_size() > MAX_UNSENT_BYTES:
            transport.abort()
            self.end(ProtocolError("the peer does not read its acknowledgements"))

    def _write(self, data: bytes | memoryview) -> None:
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(data)

    # ── ending ───────────────────────────────────────────────────────────────────────────────────

    def end(self, error: LinkLost) -> None:
        """Ends the connection. Idempotent. Calls the owner's `ended` before returning."""
        if self._phase is _Phase.ENDED:
            return
        # The payload's buffer returns to the owner; late bytes are written to the scratch buffer.
        self._expect(_Phase.ENDED, self._scratch)
        if self._stall_timer is not None:
            self._stall_timer.cancel()
        if self._transport is not None:
            self._transport.close()
        self._owner.ended(error)

    async def close(self, reason: str) -> None:
        """Ends the connection without waiting for a peer that does not read."""
        self.end(LinkLost(reason))
        if self._transport is not None:
            self._transport.abort()
            await self._closed
