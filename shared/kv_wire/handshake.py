"""Hello and Welcome, before a socket becomes a stream: both ends verify their peer.

On a unix socket the Welcome carries the staging memory as a file descriptor.
"""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Awaitable, Callable

from shared.errors import LinkLost
from shared.kv_wire.frames import (
    MAX_FRAME_BYTES,
    MAX_SLOTS,
    PREFIX,
    Goodbye,
    Hello,
    ProtocolError,
    Record,
    Welcome,
    decode_prefix,
    decode_record,
    encode_record,
)

Receive = Callable[[int], Awaitable[bytes]]


async def send_hello(sock: socket.socket, instance_id: bytes) -> tuple[Welcome, int | None]:
    """The sender's part. Returns the Welcome and the file descriptor of the memory or None; the
    caller closes it.
    """
    loop = asyncio.get_running_loop()
    await loop.sock_sendall(sock, encode_record(Hello(instance_id)))
    fds: list[int] = []

    async def receive(num_bytes: int) -> bytes:
        if sock.family != socket.AF_UNIX:
            return await loop.sock_recv(sock, num_bytes)
        await _readable(sock)
        data, new_fds, _, _ = socket.recv_fds(sock, num_bytes, 1, socket.MSG_CMSG_CLOEXEC)
        fds.extend(new_fds)
        return data

    try:
        welcome = _checked(await _read_record(receive), instance_id)
        if len(fds) > 1:
            raise ProtocolError(f"the welcome carries {len(fds)} file descriptors, more than 1")
    except BaseException:
        for fd in fds:
            os.close(fd)
        raise
    return welcome, fds[0] if fds else None


async def read_hello(sock: socket.socket, instance_id: bytes) -> None:
    """The receiver's part. Raises ProtocolError, whose message is the reason to send back."""
    loop = asyncio.get_running_loop()
    hello = await _read_record(lambda num_bytes: loop.sock_recv(sock, num_bytes))
    if not isinstance(hello, Hello):
        raise ProtocolError(f"received {type(hello).__name__}, expected Hello")
    if hello.instance_id != instance_id:
        raise ProtocolError("the requested instance does not listen here")


async def send_welcome(sock: socket.socket, welcome: Welcome, fd: int | None) -> None:
    data = encode_record(welcome)
    if fd is None:
        await asyncio.get_running_loop().sock_sendall(sock, data)
    elif socket.send_fds(sock, [data], [fd]) != len(data):
        raise ProtocolError("the peer does not read its socket")


def _checked(reply: Record, instance_id: bytes) -> Welcome:
    if isinstance(reply, Goodbye):
        raise ProtocolError(f"the receiver rejected the connection: {reply.reason}")
    if not isinstance(reply, Welcome):
        raise ProtocolError(f"received {type(reply).__name__}, expected Welcome")
    if reply.instance_id != instance_id:
        raise ProtocolError("another instance replied")
    if not 1 <= reply.num_slots <= MAX_SLOTS or reply.slot_bytes != MAX_FRAME_BYTES:
        raise ProtocolError(f"unsupported: {reply.num_slots} slots of {reply.slot_bytes} bytes")
    return reply


async def _read_record(receive: Receive) -> Record:
    body_bytes = decode_prefix(await _read_exactly(receive, PREFIX.size))
    return decode_record(await _read_exactly(receive, body_bytes))


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
