"""Opens the ports through which a worker pushes and receives KV."""

from __future__ import annotations

import asyncio
from socket import gethostname
from typing import Protocol, cast

import structlog

from shared.background import start_awaited
from shared.clock import Clock
from shared.config import EncodeConfig, WorkerConfig
from shared.engine.executors.group.kv.group_push import GroupPushPort
from shared.engine.executors.group.kv.group_receive import GroupReceivePort
from shared.engine.executors.group.kv.rank_links import RankLinks
from shared.engine.kv.frame_codec import CODED_DTYPE, load_codec
from shared.engine.kv.local_ports import LocalPushPort, LocalReceivePort
from shared.engine.kv.ports import PushPort, ReceivePort
from shared.engine.step import KvMemory
from shared.errors import ConfigError
from shared.kv_wire.compression import FrameCodec
from shared.kv_wire.dialer import DataPlaneSecurity, Dialer
from shared.kv_wire.kv_server import KvServer
from shared.kv_wire.link import PageLock
from shared.kv_wire.ports.nixl_port import NixlPort, start_nixl
from shared.kv_wire.sealing.link_keys import LinkKeys
from shared.randomness import Randomness

log = structlog.get_logger(__name__)


class CodecLoading:
    """Loads the codec of KV on a thread, once: from `begin`, or when it is first needed."""

    def __init__(self, kv_compression: str) -> None:
        self._kv_compression = kv_compression
        self._loading: asyncio.Task[FrameCodec | None] | None = None

    def begin(self) -> None:
        """Starts loading: compiling the loops takes seconds, while weights are read. Idempotent."""
        if self._loading is None:
            loading = asyncio.to_thread(load_codec, self._kv_compression, CODED_DTYPE)
            self._loading = start_awaited(loading)

    async def codec(self, dtype: str) -> FrameCodec | None:
        """Returns the codec of KV of this dtype, or None if it has none."""
        if dtype != CODED_DTYPE:
            return None
        self.begin()
        assert self._loading is not None, "it has begun"
        return await self._loading


class DataPlane(Protocol):
    async def push_port(self) -> PushPort: ...

    async def receive_port(self) -> ReceivePort:
        """Returns the port that receives KV. Raises ConfigError for an address that is
        not this host's.
        """
        ...


class ProcessDataPlane:
    """The `DataPlane` of a worker of one process."""

    def __init__(
        self,
        config: WorkerConfig,
        memory: KvMemory,
        clock: Clock,
        randomness: Randomness,
        codec: CodecLoading,
    ) -> None:
        self._config = config
        self._memory = memory
        self._clock = clock
        self._randomness = randomness
        self._security = data_plane_security(config)
        self._codec = codec

    async def push_port(self) -> PushPort:
        dialer = Dialer(
            codec=await self._load_codec(),
            security=self._security,
            page_lock=self._memory.page_lock,
            region=self._config.region,
            nixl=await start_nixl(self._config.kv_transport),
        )
        return LocalPushPort(dialer, self._memory, self._clock)

    async def receive_port(self) -> ReceivePort:
        link_keys = link_keys_of(self._security, self._randomness)
        receiver = await receive_kv(
            self._config,
            self._randomness.bytes(16),
            await self._load_codec(),
            link_keys,
            self._memory.page_lock,
            nixl=await start_nixl(self._config.kv_transport),
        )
        return LocalReceivePort(receiver, self._memory, link_keys, counts=receiver.counts)

    async def _load_codec(self) -> FrameCodec | None:
        """Returns the codec that both ports share."""
        return await self._codec.codec(self._memory.kv_layout.dtype)


class GroupDataPlane:
    """The `DataPlane` of a worker of several ranks: each has its own."""

    def __init__(self, config: WorkerConfig, links: RankLinks, randomness: Randomness) -> None:
        self._config = config
        self._links = links
        self._randomness = randomness
        self._security = data_plane_security(config)

    async def push_port(self) -> PushPort:
        return await GroupPushPort.open(
            self._links,
            kv_compression=self._config.kv_compression,
            kv_transport=self._config.kv_transport,
            security=self._security,
            region=self._config.region,
        )

    async def receive_port(self) -> ReceivePort:
        return await GroupReceivePort.open(
            self._links,
            self._randomness,
            bind_host=self._config.data_plane_host,
            bind_port=self._config.data_plane_port,
            advertised_host=_advertised_host(self._config),
            kv_compression=self._config.kv_compression,
            kv_transport=self._config.kv_transport,
            link_keys=link_keys_of(self._security, self._randomness),
            region=self._config.region,
        )


def link_keys_of(security: DataPlaneSecurity, randomness: Randomness) -> LinkKeys | None:
    """Returns the keys of links, or None if links are not sealed."""
    return None if security == "none" else LinkKeys(security, randomness)


async def receive_kv(
    config: EncodeConfig,
    instance_id: bytes,
    codec: FrameCodec | None,
    link_keys: LinkKeys | None,
    page_lock: PageLock | None = None,
    *,
    port: int | None = None,
    nixl: NixlPort | None = None,
) -> KvServer:
    """Listens for KV, or for pixels at another `port`. Raises ConfigError for an address that is
    not this host's.
    """
    port = config.data_plane_port if port is None else port
    try:
        return await KvServer.start(
            instance_id=instance_id,
            bind_host=config.data_plane_host,
            bind_port=port,
            advertised_host=_advertised_host(config),
            codec=codec,
            link_keys=link_keys,
            page_lock=page_lock,
            region=config.region,
            nixl=nixl,
        )
    except OSError as error:
        at = f"{config.data_plane_host!r}, port {port or 'any'}"
        reason = f"cannot receive KV on {at}: {error}"
        raise ConfigError(f"data_plane_host: {reason}") from error


def data_plane_security(config: EncodeConfig) -> DataPlaneSecurity:
    """Returns the configured security. Warns of an unprotected data plane off loopback."""
    security = cast(DataPlaneSecurity, config.data_plane_security)  # checked with the config
    if security == "none" and not config.is_on_loopback:
        log.warning("kv_data_plane_unprotected", listens_on=config.data_plane_host)
    return security


def _advertised_host(config: EncodeConfig) -> str | None:
    """Returns the address to advertise for KV, or None for the address that the worker listens at.

    A worker that listens on all interfaces has its host's own name, the only
    difference of replicas.
    """
    if config.data_plane_advertised_host or config.data_plane_host not in ("0.0.0.0", "::"):
        return config.data_plane_advertised_host or None
    return gethostname()
