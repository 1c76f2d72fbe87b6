"""Pushes of a worker of several ranks: each rank pushes its own layers and heads.

The leader tells the ranks what to push where, and how far the prompt is computed. It copies no KV.
"""

from __future__ import annotations

import asyncio

from shared.engine.executors.group.kv.kv_messages import (
    CancelPush,
    CloseSender,
    Computed,
    Counted,
    OpenSender,
    ReceiptEnded,
    StartPush,
)
from shared.engine.executors.group.kv.rank_links import RankLinks
from shared.engine.kv.kv_sender import PushCounts, PushedSequence
from shared.kv_wire.link import CompressionCounts, PushBounds, PushPlan
from shared.kv_wire.shards import sent_shards
from shared.messages import KvTargets, LinkKey


class GroupPush:
    """A `Push` of the ranks that share layers and heads with a target."""

    num_bytes, link_s = 0, 0.0  # ranks count those of all their pushes together
    plan = None

    def __init__(
        self, links: RankLinks, ranks: list[int], command: StartPush, sequence: PushedSequence
    ) -> None:
        self._links = links
        self._ranks = ranks
        self._placement_id = command.placement_id
        self._sequence = sequence
        self._block_tables: list[list[int]] | None = None  # state that the ranks have
        self._calls = [links.call(rank, command) for rank in ranks]

    def computed(self, num_computed_tokens: int) -> None:
        tables = [list(table) for table in self._sequence.block_tables]
        changed, self._block_tables = tables != self._block_tables, tables
        message = Computed(
            self._placement_id,
            num_computed_tokens,
            self._sequence.num_cached_tokens,
            tables if changed else None,
        )
        for rank in self._ranks:
            self._links.send(rank, message)

    def cancel(self) -> None:
        for rank in self._ranks:
            self._links.send(rank, CancelPush(self._placement_id))

    async def run(self) -> bool:
        """A rank that is lost copies nothing more."""
        if self._calls:
            await asyncio.wait(self._calls, return_when=asyncio.FIRST_EXCEPTION)
            if not all(each.done() for each in self._calls):
                self.cancel()
                await asyncio.wait(self._calls)
        results = [each.result() for each in self._calls]  # raises if any failed
        return all(results)


class GroupPushPort:
    """A `PushPort`. Construct with `open`."""

    def __init__(self, links: RankLinks) -> None:
        self.counts = PushCounts()
        self.compressed = CompressionCounts()
        self.plans: list[PushPlan] = []
        self._links = links
        self._sent = sent_shards(links.shards)
        self._counted = dict.fromkeys(links.ranks, Counted())
        links.listen(self._on_event)

    @classmethod
    async def open(
        cls,
        links: RankLinks,
        *,
        kv_compression: str,
        security: str,
        region: str = "",
        kv_transport: str = "own",
    ) -> GroupPushPort:
        await links.open()
        port = cls(links)
        await links.call_all(OpenSender(kv_compression, security, region, kv_transport))
        return port

    def start(
        self,
        placement_id: bytes,
        sequence: PushedSequence,
        *,
        first_token: int,
        targets: KvTargets,
        link_key: LinkKey | None,
        bounds: PushBounds | None = None,
    ) -> GroupPush:
        command = StartPush(
            placement_id,
            sequence.tenant_id,
            sequence.num_tokens,
            first_token,
            targets,
            link_key=link_key,
            bounds=bounds,
            is_zero_retention=sequence.is_zero_retention,
        )
        ranks = [
            rank
            for rank, shard in enumerate(self._sent)
            if any(shard.crossing(each.shard).num_cells for each in targets)
        ]
        return GroupPush(self._links, ranks, command, sequence)

    async def close(self) -> None:
        await asyncio.gather(
            *(self._links.call(rank, CloseSender()) for rank in self._links.ranks),
            return_exceptions=True,
        )

    def _on_event(self, rank: int, event: ReceiptEnded | Counted | None) -> None:
        """Ranks push at the same time: bytes add up, seconds do not."""
        if not isinstance(event, Counted):
            return
        self._counted[rank] = event
        ranks = self._counted.values()
        self.counts.num_bytes = sum(each.num_pushed_bytes for each in ranks)
        self.counts.num_tokens = sum(each.num_pushed_tokens for each in ranks)
        self.counts.busy_s = max(each.push_s for each in ranks)
        self.plans[:] = [plan for each in ranks for plan in each.plans]
        self.compressed.num_frames = sum(each.num_compressed_frames for each in ranks)
        self.compressed.num_saved_bytes = sum(each.num_saved_bytes for each in ranks)
