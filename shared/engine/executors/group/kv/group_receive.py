"""Receipts of a worker of several ranks: each rank receives its own layers and heads.

The leader sends the ranks the blocks of each placement that they may expect. A prompt is received
once all ranks have their parts; else the tokens that are held are the fewest of a rank.
"""

from __future__ import annotations

import asyncio
from dataclasses import fields

from shared.engine.executors.group.kv.kv_messages import (
    CloseReceiver,
    Counted,
    Expect,
    Forget,
    ForgetWorker,
    Held,
    OpenReceiver,
    ReceiptEnded,
    Result,
)
from shared.engine.executors.group.kv.rank_links import RankLinks
from shared.engine.kv.kv_writer import ReservedSequence
from shared.kv_wire.expected_pushes import ReceiverCounts
from shared.kv_wire.link import PushBounds
from shared.kv_wire.sealing.link_keys import LinkKeys
from shared.messages import DataPlaneAddress, KvTarget, KvTargets, LinkKey
from shared.randomness import Randomness


class GroupReceipt:
    """A `Receipt`. `expected` resolves once each rank expects its frames."""

    def __init__(
        self, num_held_tokens: int, ranks: range, expected: list[asyncio.Future[Result]]
    ) -> None:
        self.ended: asyncio.Future[str | None] = asyncio.get_running_loop().create_future()
        self.num_held_tokens = num_held_tokens
        self.num_cached_tokens = 0
        self.expected = expected
        self._receiving = set(ranks)

    @property
    def is_complete(self) -> bool:
        return not self._receiving

    def rank_ended(self, rank: int, reason: str | None) -> None:
        if reason is not None:
            self.fail(reason)
            return
        self._receiving.discard(rank)
        if self.is_complete:
            self._end(None)

    def hold(self, held: list[Held]) -> None:
        self.num_held_tokens = min(each.num_held_tokens for each in held)
        self.num_cached_tokens = max(each.num_cached_tokens for each in held)

    def fail(self, reason: str) -> None:
        self._end(reason)

    def _end(self, reason: str | None) -> None:
        if not self.ended.done():
            self.ended.set_result(reason)


class GroupReceivePort:
    """A `ReceivePort`. Construct with `open`."""

    def __init__(
        self, links: RankLinks, addresses: list[DataPlaneAddress], link_keys: LinkKeys | None
    ) -> None:
        self.targets: KvTargets = tuple(
            KvTarget(shard=shard, address=address)
            for shard, address in zip(links.shards, addresses, strict=True)
        )
        self.counts = ReceiverCounts()
        self._links = links
        self._link_keys = link_keys
        self._receipts: dict[bytes, GroupReceipt] = {}
        self._counted = dict.fromkeys(links.ranks, ReceiverCounts())
        links.listen(self._on_event)

    @classmethod
    async def open(
        cls,
        links: RankLinks,
        randomness: Randomness,
        *,
        bind_host: str,
        bind_port: int,
        advertised_host: str | None,
        kv_compression: str,
        link_keys: LinkKeys | None,
        region: str = "",
        kv_transport: str = "own",
    ) -> GroupReceivePort:
        """Opens a receiver of each rank. They listen at `bind_port` and the ports after it, or at
        free ones if it is 0. Raises ConfigError for an address that is not this host's or in use.
        """
        await links.open()
        calls = [
            links.call(
                rank,
                OpenReceiver(
                    randomness.bytes(16),
                    bind_host,
                    bind_port + index if bind_port else 0,
                    advertised_host,
                    kv_compression,
                    is_sealed=link_keys is not None,
                    region=region,
                    kv_transport=kv_transport,
                ),
            )
            for index, rank in enumerate(links.ranks)
        ]
        await asyncio.wait(calls)
        addresses = [each.result() for each in calls]
        return cls(
            links, [each for each in addresses if isinstance(each, DataPlaneAddress)], link_keys
        )

    def expect(
        self,
        placement_id: bytes,
        sequence: ReservedSequence,
        *,
        num_held_tokens: int,
        prefill_worker_id: str,
        prefill_region: str | None = None,
        bounds: PushBounds | None = None,
    ) -> GroupReceipt:
        command = Expect(
            placement_id,
            sequence.num_prefill_tokens,
            num_held_tokens,
            [list(table) for table in sequence.block_tables],
            prefill_worker_id,
            self.link_key(prefill_worker_id, prefill_region),
            bounds,
            prefill_region,
            sequence.is_zero_retention,
        )
        expected = [self._links.call(rank, command) for rank in self._links.ranks]
        receipt = GroupReceipt(num_held_tokens, self._links.ranks, expected)
        self._receipts[placement_id] = receipt
        return receipt

    async def ready(self, placement_id: bytes) -> None:
        """Raises LinkLost if a rank is lost."""
        expected = self._receipts[placement_id].expected
        await asyncio.wait(expected)
        for each in expected:
            each.result()

    async def forget(self, placement_id: bytes) -> None:
        """A rank that is lost writes nothing more."""
        calls = [self._links.call(rank, Forget(placement_id)) for rank in self._links.ranks]
        receipt = self._receipts[placement_id]
        held = await asyncio.gather(*calls, return_exceptions=True)
        found = [each for each in held if isinstance(each, Held)]
        if len(found) == len(calls):
            receipt.hold(found)
        del self._receipts[placement_id]

    def link_key(self, prefill_worker_id: str, region: str | None = None) -> LinkKey | None:
        if self._link_keys is None:
            return None
        return self._link_keys.key_for(prefill_worker_id, region)

    def forget_worker(self, prefill_worker_id: str) -> None:
        if self._link_keys is not None:
            self._link_keys.forget(prefill_worker_id)
            for rank in self._links.ranks:
                self._links.send(rank, ForgetWorker(prefill_worker_id))

    async def close(self) -> None:
        await asyncio.gather(
            *(self._links.call(rank, CloseReceiver()) for rank in self._links.ranks),
            return_exceptions=True,
        )

    def _on_event(self, rank: int, event: ReceiptEnded | Counted | None) -> None:
        match event:
            case ReceiptEnded(placement_id=placement_id, reason=reason):
                if placement_id in self._receipts:
                    self._receipts[placement_id].rank_ended(rank, reason)
            case Counted(received=received):
                self._counted[rank] = received
                for each in fields(ReceiverCounts):
                    total = sum(getattr(counts, each.name) for counts in self._counted.values())
                    setattr(self.counts, each.name, total)
            case None:
                for receipt in self._receipts.values():
                    receipt.fail(f"rank {rank} of this worker is lost")
