"""Records of the KV data plane as bytes: pure encoding, decoding and their limits.

Every record is a 12-byte prefix (magic, version, two zero bytes, body length, big endian) and a
msgpack body. On TCP the payload follows its `Frame` record; on one host the payload is in the slot
that the record names.

    sender                       receiver
    Hello(instance_id, key_id, region) ▶
                       ◀──────── Welcome(instance_id, slots, region) or Goodbye(reason)
    Offer(placement_id) ───────▶                  of a tenant that is bound to regions
                       ◀──────── Accepted(placement_id)              or Declined(placement_id, …)
    Frame(frame_id, …) ────────▶
                       ◀──────── Ack(frame_id)                       or Refusal(frame_id, reason)

A payload on the stream may be compressed with a codec that the Welcome named; the checksum is of
the uncompressed bytes.

If the Hello names a link key, every record after the Welcome and every payload is sealed
(`sealing/ciphers.py`): each is TAG_BYTES longer on the stream than its record states. Sealed frames
have no checksum.
"""

from __future__ import annotations

import struct
from typing import Annotated

import msgspec
import xxhash
from msgspec import Meta

from shared.errors import LinkLost
from shared.kv_wire.link import MAX_DEVICE_FRAME_BYTES, MAX_FRAME_BYTES, FrameHeader, LinkEnd
from shared.transport.wire_errors import UNREADABLE

MAGIC = b"HKVW"
VERSION = 4
PREFIX = struct.Struct("!4sHxxI")
MAX_RECORD_BYTES = 64 * 1024
MAX_REASON_CHARS = 1000
MAX_ID_BYTES = 64
MAX_SLOTS = 64
MAX_METADATA_BYTES = 32 * 1024
MAX_FRAME_ID = 2**63 - 1
CHECKSUM_KINDS = ("xxh3-64",)


class ProtocolError(LinkLost):
    """The peer violated this protocol; the connection ends."""


class NixlOffer(msgspec.Struct, frozen=True):
    """Slots of the sender that the receiver may read with NIXL: `metadata` of the sender's agent,
    the address of the slots in its process, and a token at the start of the first one.
    """

    metadata: Annotated[bytes, Meta(max_length=MAX_METADATA_BYTES)]
    address: Annotated[int, Meta(ge=0, le=2**63 - 1)]
    num_slots: int
    slot_bytes: Annotated[int, Meta(ge=MAX_FRAME_BYTES, le=MAX_DEVICE_FRAME_BYTES)]
    token: Annotated[bytes, Meta(max_length=MAX_ID_BYTES)]


class Hello(msgspec.Struct, frozen=True, tag=True):
    """The first record of a sender. `instance_id` names the receiver that it dials. `key_id` names
    the link's key, or is empty if the link is not sealed; `ciphers` are those of the sender,
    fastest first. `end` is the sender's.
    """

    instance_id: bytes
    key_id: bytes = b""
    nonce: bytes = b""  # random, on sealed links
    ciphers: tuple[str, ...] = ()
    region: str = ""
    end: LinkEnd = LinkEnd()
    nixl: NixlOffer | msgspec.UnsetType = msgspec.UNSET


class Welcome(msgspec.Struct, frozen=True, tag=True):
    """The receiver's answer. `num_slots` bounds the unacknowledged frames; `codecs` names the
    codecs that the receiver can decode; `cipher` seals all that follows, or is empty. No frame
    exceeds `slot_bytes`; `frame_bytes` is the recommended size, 0 of a release that knows only
    one. `end` is the receiver's. `port` is the one that serves; empty: that of the connection.
    """

    instance_id: bytes
    num_slots: int
    slot_bytes: int
    codecs: tuple[str, ...] = ()
    nonce: bytes = b""  # random, on sealed links
    cipher: str = ""
    region: str = ""
    frame_bytes: int = 0
    end: LinkEnd = LinkEnd()
    port: str = ""


class Goodbye(msgspec.Struct, frozen=True, tag=True):
    reason: str


class Offer(msgspec.Struct, frozen=True, tag=True):
    """Asks whether the receiver takes KV of a placement from a sender in this one's region. No
    frame of a tenant that is bound to regions comes before the reply.
    """

    placement_id: bytes


class Accepted(msgspec.Struct, frozen=True, tag=True):
    placement_id: bytes


class Declined(msgspec.Struct, frozen=True, tag=True):
    placement_id: bytes
    reason: str


class Frame(msgspec.Struct, frozen=True, tag=True):
    """A run of KV. `slot_index` is None if the payload follows on the stream: uncompressed, or in
    `coded_bytes` if a codec is named.
    """

    frame_id: int
    header: FrameHeader
    slot_index: int | None = None
    codec: str = ""
    coded_bytes: int = 0

    @property
    def wire_bytes(self) -> int:
        """Size of the payload on the stream."""
        return self.coded_bytes if self.codec else self.header.payload_bytes


class Ack(msgspec.Struct, frozen=True, tag=True):
    """The receipt of a frame. `held_s` is the time from the arrival of its last byte to this reply,
    including `decode_s`.
    """

    frame_id: int
    held_s: float = 0.0
    decode_s: float = 0.0


class Refusal(msgspec.Struct, frozen=True, tag=True):
    frame_id: int
    reason: str
    held_s: float = 0.0


Record = Hello | Welcome | Goodbye | Offer | Accepted | Declined | Frame | Ack | Refusal

_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[Record] = msgspec.msgpack.Decoder(Record)


def encode_record(record: Record) -> bytes:
    body = _encoder.encode(record)
    if len(body) > MAX_RECORD_BYTES:
        raise ProtocolError(f"a record of {len(body)} bytes exceeds {MAX_RECORD_BYTES}")
    return PREFIX.pack(MAGIC, VERSION, len(body)) + body


def closing_record(reason: str) -> bytes:
    return encode_record(Goodbye(reason[:MAX_REASON_CHARS]))


def decode_prefix(prefix: bytes | bytearray | memoryview) -> int:
    """Returns the length of the body that follows. Raises ProtocolError."""
    magic, version, body_bytes = PREFIX.unpack(prefix)
    if magic != MAGIC:
        raise ProtocolError(f"not a KV data plane peer: it starts with {magic!r}")
    if version != VERSION:
        raise ProtocolError(f"the peer uses protocol version {version}, expected {VERSION}")
    if not 1 <= body_bytes <= MAX_RECORD_BYTES:
        raise ProtocolError(f"a record of {body_bytes} bytes is not in [1, {MAX_RECORD_BYTES}]")
    return int(body_bytes)


def decode_record(body: bytes | bytearray | memoryview) -> Record:
    try:
        return _decoder.decode(body)
    except UNREADABLE as error:
        raise ProtocolError(f"an unreadable record: {error}") from error


def sealed_sum(header: FrameHeader, payload_sum: int) -> int:
    """Returns a frame's checksum, over its payload's xxh3-64 and all other header fields, so that a
    damaged header cannot direct KV to the wrong place.
    """
    return xxhash.xxh3_64_intdigest(
        _encoder.encode(msgspec.structs.replace(header, checksum=payload_sum))
    )


def fault_of_frame(frame: Frame, max_bytes: int = MAX_FRAME_BYTES) -> str | None:
    """Returns the reason that a receiver must reject this frame, or None if it is valid. The link
    carries payloads of at most `max_bytes`.
    """
    if not 0 <= frame.frame_id <= MAX_FRAME_ID:
        return f"frame id {frame.frame_id} is not in [0, 2**63)"
    fault = fault_of(frame.header, max_bytes)
    if fault is None and frame.codec and not 1 <= frame.coded_bytes < frame.header.payload_bytes:
        return f"a compressed payload of {frame.coded_bytes} bytes is empty or is not smaller"
    return fault


def fault_of(header: FrameHeader, max_bytes: int = MAX_FRAME_BYTES) -> str | None:
    """Returns the reason that a frame with this header cannot be sent, or None if it is valid."""
    if not 1 <= header.payload_bytes <= max_bytes:
        return f"a payload of {header.payload_bytes} bytes is not in [1, {max_bytes}]"
    kind = header.checksum_kind
    if kind is not msgspec.UNSET and kind not in CHECKSUM_KINDS:
        return f"checksum kind {str(kind)[:100]!r} is none of {', '.join(CHECKSUM_KINDS)}"
    if not 1 <= len(header.placement_id) <= MAX_ID_BYTES:
        return f"a placement_id of {len(header.placement_id)} bytes is not in [1, {MAX_ID_BYTES}]"
    starts = (header.first_token, header.first_layer, header.first_head)
    positions = (header.sequence_number, header.group, *starts)
    sizes = (header.num_tokens, header.num_layers, header.num_heads)
    if min(positions) < 0 or min(sizes) < 1 or header.num_cached_tokens < 0:
        return "the frame's ranges are empty or negative"
    return None
