"""The receipts of one rank, as its leader announces them."""

from __future__ import annotations

from collections.abc import Callable

from shared.engine.executors.group.kv.kv_messages import Expect, Held, OpenReceiver
from shared.engine.executors.group.kv.leader_sequence import LeaderSequence
from shared.engine.executors.group.kv.rank_memory import RankKvMemory
from shared.engine.kv.frame_codec import load_codec
from shared.engine.kv.local_ports import LocalReceivePort
from shared.engine.kv.ports import Receipt
from shared.errors import ConfigError
from shared.kv_wire.kv_server import KvServer
from shared.kv_wire.ports.nixl_port import start_nixl
from shared.kv_wire.sealing.link_keys import LinkKeys
from shared.randomness import SystemRandomness


class RankReceipts:
    """Construct with `open`. `on_ended(placement_id, reason)` reports the end of each receipt."""

    def __init__(
        self,
        port: LocalReceivePort,
        link_keys: LinkKeys | None,
        on_ended: Callable[[bytes, str | None], None],
    ) -> None:
        self.port = port
        self._link_keys = link_keys
        self._on_ended = on_ended
        self._receipts: dict[bytes, Receipt] = {}

    @classmethod
    async def open(
        cls,
        memory: RankKvMemory,
        command: OpenReceiver,
        on_ended: Callable[[bytes, str | None], None],
    ) -> RankReceipts:
        """Raises ConfigError for an address that is not this host's."""
        # it generates no key: the leader sends its own
        link_keys = LinkKeys("aead", SystemRandomness()) if command.is_sealed else None
        try:
            receiver = await KvServer.start(
                instance_id=command.instance_id,
                bind_host=command.bind_host,
                bind_port=command.bind_port,
                advertised_host=command.advertised_host,
                codec=load_codec(command.kv_compression, memory.kv_layout.dtype),
                link_keys=link_keys,
                page_lock=memory.page_lock,
                region=command.region,
                nixl=await start_nixl(command.kv_transport),
            )
        except OSError as error:
            at = f"{command.bind_host!r}, port {command.bind_port or 'any'}"
            reason = f"cannot receive KV on {at}: {error}"
            raise ConfigError(f"data_plane_host: {reason}") from None
        port = LocalReceivePort(
            receiver, memory, link_keys, counts=receiver.counts, shard=memory.shard
        )
        return cls(port, link_keys, on_ended)

    def expect(self, command: Expect) -> None:
        if self._link_keys is not None and command.link_key is not None:
            self._link_keys.adopt(
                command.prefill_worker_id, command.link_key, command.prefill_region
            )
        placement_id = command.placement_id
        receipt = self.port.expect(
            placement_id,
            LeaderSequence(
                command.num_tokens,
                is_zero_retention=command.is_zero_retention,
                block_tables=command.block_tables,
            ),
            num_held_tokens=command.num_held_tokens,
            prefill_worker_id=command.prefill_worker_id,
            bounds=command.bounds,
        )
        self._receipts[placement_id] = receipt
        receipt.ended.add_done_callback(lambda ended: self._on_ended(placement_id, ended.result()))

    async def forget(self, placement_id: bytes) -> Held:
        await self.port.forget(placement_id)
        receipt = self._receipts.pop(placement_id)
        return Held(receipt.num_held_tokens, receipt.num_cached_tokens)
