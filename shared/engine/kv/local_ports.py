"""Ports of one process: a worker without ranks, or one rank with its part of the KV."""

from __future__ import annotations

from functools import partial

from shared.clock import Clock
from shared.engine.kv.joined_push import JoinedPush
from shared.engine.kv.kv_sender import KvSender, PushCounts, PushedSequence
from shared.engine.kv.kv_writer import KvWriter, ReservedSequence
from shared.engine.kv.ports import Push
from shared.engine.step import KvMemory
from shared.kv_layout import KvShard
from shared.kv_wire.expected_pushes import ReceiverCounts
from shared.kv_wire.link import CompressionCounts, KvDialer, KvReceiver, PushBounds, PushPlan
from shared.kv_wire.sealing.link_keys import LinkKeys
from shared.messages import KvTarget, KvTargets, LinkKey


class LocalPushPort:
    """A `PushPort`. `shard` is the part of `memory` that this process sends; None means the
    whole.
    """

    def __init__(
        self, dialer: KvDialer, memory: KvMemory, clock: Clock, shard: KvShard | None = None
    ) -> None:
        self.counts = PushCounts()
        self._dialer = dialer
        self._memory = memory
        self._clock = clock
        self._shard = memory.kv_layout.whole if shard is None else shard

    @property
    def compressed(self) -> CompressionCounts:
        return self._dialer.compressed

    @property
    def plans(self) -> list[PushPlan]:
        return self._dialer.plans

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
        num_target_cells = sum(target.shard.num_cells for target in targets)
        senders = [
            KvSender(
                placement_id,
                sequence,
                first_token=first_token,
                memory=self._memory,
                dial=partial(self._dialer.link, target.address, link_key),
                clock=self._clock,
                counts=self.counts,
                shard=shard,
                num_target_cells=num_target_cells,
                bounds=bounds,
            )
            for target in targets
            if (shard := self._shard.crossing(target.shard)).num_cells
        ]
        return senders[0] if len(senders) == 1 else JoinedPush(senders)

    async def close(self) -> None:
        await self._dialer.close()


class LocalReceivePort:
    """A `ReceivePort`. `shard` is the part that `memory` holds; None means the whole."""

    def __init__(
        self,
        receiver: KvReceiver,
        memory: KvMemory,
        link_keys: LinkKeys | None = None,
        *,
        counts: ReceiverCounts | None = None,
        shard: KvShard | None = None,
    ) -> None:
        """Receives KV for this process's cache. `link_keys` seal the links to `receiver`; None:
        they are not sealed.
        """
        self.counts = ReceiverCounts() if counts is None else counts
        self._receiver = receiver
        self._memory = memory
        self._link_keys = link_keys
        self._shard = memory.kv_layout.whole if shard is None else shard

    @property
    def targets(self) -> KvTargets:
        return (KvTarget(shard=self._shard, address=self._receiver.address),)

    def expect(
        self,
        placement_id: bytes,
        sequence: ReservedSequence,
        *,
        num_held_tokens: int,
        prefill_worker_id: str,
        prefill_region: str | None = None,
        bounds: PushBounds | None = None,
    ) -> KvWriter:
        writer = KvWriter(
            sequence, self._memory, num_held_tokens=num_held_tokens, shard=self._shard
        )
        is_private = sequence.is_zero_retention
        self._receiver.expect(placement_id, writer, bounds, is_private=is_private)
        return writer

    async def ready(self, placement_id: bytes) -> None:
        pass

    async def forget(self, placement_id: bytes) -> None:
        self._receiver.forget(placement_id)
        await self._receiver.idle(placement_id)

    def link_key(self, prefill_worker_id: str, region: str | None = None) -> LinkKey | None:
        if self._link_keys is None:
            return None
        return self._link_keys.key_for(prefill_worker_id, region)

    def forget_worker(self, prefill_worker_id: str) -> None:
        if self._link_keys is not None:
            self._link_keys.forget(prefill_worker_id)

    async def close(self) -> None:
        await self._receiver.close()
