"""Ports through which a worker pushes and receives KV, whether one process or several ranks hold
its cache.
"""

from __future__ import annotations

import asyncio
from typing import Protocol

from shared.engine.kv.kv_sender import PushCounts, PushedSequence
from shared.engine.kv.kv_writer import ReservedSequence
from shared.kv_wire.expected_pushes import ReceiverCounts
from shared.kv_wire.link import CompressionCounts, PushBounds, PushPlan
from shared.messages import KvTargets, LinkKey


class Push(Protocol):
    """The push of one prefill to all targets; see KvSender."""

    @property
    def num_bytes(self) -> int:
        """Bytes of KV that the targets have acknowledged; 0 if other processes send it."""
        ...

    @property
    def link_s(self) -> float:
        """Seconds with at least one frame under way; 0 if other processes send it."""
        ...

    @property
    def plan(self) -> PushPlan | None:
        """How its first link pushes; None before its first frame, or if other processes send it."""
        ...

    def computed(self, num_computed_tokens: int) -> None: ...

    def cancel(self) -> None: ...

    async def run(self) -> bool:
        """Returns True once each target holds its part of the KV, False after `cancel`. Raises
        HearthError. No copy reads the blocks after `run` has ended.
        """
        ...


class PushPort(Protocol):
    @property
    def counts(self) -> PushCounts: ...

    @property
    def compressed(self) -> CompressionCounts: ...

    @property
    def plans(self) -> list[PushPlan]:
        """Those of all open links of this process."""
        ...

    def start(
        self,
        placement_id: bytes,
        sequence: PushedSequence,
        *,
        first_token: int,
        targets: KvTargets,
        link_key: LinkKey | None,
        bounds: PushBounds | None = None,
    ) -> Push:
        """Starts a push; `bounds` limit where the KV may go; None: anywhere. The caller awaits
        `run` and, until it ends, keeps the sequence's blocks.
        """
        ...

    async def close(self) -> None: ...


class Receipt(Protocol):
    """The KV of one prefill attempt; see KvWriter."""

    ended: asyncio.Future[str | None]

    @property
    def num_cached_tokens(self) -> int: ...

    @property
    def num_held_tokens(self) -> int:
        """Exact after `ReceivePort.forget`."""
        ...

    @property
    def is_complete(self) -> bool: ...

    def fail(self, reason: str) -> None: ...


class ReceivePort(Protocol):
    @property
    def targets(self) -> KvTargets: ...

    @property
    def counts(self) -> ReceiverCounts:
        """One object, which changes."""
        ...

    def expect(
        self,
        placement_id: bytes,
        sequence: ReservedSequence,
        *,
        num_held_tokens: int,
        prefill_worker_id: str,
        prefill_region: str | None = None,
        bounds: PushBounds | None = None,
    ) -> Receipt:
        """Expects KV of a worker in `prefill_region`; None: it is not known. `bounds` limit where
        the KV may come from; None: anywhere.
        """
        ...

    async def ready(self, placement_id: bytes) -> None:
        """Returns once frames of an expected placement may come. Raises HearthError."""
        ...

    async def forget(self, placement_id: bytes) -> None:
        """Returns when no copy writes the blocks of the placement, and none ever will."""
        ...

    def link_key(self, prefill_worker_id: str, region: str | None = None) -> LinkKey | None:
        """Returns the key of the links from this worker, or None if links are not sealed. It is
        bound to the worker's region; None: that is not known.
        """
        ...

    def forget_worker(self, prefill_worker_id: str) -> None:
        """Forgets a worker, whose link key is not used again."""
        ...

    async def close(self) -> None: ...
