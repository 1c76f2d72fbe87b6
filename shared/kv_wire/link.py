"""The KV link seam: how a prefill worker pushes KV into a decode worker's staging area.

One connection per (prefill, decode) pair carries the frames of all their placements. The decode
side owns the staging memory; a slot of it belongs to one frame until the receiver has acknowledged
that frame or the connection has ended. Writers never touch the paged cache.

    sender                          receiver
    PushLink.send ──frame──────────▶ copy out of staging, verify the copy's checksum
                                     FrameSink.frame(header, payload)   awaited: back-pressure
                  ◀──ack / refusal──
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Protocol

import msgspec

from shared.messages import DataPlaneAddress

# What a sender should put into a frame, and how many should be under way: one is filled while
# the other is taken. Larger frames fall out of the caches (benchmarks/kv_transfer.py).
FRAME_BYTES = 2 * 1024 * 1024
FRAMES_UNDER_WAY = 2


class FrameHeader(msgspec.Struct, frozen=True, kw_only=True):
    """What a frame holds: KV of tokens × layers × KV heads; never physical block ids.

    `first_token` is a position in the sequence. The payload is laid out [num_layers, 2, num_tokens,
    num_heads, head_dim] in the dtype of `kv_format`; `checksum` covers its bytes and this header.
    `sequence_number` counts the frames of one placement from 0.
    """

    placement_id: bytes
    sequence_number: int
    first_token: int
    num_tokens: int
    first_layer: int
    num_layers: int
    first_head: int
    num_heads: int
    kv_format: str
    num_cached_tokens: int  # of the tokens pushed so far, found in the sender's prefix cache
    payload_bytes: int
    checksum: int = 0  # filled in by the link


class FrameSink(Protocol):
    """The receiver's logic for one placement."""

    async def frame(self, header: FrameHeader, payload: memoryview) -> None:
        """Takes a verified private copy, valid until this returns. Raises to refuse the frame."""
        ...

    def corrupt(self, header: FrameHeader) -> None:
        """A frame of this placement failed its checksum; nothing of it was delivered."""
        ...

    def link_lost(self) -> None:
        """The connection that last carried this placement's frames has ended."""
        ...


class KvReceiver(Protocol):
    """Decode's end. Frames of a placement that is not expected are refused and counted."""

    @property
    def address(self) -> DataPlaneAddress: ...

    def expect(self, placement_id: bytes, sink: FrameSink) -> None: ...

    def forget(self, placement_id: bytes) -> None:
        """Idempotent. A frame already being delivered runs to its end; see `quiet`."""
        ...

    async def quiet(self, placement_id: bytes) -> None:
        """Returns when no frame of this placement is being copied."""
        ...

    async def close(self) -> None: ...


# Writes exactly `payload_bytes` into the view it is given, on whatever thread suits it.
Fill = Callable[[memoryview], Awaitable[None]]


class PushLink(Protocol):
    """Prefill's end of one connection."""

    async def send(self, header: FrameHeader, fill: Fill) -> None:
        """Returns once the receiver has acknowledged the frame.

        Raises FrameRefused if it does not want it (unknown placement, bad checksum, sink raised),
        LinkLost if the connection ended. Several sends may be under way; `fill` runs when a slot is
        free, in the order of the calls. However this ends, `fill` is no longer running by then.
        """
        ...

    async def close(self) -> None: ...


@dataclass(slots=True)
class CompressionCounts:
    """Of all frames that a process has sent compressed."""

    num_frames: int = 0
    num_saved_bytes: int = 0


class KvDialer(Protocol):
    """Keeps one link per target; dials again after a loss."""

    compressed: CompressionCounts

    async def link(self, target: DataPlaneAddress) -> PushLink:
        """Raises LinkLost if the target cannot be reached within the connect timeout."""
        ...

    async def close(self) -> None: ...
