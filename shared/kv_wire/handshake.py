"""Hello and Welcome, before a socket becomes a stream: both ends verify their peer.

On a unix socket the Welcome carries the staging memory as a file descriptor. On TCP both ends
derive the ciphers of the link from its key and from both records.
"""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec

from shared.errors import LinkLost
from shared.kv_wire.frames import (
    MAX_SLOTS,
    PREFIX,
    Goodbye,
    Hello,
    NixlOffer,
    ProtocolError,
    Record,
    Welcome,
    decode_prefix,
    decode_record,
    encode_record,
)
from shared.kv_wire.link import MAX_FRAME_BYTES, LinkEnd
from shared.kv_wire.sealing.cipher_choice import NONCE_BYTES, common_cipher, preferred_ciphers
from shared.messages import LinkKey

if TYPE_CHECKING:
    from shared.kv_wire.sealing.ciphers import LinkCiphers

Receive = Callable[[int], Awaitable[bytes]]


@dataclass(frozen=True, slots=True)
class Greeted:
    """The result of a handshake. `fd` is the descriptor of the receiver's memory; the caller closes
    it.
    """

    welcome: Welcome
    fd: int | None
    ciphers: LinkCiphers | None


async def send_hello(
    sock: socket.socket,
    instance_id: bytes,
    link_key: LinkKey | None = None,
    region: str = "",
    end: LinkEnd = LinkEnd(),  # noqa: B008  it is immutable
    nixl: NixlOffer | None = None,
) -> Greeted:
    """Does the sender's part of the handshake, for a process in `region`. With a key the link is
    sealed.
    """
    loop = asyncio.get_running_loop()
    offer = msgspec.UNSET if nixl is None else nixl
    hello = Hello(instance_id, region=region, end=end, nixl=offer)
    if link_key is not None:
        hello = _sealed_hello(hello, link_key)
    sent = encode_record(hello)
    await loop.sock_sendall(sock, sent)
    fds: list[int] = []

    async def receive(num_bytes: int) -> bytes:
        if sock.family != socket.AF_UNIX:
            return await loop.sock_recv(sock, num_bytes)
        await _readable(sock)
        data, new_fds, _, _ = socket.recv_fds(sock, num_bytes, 1, socket.MSG_CMSG_CLOEXEC)
        fds.extend(new_fds)
        return data

    try:
        reply, received = await _read_record(receive)
        welcome = _checked(reply, hello)
        if len(fds) > 1:
            raise ProtocolError(f"the welcome carries {len(fds)} file descriptors, more than 1")
    except BaseException:
        for fd in fds:
            os.close(fd)
        raise
    ciphers = None
    if link_key is not None:
        from shared.kv_wire.sealing.ciphers import ciphers_of_sender

        ciphers = ciphers_of_sender(link_key, welcome.cipher, sent, received)
    return Greeted(welcome, fds[0] if fds else None, ciphers)


def _sealed_hello(hello: Hello, link_key: LinkKey) -> Hello:
    return msgspec.structs.replace(
        hello, key_id=link_key.key_id, nonce=os.urandom(NONCE_BYTES), ciphers=preferred_ciphers()
    )


async def read_hello(sock: socket.socket, instance_id: bytes) -> tuple[Hello, bytes]:
    """Returns the Hello and its bytes: the receiver's part of the handshake. Raises ProtocolError,
    whose message is the reason to send back.
    """
    loop = asyncio.get_running_loop()
    hello, received = await _read_record(lambda num_bytes: loop.sock_recv(sock, num_bytes))
    if not isinstance(hello, Hello):
        raise ProtocolError(f"received {type(hello).__name__}, expected Hello")
    if hello.instance_id != instance_id:
        raise ProtocolError("the requested instance does not listen here")
    return hello, received


async def send_sealed_welcome(
    sock: socket.socket, welcome: Welcome, hello: Hello, received: bytes, link_key: LinkKey
) -> LinkCiphers:
    """Completes the Welcome and sends it. `received` are the bytes of the Hello."""
    if len(hello.nonce) != NONCE_BYTES:
        raise ProtocolError(f"the nonce has {len(hello.nonce)} bytes, expected {NONCE_BYTES}")
    cipher = common_cipher(hello.ciphers, preferred_ciphers())
    if cipher is None:
        raise ProtocolError("the peer has no common cipher")
    welcome = msgspec.structs.replace(welcome, nonce=os.urandom(NONCE_BYTES), cipher=cipher)
    await send_welcome(sock, welcome, None)
    from shared.kv_wire.sealing.ciphers import ciphers_of_receiver

    return ciphers_of_receiver(link_key, cipher, received, encode_record(welcome))


async def send_welcome(sock: socket.socket, welcome: Welcome, fd: int | None) -> None:
    data = encode_record(welcome)
    if fd is None:
        await asyncio.get_running_loop().sock_sendall(sock, data)
    elif socket.send_fds(sock, [data], [fd]) != len(data):
        raise ProtocolError("the peer does not read its socket")


def _checked(reply: Record, hello: Hello) -> Welcome:
    if isinstance(reply, Goodbye):
        raise ProtocolError(f"the receiver rejected the connection: {reply.reason}")
    if not isinstance(reply, Welcome):
        raise ProtocolError(f"received {type(reply).__name__}, expected Welcome")
    if reply.instance_id != hello.instance_id:
        raise ProtocolError("another instance replied")
    if hello.key_id and (reply.cipher not in hello.ciphers or len(reply.nonce) != NONCE_BYTES):
        raise ProtocolError("the receiver does not seal the link")
    is_sized = MAX_FRAME_BYTES <= reply.slot_bytes <= hello.end.max_frame_bytes
    if not 1 <= reply.num_slots <= MAX_SLOTS or not is_sized:
        raise ProtocolError(f"unsupported: {reply.num_slots} slots of {reply.slot_bytes} bytes")
    if reply.port and (reply.port != "nixl" or hello.nixl is msgspec.UNSET):
        raise ProtocolError(f"port {reply.port[:100]!r} was not offered")
    if not 0 <= reply.frame_bytes <= reply.slot_bytes:
        raise ProtocolError(f"frames of {reply.frame_bytes} bytes exceed their slots")
    return reply


async def _read_record(receive: Receive) -> tuple[Record, bytes]:
    """Returns the record, and its bytes."""
    prefix = await _read_exactly(receive, PREFIX.size)
    body = await _read_exactly(receive, decode_prefix(prefix))
    return decode_record(body), prefix + body


async def _read_exactly(receive: Receive, num_bytes: int) -> bytes:
    data = b""
    while len(data) < num_bytes:
        chunk = await receive(num_bytes - len(data))
        if not chunk:
            raise LinkLost("the peer closed the connection during the handshake")
        data += chunk
    return data


async def _readable(sock: socket.socket) -> None:
    loop = asyncio.get_running_loop()
    ready: asyncio.Future[None] = loop.create_future()

    def wake() -> None:
        if not ready.done():
            ready.set_result(None)

    loop.add_reader(sock, wake)
    try:
        await ready
    finally:
        loop.remove_reader(sock)
