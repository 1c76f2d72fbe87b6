"""Prefill's end of the KV data plane: one link per decode worker, connected on demand."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Callable
from typing import Literal, get_args

import structlog
from msgspec.structs import replace

from shared.background import start_awaited
from shared.clock import Clock, MonotonicClock
from shared.errors import LinkLost
from shared.kv_wire import tcp
from shared.kv_wire.compression import FrameCodec, LinkCompression
from shared.kv_wire.frames import ProtocolError, Welcome
from shared.kv_wire.handshake import Greeted, send_hello
from shared.kv_wire.link import (
    DEVICE_FRAME_BYTES,
    MAX_FRAME_BYTES,
    CompressionCounts,
    LinkEnd,
    PageLock,
    PushPlan,
)
from shared.kv_wire.ports.nixl_link import NixlSlots, NixlStaging
from shared.kv_wire.ports.nixl_port import OPEN_S, PROBE_S, NixlPort
from shared.kv_wire.ports.push_plan import link_end, plan_push
from shared.kv_wire.push_link import StagedLink, Staging
from shared.kv_wire.shared_memory import SharedMemoryStaging
from shared.kv_wire.tcp import TcpStaging
from shared.messages import DataPlaneAddress, LinkKey

log = structlog.get_logger(__name__)

DataPlaneSecurity = Literal["none", "mac", "aead"]
SECURITIES: tuple[DataPlaneSecurity, ...] = get_args(DataPlaneSecurity)  # weakest first
CONNECT_TIMEOUT_S = 1.0
# A process on this host replies immediately or hangs; the rest of the timeout is for TCP.
UNIX_SHARE = 0.25

# A receiver may claim the instance of another one, or its address, but has not both its address
# and its key.
Route = tuple[DataPlaneAddress, LinkKey | None]


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
        nixl: NixlPort | None = None,
    ) -> None:
        """Dials receivers of KV from a process in `region`. TCP links must have at least
        `security`. `page_lock` locks the slots that a device fills. `nixl` is offered on links
        that are not sealed.
        """
        self._nixl = nixl
        self.region = region
        self._security = security
        self._connect_timeout_s = connect_timeout_s
        self._codec = codec
        self._page_lock = page_lock
        self._end = link_end("" if page_lock is None else page_lock.device)
        self._clock = clock or MonotonicClock()
        self.compressed = CompressionCounts()
        self._links: dict[Route, StagedLink] = {}
        self._dials: dict[Route, asyncio.Task[StagedLink]] = {}

    @property
    def plans(self) -> list[PushPlan]:
        return [each.plan for each in self._links.values() if not each.is_lost]

    async def link(self, target: DataPlaneAddress, link_key: LinkKey | None = None) -> StagedLink:
        """Returns the link to a worker. Raises LinkLost. `link_key` seals the link if it is over
        TCP. Concurrent callers share one link.
        """
        route = target, link_key
        link = self._links.get(route)
        if link is not None and not link.is_lost:
            return link
        dial = self._dials.get(route)
        if dial is None:
            dial = start_awaited(self._dial(route))
            self._dials[route] = dial
            dial.add_done_callback(lambda _: self._dials.pop(route))
        return await asyncio.shield(dial)

    async def close(self) -> None:
        dials = list(self._dials.values())
        for dial in dials:
            dial.cancel()
        await asyncio.gather(*dials, return_exceptions=True)
        for link in list(self._links.values()):
            await link.close()
        if self._nixl is not None:
            self._nixl.close()

    async def _dial(self, route: Route) -> StagedLink:
        target, link_key = route

        def forget(ended: StagedLink) -> None:
            if self._links.get(route) is ended:
                del self._links[route]

        try:
            opening_s = OPEN_S + PROBE_S if self._nixl is not None else 0.0
            async with asyncio.timeout(self._connect_timeout_s + opening_s):
                link = await self._reach(target, link_key, forget)
        except TimeoutError as error:
            raise LinkLost(
                f"{target.host}:{target.port} did not answer within {self._connect_timeout_s} s"
            ) from error
        except (OSError, ValueError, OverflowError) as error:  # the last two: an invalid address
            raise LinkLost(f"{target.host}:{target.port}: {error}") from error
        if link.is_lost:
            raise LinkLost(f"{target.host}:{target.port} closed the connection after its handshake")
        replaced = [each for at, each in self._links.items() if at[0] == target]
        self._links[route] = link
        for each in replaced:  # the receiver has forgotten their keys
            if not each.num_unacked:
                await each.close()
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
        slots, refused = await self._offered_slots(link_key)
        try:
            probe_s = 0.0 if slots is None else PROBE_S
            async with asyncio.timeout(self._connect_timeout_s + probe_s):
                link = await self._connect(
                    family,
                    address,
                    target.instance_id,
                    link_key,
                    on_end,
                    slots=slots,
                    refused=refused,
                )
        except BaseException:
            if slots is not None:
                slots.close()
            raise
        if slots is not None and link.plan.port != "nixl":
            slots.close()
        if link.plan.refused:
            at = f"{target.host}:{target.port}"
            log.warning("kv_transport_failed", port="nixl", peer=at, instead=link.plan.port)
        return link

    async def _offered_slots(self, link_key: LinkKey | None) -> tuple[NixlSlots | None, str]:
        """Returns slots to offer, on links that are not sealed, and the port that has failed."""
        if self._nixl is None or link_key is not None:
            return None, ""
        slot_bytes = DEVICE_FRAME_BYTES if self._end.device else MAX_FRAME_BYTES
        try:
            return await self._nixl.open_slots(slot_bytes, self._page_lock), ""
        except LinkLost as error:
            log.warning("kv_transport_failed", port="nixl", reason=error.message)
            return None, "nixl"

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
        *,
        slots: NixlSlots | None = None,
        refused: str = "",
    ) -> StagedLink:
        end = self._end if slots is None else replace(self._end, ports=("nixl",))
        offer = None if slots is None else slots.offer
        loop = asyncio.get_running_loop()
        sock = socket.socket(family, socket.SOCK_STREAM)
        try:
            sock.setblocking(False)
            start = self._clock.now()
            await loop.sock_connect(sock, address)  # type: ignore[arg-type]
            # Measures the kernels, however busy the peer is
            round_trip_s = self._clock.now() - start
            greeted = await send_hello(sock, instance_id, link_key, self.region, end, offer)
            welcome = greeted.welcome
            plan = _plan(end, greeted, refused)
            if plan.port == "nixl" and slots is not None:
                tcp.tune(sock)
                staging: Staging = NixlStaging(slots, plan.frame_bytes)
            else:
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
            if isinstance(staging, NixlStaging):
                staging.watch(lambda: link.num_unacked)
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


def _plan(end: LinkEnd, greeted: Greeted, refused: str) -> PushPlan:
    """Returns the plan of a link from this end, as the receiver has chosen its port."""
    welcome = greeted.welcome
    plan = plan_push(
        end,
        welcome.end,
        is_local=greeted.fd is not None,
        is_sealed=greeted.ciphers is not None,
        refused=refused,
    )
    if plan.port == "nixl" and welcome.port != "nixl":
        plan = plan_push(end, welcome.end, is_local=False, refused="nixl")
    return replace(plan, frame_bytes=welcome.frame_bytes or plan.frame_bytes)


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
