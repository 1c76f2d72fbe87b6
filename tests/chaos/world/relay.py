"""An unreliable data plane: a relay between prefill and a decode worker that spoils the frames.

Over TCP it listens at the address that the worker advertises and, as between two hosts, there is no
unix socket to open. Over shared memory it replaces the worker's socket, and writes to the memory
that it forwards. Threads and blocking sockets: it has to be simple, not fast.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import select
import socket
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Literal, get_args

from shared.kv_wire.frames import (
    MAX_FRAME_BYTES,
    PREFIX,
    Ack,
    Frame,
    Record,
    Refusal,
    decode_prefix,
    decode_record,
    encode_record,
)
from shared.kv_wire.shared_memory import NUM_SLOTS
from shared.messages import DataPlaneAddress
from tests.chaos.world.spoiling import FIRST_FORGED_ID, Broken, Forwarded, FrameForwarder, Spoiler

Transport = Literal["tcp", "memfd"]

TRANSPORTS: tuple[Transport, ...] = get_args(Transport)
HOST = "127.0.0.2"  # also this machine, but workers do not listen there
SWAP_WITHIN_S = 0.2
HIDDEN = ".hidden"


class Relay:
    def __init__(self, address: DataPlaneAddress, transport: Transport, *, seed: int) -> None:
        self.spoiler = Spoiler(seed)
        self._address = address
        self._hidden = Path(address.unix_path + HIDDEN)
        Path(address.unix_path).rename(self._hidden)
        self._is_unix = transport == "memfd"
        if self._is_unix:
            self._listener = socket.socket(socket.AF_UNIX)
            self._listener.bind(address.unix_path)
            self._listener.listen()
        else:
            self._listener = socket.create_server((HOST, address.port))
        self._connections: list[_RelayedConnection] = []
        _thread(self._accept)

    def close(self) -> None:
        _shut(self._listener)
        for each in self._connections:
            each.close()

    def _accept(self) -> None:
        while True:
            sender, _ = self._listener.accept()
            self._connections.append(_RelayedConnection(self.spoiler, sender, self._connect()))

    def _connect(self) -> socket.socket:
        if not self._is_unix:
            return socket.create_connection(("127.0.0.1", self._address.port))
        receiver = socket.socket(socket.AF_UNIX)
        receiver.connect(str(self._hidden))
        return receiver


class _RelayedConnection:
    """One connection of a prefill worker: a thread for each direction."""

    def __init__(self, spoiler: Spoiler, sender: socket.socket, receiver: socket.socket) -> None:
        self._sender, self._receiver = sender, receiver
        self._memory: mmap.mmap | None = None
        self._forwarder = FrameForwarder(spoiler)
        _thread(self._forward_all)

    def close(self) -> None:
        _shut(self._sender)
        _shut(self._receiver)

    def _forward_all(self) -> None:
        self._receiver.sendall(_read_record(self._sender)[1])
        self._forward_welcome()
        _thread(self._forward_frames_to_end)
        try:
            self._forward_replies()
        finally:
            self.close()

    def _forward_replies(self) -> None:
        """From decode to prefill, without replies to frames that prefill has not sent."""
        while True:
            record, raw = _read_record(self._receiver)
            if not isinstance(record, Ack | Refusal) or record.frame_id < FIRST_FORGED_ID:
                self._sender.sendall(raw)

    def _forward_welcome(self) -> None:
        if self._receiver.family != socket.AF_UNIX:
            self._sender.sendall(_read_record(self._receiver)[1])
            return
        raw, fds, _, _ = socket.recv_fds(self._receiver, 65536, 1)
        self._memory = mmap.mmap(fds[0], NUM_SLOTS * MAX_FRAME_BYTES)
        socket.send_fds(self._sender, [raw], fds)
        os.close(fds[0])

    def _forward_frames_to_end(self) -> None:
        try:
            self._forward_frames()
        finally:  # forwards the receiver's records until it has ended, too
            self._receiver.shutdown(socket.SHUT_WR)

    def _forward_frames(self) -> None:
        while True:
            self._wait_for_a_frame()
            record, raw = _read_record(self._sender)
            if not isinstance(record, Frame):
                self._receiver.sendall(raw)
                continue
            payload = self._payload(record)
            try:
                self._send(self._forwarder.forward(record, payload))
            except Broken as broken:
                self._break_off(raw + (b"" if self._is_shared else payload), broken)
                return

    def _wait_for_a_frame(self) -> None:
        """Releases the held frame if no other one arrives in time."""
        if self._forwarder.is_holding:
            ready, _, _ = select.select([self._sender], [], [], SWAP_WITHIN_S)
            if not ready:
                self._send(self._forwarder.release())

    @property
    def _is_shared(self) -> bool:
        return self._memory is not None

    def _payload(self, frame: Frame) -> bytes:
        num_bytes = frame.wire_bytes
        if self._memory is None and frame.slot_index is not None:
            return b""  # the receiver reads it out of the sender
        if self._memory is None:
            return _read_exactly(self._sender, num_bytes)
        start = _start_of(frame)
        return self._memory[start : start + num_bytes]

    def _send(self, forwarded: Forwarded) -> None:
        for frame, payload in forwarded:
            if self._memory is None:
                self._receiver.sendall(encode_record(frame) + payload)
            else:
                start = _start_of(frame)
                self._memory[start : start + len(payload)] = payload
                self._receiver.sendall(encode_record(frame))

    def _break_off(self, sent: bytes, broken: Broken) -> None:
        half = sent[: len(sent) // 2]
        self._receiver.sendall(bytes(len(half)) if broken.is_noise else half)


def _start_of(frame: Frame) -> int:
    assert frame.slot_index is not None, "its payload is in shared memory"
    return frame.slot_index * MAX_FRAME_BYTES


def _read_record(sock: socket.socket) -> tuple[Record, bytes]:
    prefix = _read_exactly(sock, PREFIX.size)
    body = _read_exactly(sock, decode_prefix(prefix))
    return decode_record(body), prefix + body


def _read_exactly(sock: socket.socket, num_bytes: int) -> bytes:
    data = b""
    while len(data) < num_bytes:
        chunk = sock.recv(num_bytes - len(data))
        if not chunk:
            raise ConnectionError("the connection has ended")
        data += chunk
    return data


def _shut(sock: socket.socket) -> None:
    """Wakes threads that read from it."""
    with contextlib.suppress(OSError):
        sock.shutdown(socket.SHUT_RDWR)
    sock.close()


def _thread(run: Callable[[], None]) -> None:
    def body() -> None:
        with contextlib.suppress(OSError, ValueError):  # closed by the other thread
            run()

    threading.Thread(target=body, daemon=True).start()
