"""The pushes of one rank, as its leader orders them."""

from __future__ import annotations

from typing import cast

from shared.clock import Clock
from shared.engine.executors.group.kv.kv_messages import Computed, OpenSender, StartPush
from shared.engine.executors.group.kv.leader_sequence import LeaderSequence
from shared.engine.executors.group.kv.rank_memory import RankKvMemory
from shared.engine.kv.frame_codec import load_codec
from shared.engine.kv.local_ports import LocalPushPort
from shared.engine.kv.ports import Push
from shared.kv_layout import KvShard
from shared.kv_wire.dialer import DataPlaneSecurity, Dialer
from shared.kv_wire.ports.nixl_port import NixlPort


class RankPushes:
    """Pushes the part `sent` of the rank's KV; other ranks push the rest."""

    def __init__(
        self,
        memory: RankKvMemory,
        sent: KvShard,
        clock: Clock,
        command: OpenSender,
        nixl: NixlPort | None = None,
    ) -> None:
        codec = load_codec(command.kv_compression, memory.kv_layout.dtype)
        security = cast(DataPlaneSecurity, command.security)
        dialer = Dialer(
            codec=codec,
            security=security,
            page_lock=memory.page_lock,
            region=command.region,
            nixl=nixl,
        )
        self.port = LocalPushPort(dialer, memory, clock, sent)
        self._started: dict[bytes, tuple[LeaderSequence, Push]] = {}

    def start(self, command: StartPush) -> Push:
        """The caller awaits `run` of the push."""
        sequence = LeaderSequence(
            command.num_tokens,
            tenant_id=command.tenant_id,
            is_zero_retention=command.is_zero_retention,
        )
        push = self.port.start(
            command.placement_id,
            sequence,
            first_token=command.first_token,
            targets=command.targets,
            link_key=command.link_key,
            bounds=command.bounds,
        )
        self._started[command.placement_id] = sequence, push
        return push

    async def run(self, placement_id: bytes, push: Push) -> bool:
        try:
            return await push.run()
        finally:
            del self._started[placement_id]

    def computed(self, message: Computed) -> None:
        """Ignores a push that has ended: it failed."""
        if message.placement_id not in self._started:
            return
        sequence, push = self._started[message.placement_id]
        sequence.num_cached_tokens = message.num_cached_tokens
        if message.block_tables is not None:
            sequence.block_tables = message.block_tables
        push.computed(message.num_computed_tokens)

    def cancel(self, placement_id: bytes) -> None:
        if placement_id in self._started:
            self._started[placement_id][1].cancel()
