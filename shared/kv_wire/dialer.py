"""Prefill's end of the KV data plane: one link per decode worker, connected on demand."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Callable
from typing import Literal, get_args

from msgspec.structs import replace

from shared.background import start_awaited
from shared.clock import Clock, MonotonicClock
from shared.errors import LinkLost
from shared.kv_wire import tcp
from shared.kv_wire.compression import FrameCodec, LinkCompression
from shared.kv_wire.frames import ProtocolError, Welcome
from shared.kv_wire.handshake import send_hello
from shared.kv_wire.link import CompressionCounts, PageLock, PushPlan
from shared.kv_wire.ports.push_plan import link_end, plan_push
from shared.kv_wire.push_link import StagedLink, Staging
from shared.kv_wire.shared_memory import SharedMemoryStaging
from shared.kv_wire.tcp import TcpStaging
from shared.messages import DataPlaneAddress, LinkKey

DataPlaneSecurity = Literal["none", "mac", "aead"]
SECURITIES: tuple[DataPlaneSecurity, ...] = get_args(DataPlaneSecurity)  # weakest first
CONNECT_TIMEOUT_S = 1.0
# A process on this host replies immediately or hangs; the rest of the timeout is for TCP.
UNIX_SHARE = 0.25


class Dialer:
    """A `KvDialer`. With a codec, links on which it is faster carry compressed frames."""

    def __init__(
        self,
        connect_timeout_s: float = CONNECT_TIMEOUT_S,
        *,
        codec: FrameCodec | None = None,
        clock: Clock | None = None,
        security: DataPlaneSecurity = "none",
        page_lock: PageLock | None = None,
        region: str = "",
    ) -> None:
        """Dials receivers of KV from a process in `region`. TCP links must have at least
        `security`. `page_lock` locks the slots that a device fills.
        """
        self.region = region
        self._security = security
        self._connect_timeout_s = connect_timeout_s
        self._codec = codec
        self._page_lock = page_lock
        self._end = link_end("" if page_lock is None else page_lock.device)
        self._clock = clock or MonotonicClock()
        self.compressed = CompressionCounts()
        self._links: dict[bytes, StagedLink] = {}
        self._dials: dict[bytes, asyncio.Task[StagedLink]] = {}

    @property
    def plans(self) -> list[PushPlan]:
        return [each.plan for each in self._links.values() if not each.is_lost]

    async def link(self, target: DataPlaneAddress, link_key: LinkKey | None = None) -> StagedLink:
        """Returns the link to a worker. Raises LinkLost. `link_key` seals the link if it is over
        TCP. Concurrent callers share one link.
        """
        link = self._links.get(target.instance_id)
        if link is not None and not link.is_lost:
            return link
        dial = self._dials.get(target.instance_id)
        if dial is None:
            dial = start_awaited(self._dial(target, link_key))
            self._dials[target.instance_id] = dial
            dial.add_done_callback(lambda _: self._dials.pop(target.instance_id))
        return await asyncio.shield(dial)

    async def close(self) -> None:
        dials = list(self._dials.values())
        for dial in dials:
            dial.cancel()
        await asyncio.gather(*dials, return_exceptions=True)
        for link in list(self._links.values()):
            await link.close()

    async def _dial(self, target: DataPlaneAddress, link_key: LinkKey | None) -> StagedLink:
        def forget(ended: StagedLink) -> None:
            if self._links.get(target.instance_id) is ended:
                del self._links[target.instance_id]

        try:
            async with asyncio.timeout(self._connect_timeout_s):
                link = await self._reach(target, link_key, forget)
        except TimeoutError as error:
            raise LinkLost(
                f"{target.host}:{target.port} did not answer within {self._connect_timeout_s} s"
            ) from error
        except (OSError, ValueError, OverflowError) as error:  # the last two: an invalid address
            raise LinkLost(f"{target.host}:{target.port}: {error}") from error
        if link.is_lost:
            raise LinkLost(f"{target.host}:{target.port} closed the connection after its handshake")
        self._links[target.instance_id] = link
        return link

    async def _reach(
        self,
        target: DataPlaneAddress,
        link_key: LinkKey | None,
        on_end: Callable[[StagedLink], None],
    ) -> StagedLink:
        if target.unix_path:
            try:
                async with asyncio.timeout(self._connect_timeout_s * UNIX_SHARE):
                    return await self._connect(
                        socket.AF_UNIX, target.unix_path, target.instance_id, None, on_end
                    )
            except (OSError, ValueError, LinkLost, TimeoutError):
                pass  # another host, or no shared memory: try TCP
        self._check_security(target, link_key)
        loop = asyncio.get_running_loop()
        found = await loop.getaddrinfo(target.host, target.port, type=socket.SOCK_STREAM)
        family, _, _, _, address = found[0]
        return await self._connect(family, address, target.instance_id, link_key, on_end)

    def _check_security(self, target: DataPlaneAddress, link_key: LinkKey | None) -> None:
        offered: DataPlaneSecurity = "none" if link_key is None else link_key.security
        if SECURITIES.index(offered) < SECURITIES.index(self._security):
            raise LinkLost(
                f"{target.host}:{target.port} has data-plane security {offered}, "
                f"this worker requires {self._security}"
            )

    async def _connect(
        self,
        family: int,
        address: object,
        instance_id: bytes,
        link_key: LinkKey | None,
        on_end: Callable[[StagedLink], None],
    ) -> StagedLink:
        loop = asyncio.get_running_loop()
        sock = socket.socket(family, socket.SOCK_STREAM)
        try:
            sock.setblocking(False)
            start = self._clock.now()
            await loop.sock_connect(sock, address)  # type: ignore[arg-type]
            # Measures the kernels, however busy the peer is
            round_trip_s = self._clock.now() - start
            greeted = await send_hello(sock, instance_id, link_key, self.region, self._end)
            welcome = greeted.welcome
            plan = plan_push(self._end, welcome.end, is_local=greeted.fd is not None)
            plan = replace(plan, frame_bytes=welcome.frame_bytes or plan.frame_bytes)
            staging = _staging(sock, welcome, greeted.fd, self._page_lock, plan)
            compression = self._compression(welcome, round_trip_s)
            regions = self.region, welcome.region
            link = StagedLink(
                staging,
                on_end,
                compression,
                greeted.ciphers,
                regions,
                plan=replace(plan, frame_bytes=staging.frame_bytes),
            )
            if family == socket.AF_UNIX:
                await loop.create_unix_connection(lambda: link.stream, sock=sock)
            else:
                await loop.create_connection(lambda: link.stream, sock=sock)
        except BaseException:
            sock.close()
            raise
        return link

    def _compression(self, welcome: Welcome, round_trip_s: float) -> LinkCompression | None:
        """Returns None without a common codec; receivers offer none over shared memory."""
        codec = self._codec
        if codec is None or codec.name not in welcome.codecs:
            return None
        return LinkCompression(codec, self._clock, self.compressed, round_trip_s=round_trip_s)


def _staging(
    sock: socket.socket,
    welcome: Welcome,
    fd: int | None,
    page_lock: PageLock | None,
    plan: PushPlan,
) -> Staging:
    if fd is None:
        if sock.family == socket.AF_UNIX:
            raise ProtocolError("the welcome on the unix socket carries no memory descriptor")
        tcp.tune(sock)
        return TcpStaging(welcome.num_slots, welcome.slot_bytes, plan.frame_bytes, page_lock)
    try:
        return SharedMemoryStaging(
            fd, welcome.num_slots, welcome.slot_bytes, page_lock, frame_bytes=plan.frame_bytes
        )
    finally:
        os.close(fd)
