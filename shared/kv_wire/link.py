"""The KV link seam: how a prefill worker pushes KV into a decode worker's staging area.

One connection per (prefill, decode) pair carries the frames of all their placements. The decode
side owns the staging memory; a slot belongs to one frame until the receiver has acknowledged that
frame or the connection has ended. Senders never write to the paged cache.

    sender                          receiver
    PushLink.send ──frame──────────▶ copy out of staging, verify the copy's checksum
                                     FrameSink.frame(header, payload)   awaited: back-pressure
                  ◀──ack / refusal──
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Literal, Protocol

import msgspec

from shared.kv_layout import KvShard
from shared.messages import DataPlaneAddress, LinkKey
from shared.numerics import Numerics

# Recommended frame size and number of frames in flight: the sender fills one while the receiver
# copies the other. Larger frames exceed the CPU caches (benchmarks/kv_transfer.py); a link with a
# device at an end has larger ones, because each frame is a launch, a copy and a wait for both,
# and one more under way: a third is copied on a thread. One slot is left for another tenant.
FRAME_BYTES = 2 * 1024 * 1024
FRAMES_UNDER_WAY = 2
DEVICE_FRAME_BYTES = 16 * 1024 * 1024
# Largest frame of every link, and of one with a device at an end, which both ends must know.
MAX_FRAME_BYTES = 8 * 1024 * 1024
MAX_DEVICE_FRAME_BYTES = 64 * 1024 * 1024

# Where the bytes of a frame are between the two ends: in a memfd of the receiver, on the
# connection, or in slots of the sender, which the receiver reads with NIXL.
PortName = Literal["memfd", "tcp", "nixl"]
Place = Literal["same GPU", "peer GPUs", "same host", "other host"]

OUTSIDE_REGIONS = "the sender is in no region of the tenant's data"


class PushBounds(msgspec.Struct, frozen=True):
    """The regions that may hold the KV of one push, and that of the other end: the decode worker's
    for a sender, the prefill worker's for a receiver.
    """

    regions: frozenset[str]
    peer_region: str

    def allow(self, own_region: str, peer_region: str) -> bool:
        """Whether the push may go over a link to a peer that says it is in `peer_region`."""
        return peer_region == self.peer_region and {own_region, peer_region} <= self.regions


class FrameHeader(msgspec.Struct, frozen=True, kw_only=True):
    """The contents of a frame: KV of tokens × layers × KV heads; never physical block ids.

    `first_token` is a position in the sequence; `first_layer` counts the layers of `group`. All
    frames of one sender have the same layers and heads of a group. The
    payload has shape [num_layers, planes, num_tokens, num_heads, dim] in the dtype of `kv_format`;
    `checksum` covers its bytes and this header. `sequence_number` counts the frames that one
    sender pushes for a placement from 0.
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
    group: int = 0  # group of layers, see KvLayout
    num_cached_tokens: int  # pushed tokens that were in the sender's prefix cache
    payload_bytes: int
    checksum: int = 0  # filled in by the link; 0 on sealed links
    numerics: Numerics  # the sender's
    # Kind of the payload's sum. Unset: xxh3-64, which every release computes; it is not encoded
    # then, so that releases without this field compute the same sum of the header.
    checksum_kind: str | msgspec.UnsetType = msgspec.UNSET

    @property
    def shard(self) -> KvShard:
        """The shard of the frame; it counts the layers of `group`."""
        return KvShard(self.first_layer, self.num_layers, self.first_head, self.num_heads)


class LinkEnd(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What an end of a link reports at its opening. The defaults are those of a release that
    reports nothing.
    """

    host: str = ""  # equal on one host, see `push_plan.this_host`; empty: not known
    device: str = ""  # the GPU that has its KV; empty: KV is in memory of the host
    max_frame_bytes: int = MAX_FRAME_BYTES  # the largest frame that it can send or receive
    ports: tuple[str, ...] = ()  # that it has beside those of every release


class PushPlan(msgspec.Struct, frozen=True, kw_only=True):
    """How KV is pushed over one link. `copies` are the copies of each byte, in order: those of
    the sender, then those of the receiver. `bytes_per_s` is predicted, or measured once a push has
    ended. `refused` is a port that was tried first and failed, or empty.
    """

    port: PortName
    place: Place
    frame_bytes: int
    copies: tuple[str, ...]
    bytes_per_s: float
    refused: str = ""

    def seconds(self, num_bytes: float) -> float:
        """Returns the predicted time of a push."""
        return num_bytes / self.bytes_per_s


class FrameSink(Protocol):
    """The receiver's logic for one placement."""

    async def frame(self, header: FrameHeader, payload: memoryview) -> None:
        """Takes a verified private copy, valid until this returns. Raises to reject the frame."""
        ...

    def corrupt(self, header: FrameHeader) -> None:
        """A frame of this placement failed its checksum; nothing of it was delivered."""
        ...

    def outside(self) -> None:
        """A sender outside of the regions of the placement has offered it, or sent a frame."""
        ...

    def link_lost(self) -> None:
        """The connection that last carried this placement's frames has ended."""
        ...


class KvReceiver(Protocol):
    """Decode's end. Frames of a placement that is not expected are rejected and counted."""

    @property
    def address(self) -> DataPlaneAddress: ...

    def expect(
        self,
        placement_id: bytes,
        sink: FrameSink,
        bounds: PushBounds | None = None,
        *,
        is_private: bool = False,
    ) -> None:
        """Expects a push. With `bounds` its sender offers it first, from one of the regions.
        Buffers of a private one are zeroed after each of its frames.
        """
        ...

    def forget(self, placement_id: bytes) -> None:
        """Forgets a push. Idempotent. A delivery in progress completes; see `idle`."""
        ...

    async def idle(self, placement_id: bytes) -> None:
        """Returns when no frame of this placement is being copied."""
        ...

    async def close(self) -> None: ...


# Writes exactly `payload_bytes` into the given view, on any thread.
Fill = Callable[[memoryview], Awaitable[None]]


class PageLock(Protocol):
    """Locks pages of the host, which a device then copies directly, and copies between them."""

    @property
    def device(self) -> str:
        """The name of the device, unique on its host."""
        ...

    def lock(self, memory: memoryview) -> Callable[[], None] | None:
        """Returns a function that unlocks the memory, to call before it is unmapped and after all
        copies; None if the memory cannot be locked.
        """
        ...

    def copy(self, destination: memoryview, source: memoryview) -> None:
        """Copies without the interpreter lock."""
        ...


class PushLink(Protocol):
    """Prefill's end of one connection."""

    @property
    def plan(self) -> PushPlan:
        """How it pushes, with its newest rate."""
        ...

    @property
    def regions(self) -> tuple[str, str]:
        """This end's, and that of the receiver."""
        ...

    @property
    def frame_bytes(self) -> int:
        """The recommended size of a frame."""
        ...

    @property
    def frames_under_way(self) -> int:
        """The recommended number of frames of one push that are sent at a time."""
        ...

    async def offer(self, placement_id: bytes) -> None:
        """Returns once the receiver takes frames of the placement. Raises FrameRefused if it does
        not, LinkLost.
        """
        ...

    async def send(
        self, header: FrameHeader, fill: Fill, tenant_id: str = "", *, is_private: bool = False
    ) -> None:
        """Returns once the receiver has acknowledged the frame. The slot of a private one is zeroed
        then.

        Raises FrameRefused if the receiver rejects it (unknown placement, bad checksum, sink
        raised), LinkLost if the connection ended. Sends may be concurrent; `fill` runs when a slot
        is free, in the order of a tenant's calls and by turns of the tenants. `fill` has always
        ended when this returns or raises.
        """
        ...

    def observe(self, num_bytes: int, seconds: float) -> None:
        """Records a complete push, whose rate the next plan predicts."""
        ...

    async def close(self) -> None: ...


@dataclass(slots=True)
class CompressionCounts:
    """Counts of all compressed frames that a process has sent."""

    num_frames: int = 0
    num_saved_bytes: int = 0


class KvDialer(Protocol):
    """Maintains one link per target; reconnects after a loss."""

    compressed: CompressionCounts

    @property
    def plans(self) -> list[PushPlan]:
        """Those of all open links."""
        ...

    async def link(self, target: DataPlaneAddress, link_key: LinkKey | None = None) -> PushLink:
        """Raises LinkLost if the target cannot be reached within the connect timeout."""
        ...

    async def close(self) -> None: ...
