"""Decode's end of the KV data plane: listens on TCP and on a unix socket for all senders."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import socket
from pathlib import Path

import msgspec
import structlog

from shared.background import Background, is_logged
from shared.clock import Clock, MonotonicClock
from shared.errors import LinkLost
from shared.kv_wire import tcp
from shared.kv_wire.compression import FrameCodec
from shared.kv_wire.expected_pushes import ExpectedPushes, ReceiverCounts
from shared.kv_wire.frames import (
    Hello,
    ProtocolError,
    Welcome,
    closing_record,
)
from shared.kv_wire.handshake import read_hello, send_sealed_welcome, send_welcome
from shared.kv_wire.link import FrameSink, PageLock, PushBounds
from shared.kv_wire.ports import nixl_link
from shared.kv_wire.ports.nixl_link import NixlReads, NixlReception
from shared.kv_wire.ports.nixl_port import NixlPort
from shared.kv_wire.ports.push_plan import link_end, max_frame_bytes, plan_push
from shared.kv_wire.sealing.link_keys import LinkKeys
from shared.kv_wire.shared_memory import NUM_SLOTS, SharedMemoryReception, create_memory
from shared.kv_wire.tcp import TcpReception
from shared.lifecycle.socket_directory import make_socket_directory
from shared.messages import DataPlaneAddress, LinkKey

log = structlog.get_logger(__name__)

SOCKET = "/kv.sock"
HANDSHAKE_TIMEOUT_S = 5.0
MAX_CONNECTIONS = 1024
# The listener pauses so long after a failed accept (out of file descriptors).
ACCEPT_PAUSE_S = 0.1

Reception = TcpReception | SharedMemoryReception | NixlReception


class KvServer:
    """A `KvReceiver`. Create it with `KvServer.start`; `close` ends every connection."""

    def __init__(
        self,
        address: DataPlaneAddress,
        listeners: tuple[socket.socket, ...],
        directory: Path,
        codec: FrameCodec | None,
        clock: Clock,
        link_keys: LinkKeys | None,
        page_lock: PageLock | None = None,
        *,
        region: str = "",
        nixl: NixlPort | None = None,
    ) -> None:
        self._nixl = nixl
        self._address = address
        self._directory = directory
        self._codec = codec
        self._clock = clock
        self._link_keys = link_keys
        self._page_lock = page_lock
        self._end = link_end(
            "" if page_lock is None else page_lock.device, () if nixl is None else ("nixl",)
        )
        self._placements = ExpectedPushes(region)
        self._receptions: set[Reception] = set()
        self._handshakes = Background()
        self._listeners = listeners
        self._accepting = Background()
        for listener in listeners:
            self._accepting.start_own(self._accept(listener))

    @classmethod
    async def start(
        cls,
        *,
        instance_id: bytes,
        bind_host: str = "127.0.0.1",
        bind_port: int = 0,
        advertised_host: str | None = None,
        codec: FrameCodec | None = None,
        clock: Clock | None = None,
        link_keys: LinkKeys | None = None,
        page_lock: PageLock | None = None,
        region: str = "",
        nixl: NixlPort | None = None,
    ) -> KvServer:
        """Listens for peers, which dial `advertised_host`, by default `bind_host`, at `bind_port`
        or, if that is 0, at a free port. `codec` decodes frames that peers on TCP compress. Peers
        on TCP must use `link_keys`; None: links are not sealed. `page_lock` locks the memory from
        which a device copies frames. `region` is that of this process. `nixl` reads from peers
        that offer it on TCP links without keys. Raises OSError.
        """
        loop = asyncio.get_running_loop()
        found = await loop.getaddrinfo(bind_host, bind_port, type=socket.SOCK_STREAM)
        family, _, _, _, bind_address = found[0]
        directory = make_socket_directory("hearth-kv-", name_bytes=len(SOCKET))
        unix_path = directory / SOCKET[1:]
        with contextlib.ExitStack() as undo:
            undo.callback(shutil.rmtree, directory, ignore_errors=True)
            tcp_listener = undo.enter_context(_listener(family, bind_address))
            unix_listener = undo.enter_context(_listener(socket.AF_UNIX, str(unix_path)))
            undo.pop_all()
        host = bind_host if advertised_host is None else advertised_host
        port = tcp_listener.getsockname()[1]
        address = DataPlaneAddress(
            host=host, port=port, unix_path=str(unix_path), instance_id=instance_id
        )
        listeners = (tcp_listener, unix_listener)
        clock = clock or MonotonicClock()
        return cls(
            address,
            listeners,
            directory,
            codec,
            clock,
            link_keys,
            page_lock,
            region=region,
            nixl=nixl,
        )

    @property
    def address(self) -> DataPlaneAddress:
        return self._address

    @property
    def counts(self) -> ReceiverCounts:
        return self._placements.counts

    @property
    def num_connections(self) -> int:
        return len(self._receptions)

    def expect(
        self,
        placement_id: bytes,
        sink: FrameSink,
        bounds: PushBounds | None = None,
        *,
        is_private: bool = False,
    ) -> None:
        """Expects the push of a placement. Raises ValueError if the placement is expected
        already.
        """
        self._placements.expect(placement_id, sink, bounds, is_private=is_private)

    def forget(self, placement_id: bytes) -> None:
        self._placements.forget(placement_id)

    async def idle(self, placement_id: bytes) -> None:
        await self._placements.idle(placement_id)

    async def close(self) -> None:
        """Ends all connections and cancels deliveries in progress. Idempotent."""
        await self._accepting.stop()
        await self._handshakes.stop()
        for listener in self._listeners:
            listener.close()
        receptions = list(self._receptions)
        deliveries = [reception.deliveries.task for reception in receptions]
        for reception in receptions:
            await reception.stream.close("the receiver is closing")
        for delivery in deliveries:
            delivery.cancel()
        await asyncio.gather(*deliveries, return_exceptions=True)
        if self._nixl is not None:
            self._nixl.close()
        shutil.rmtree(self._directory, ignore_errors=True)

    # ── new connections ──────────────────────────────────────────────────────────────────────────

    async def _accept(self, listener: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                sock, _ = await loop.sock_accept(listener)
            except OSError as error:
                log.warning("kv_accept_failed", error=str(error))
                await asyncio.sleep(ACCEPT_PAUSE_S)
                continue
            if len(self._receptions) + len(self._handshakes) >= MAX_CONNECTIONS:
                _dismiss(sock, f"the receiver is at its limit of {MAX_CONNECTIONS} connections")
                continue
            self._handshakes.start_item(self._welcome(sock), is_logged)

    async def _welcome(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        try:
            async with asyncio.timeout(HANDSHAKE_TIMEOUT_S):
                hello, received = await read_hello(sock, self._address.instance_id)
                if sock.family == socket.AF_UNIX:
                    reception = await self._open_unix(sock, hello)
                else:
                    reception = await self._open_tcp(sock, hello, received)
        except (LinkLost, OSError, TimeoutError) as error:
            self.counts.num_bad_peers += 1
            reason = "the handshake timed out" if isinstance(error, TimeoutError) else str(error)
            log.info("kv_peer_rejected", reason=reason)
            _dismiss(sock, reason if isinstance(error, ProtocolError | TimeoutError) else None)
        except BaseException:
            sock.close()
            raise
        else:
            await self._attach(sock, reception)

    async def _open_tcp(self, sock: socket.socket, hello: Hello, received: bytes) -> Reception:
        link_key = self._link_key_of(hello)
        tcp.tune(sock)
        if (reads := await self._opened_reads(hello, link_key)) is not None:
            return await self._open_nixl(sock, hello, reads)
        codecs = () if self._codec is None else (self._codec.name,)
        welcome = self._own_welcome(tcp.NUM_SLOTS, hello, codecs, is_local=False)
        ciphers = None
        if link_key is None:
            await send_welcome(sock, welcome, None)
        else:
            ciphers = await send_sealed_welcome(sock, welcome, hello, received, link_key)
        region = hello.region
        if self._link_keys is not None:
            region = self._link_keys.region_of(hello.key_id) or ""
        return TcpReception(
            self._placements,
            self._clock,
            self._codec,
            ciphers,
            region,
            max_frame_bytes=welcome.slot_bytes,
            page_lock=self._page_lock,
        )

    async def _opened_reads(self, hello: Hello, link_key: LinkKey | None) -> NixlReads | None:
        """Returns the means to read the sender's slots. None: the own ports serve."""
        plan = plan_push(hello.end, self._end, is_local=False, is_sealed=link_key is not None)
        offer = hello.nixl
        if plan.port != "nixl" or self._nixl is None or isinstance(offer, msgspec.UnsetType):
            return None
        try:
            return await self._nixl.open_reads(offer, self._page_lock)
        except LinkLost as error:
            log.warning("kv_transport_failed", port="nixl", reason=error.message, instead="tcp")
            return None

    async def _open_nixl(self, sock: socket.socket, hello: Hello, reads: NixlReads) -> Reception:
        welcome = self._own_welcome(nixl_link.NUM_SLOTS, hello, is_local=False)
        frame_bytes = min(welcome.frame_bytes, reads.slot_bytes)
        welcome = msgspec.structs.replace(
            welcome, slot_bytes=reads.slot_bytes, frame_bytes=frame_bytes, port="nixl"
        )
        try:
            await send_welcome(sock, welcome, None)
        except BaseException:
            reads.close()
            raise
        return NixlReception(self._placements, self._clock, reads, peer_region=hello.region)

    def _own_welcome(
        self, num_slots: int, hello: Hello, codecs: tuple[str, ...] = (), *, is_local: bool
    ) -> Welcome:
        plan = plan_push(hello.end, self._end, is_local=is_local)
        return Welcome(
            self._address.instance_id,
            num_slots,
            max_frame_bytes(hello.end, self._end),
            codecs,
            region=self._placements.region,
            frame_bytes=plan.frame_bytes,
            end=self._end,
        )

    def _link_key_of(self, hello: Hello) -> LinkKey | None:
        if self._link_keys is None:
            if hello.key_id:
                raise ProtocolError("links to this receiver are not sealed")
            return None
        link_key = self._link_keys.find(hello.key_id)
        if link_key is None:
            raise ProtocolError("the link key is unknown here" if hello.key_id else "no link key")
        region = self._link_keys.region_of(hello.key_id)
        if region is not None and hello.region != region:
            self.counts.num_outside += 1
            raise ProtocolError(
                f"the peer claims the region {hello.region[:100]!r}; that of its key is {region!r}"
            )
        return link_key

    async def _open_unix(self, sock: socket.socket, hello: Hello) -> Reception:
        welcome = self._own_welcome(NUM_SLOTS, hello, is_local=True)
        slot_bytes = welcome.slot_bytes
        fd = create_memory(NUM_SLOTS * slot_bytes)
        try:
            await send_welcome(sock, welcome, fd)
            return SharedMemoryReception(
                self._placements,
                self._clock,
                fd,
                NUM_SLOTS,
                slot_bytes,
                self._page_lock,
                peer_region=hello.region,
            )
        finally:
            os.close(fd)

    async def _attach(self, sock: socket.socket, reception: Reception) -> None:
        self._receptions.add(reception)
        reception.deliveries.task.add_done_callback(lambda _: self._receptions.discard(reception))
        loop = asyncio.get_running_loop()
        try:
            await loop.connect_accepted_socket(lambda: reception.stream, sock)
        except BaseException:
            sock.close()
            reception.stream.end(LinkLost("the connection ended before its first frame"))
            raise


def _listener(family: int, address: object) -> socket.socket:
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setblocking(False)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)  # type: ignore[arg-type]
        listener.listen(128)
    except OSError:
        listener.close()
        raise
    return listener


def _dismiss(sock: socket.socket, reason: str | None) -> None:
    """Sends the reason, if the socket accepts it without waiting, and closes."""
    with sock, contextlib.suppress(OSError):
        sock.setblocking(False)
        if reason is not None:
            sock.send(closing_record(reason))
