"""Messages between a leader and its ranks about pushes and receipts of KV.

    leader ── Call(number, command) ──▶ rank      several may be under way
           ◀── Answer, CallFailed ────            of a push: once it has ended
           ── Computed, CancelPush, … ──▶         without an answer
           ◀── ReceiptEnded, Counted ──

KV itself goes from rank to rank and never over this socket.
"""

from __future__ import annotations

import msgspec

from shared.kv_wire.expected_pushes import ReceiverCounts
from shared.kv_wire.link import PushBounds, PushPlan
from shared.messages import DataPlaneAddress, KvTargets, LinkKey


class OpenReceiver(msgspec.Struct, frozen=True, tag=True):
    """Opens a receiver of KV. The answer is its address."""

    instance_id: bytes
    bind_host: str
    bind_port: int
    advertised_host: str | None
    kv_compression: str
    is_sealed: bool
    region: str = ""
    kv_transport: str = "own"


class OpenSender(msgspec.Struct, frozen=True, tag=True):
    kv_compression: str
    security: str
    region: str = ""
    kv_transport: str = "own"


class StartPush(msgspec.Struct, frozen=True, tag=True):
    """Starts a push. The answer comes once it has ended, and tells whether all targets hold the
    rank's part.
    """

    placement_id: bytes
    tenant_id: str
    num_tokens: int
    first_token: int
    targets: KvTargets
    link_key: LinkKey | None
    bounds: PushBounds | None = None
    is_zero_retention: bool = False


class Expect(msgspec.Struct, frozen=True, tag=True):
    """Expects a push. The answer comes once frames may come."""

    placement_id: bytes
    num_tokens: int
    num_held_tokens: int
    block_tables: list[list[int]]
    prefill_worker_id: str
    link_key: LinkKey | None
    bounds: PushBounds | None = None
    prefill_region: str | None = None
    is_zero_retention: bool = False


class Forget(msgspec.Struct, frozen=True, tag=True):
    """Forgets a push. The answer is `Held`, once no copy writes the blocks."""

    placement_id: bytes


class CloseReceiver(msgspec.Struct, frozen=True, tag=True):
    pass


class CloseSender(msgspec.Struct, frozen=True, tag=True):
    pass


Command = OpenReceiver | OpenSender | StartPush | Expect | Forget | CloseReceiver | CloseSender


class Call(msgspec.Struct, frozen=True, tag=True):
    number: int
    command: Command


class Computed(msgspec.Struct, frozen=True, tag=True):
    """The progress of a prefill. `block_tables` is None if they are as they were last sent."""

    placement_id: bytes
    num_computed_tokens: int
    num_cached_tokens: int
    block_tables: list[list[int]] | None


class CancelPush(msgspec.Struct, frozen=True, tag=True):
    placement_id: bytes


class ForgetWorker(msgspec.Struct, frozen=True, tag=True):
    """The worker's link key is not used again."""

    prefill_worker_id: str


ToRank = Call | Computed | CancelPush | ForgetWorker


class Held(msgspec.Struct, frozen=True, tag=True):
    num_held_tokens: int
    num_cached_tokens: int


Result = DataPlaneAddress | Held | bool | None


class Answer(msgspec.Struct, frozen=True, tag=True):
    number: int
    result: Result = None


class CallFailed(msgspec.Struct, frozen=True, tag=True):
    """A failed call, with the code of its HearthError."""

    number: int
    code: str
    message: str


class ReceiptEnded(msgspec.Struct, frozen=True, tag=True):
    """The end of a receipt. `reason` is that of the failure; None: the rank holds all
    of its part.
    """

    placement_id: bytes
    reason: str | None


class Counted(msgspec.Struct, frozen=True, tag=True):
    """Totals of a rank since its start."""

    received: ReceiverCounts = msgspec.field(default_factory=ReceiverCounts)
    num_pushed_bytes: int = 0
    num_pushed_tokens: float = 0.0
    push_s: float = 0.0
    num_compressed_frames: int = 0
    num_saved_bytes: int = 0
    plans: tuple[PushPlan, ...] = ()  # of its open links


ToLeader = Answer | CallFailed | ReceiptEnded | Counted
