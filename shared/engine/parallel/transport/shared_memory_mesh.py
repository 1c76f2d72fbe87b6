"""Collectives between the rank processes of one host, over one memfd.

A rank publishes chunk n of its gathers in slot n mod 2 of its board. It may overwrite chunk n - 2
without asking: it has seen chunk n - 1 of every rank, which each wrote after it had read chunk
n - 2. A mailbox has one reader, which counts what it has taken. Pages are allocated when used.
"""

from __future__ import annotations

from ctypes import memmove

import torch
from torch import Tensor

from shared.engine.parallel.lanes import Exchange
from shared.engine.parallel.mesh_shape import WAIT_S, MeshShape, RankLost
from shared.engine.parallel.rank_mesh import RankMesh
from shared.engine.parallel.transport.mesh_memory import (
    NUM_SLOTS,
    SLOT_BYTES,
    data_start,
    memory_bytes,
    num_words,
)
from shared.engine.parallel.transport.shared_words import SharedWords, map_memory, num_spins


class SharedMemoryTransport:
    """See Transport. CPU tensors alone; one thread a rank.

    Bytes move between addresses: a view and a copy by torch would cost more than 8 KiB take.
    """

    def __init__(self, fd: int, shape: MeshShape, rank: int, limit_s: float = WAIT_S) -> None:
        self.shape, self.rank, self.device = shape, rank, torch.device("cpu")
        self._ranks = shape.stage_ranks(shape.place(rank)[0])
        self._limit_s = limit_s
        num_ranks = shape.num_ranks
        self._memory = map_memory(fd, memory_bytes(num_ranks))
        self._words = SharedWords(self._memory, num_words(num_ranks), num_spins(num_ranks))
        self._slots = self._words.address + data_start(num_ranks)
        self._num_gathered = 0
        self._num_sent = [0] * num_ranks
        self._num_received = [0] * num_ranks

    def all_gather(self, x: Tensor) -> list[Tensor]:
        source, num_bytes = _memory_of(x)
        found = [x if each == self.rank else torch.empty_like(x) for each in self._ranks]
        for begin in range(0, num_bytes, SLOT_BYTES):
            self._gather_chunk(source, found, begin, min(SLOT_BYTES, num_bytes - begin))
        return found

    def _gather_chunk(self, source: int, found: list[Tensor], begin: int, size: int) -> None:
        number, self._num_gathered = self._num_gathered, self._num_gathered + 1
        memmove(self._slot(self.rank, number), source + begin, size)
        self._words.publish(self.rank, number + 1)
        for rank, out in zip(self._ranks, found, strict=True):
            if rank != self.rank:
                self._wait(rank, number + 1, rank)
                memmove(out.data_ptr() + begin, self._slot(rank, number), size)

    def swap(self, x: Tensor, rank: int, out: Tensor) -> None:
        """Chunks alternate, so that no two ranks wait for each other with full mailboxes."""
        (source, num_sent), (target, num_received) = _memory_of(x), _memory_of(out)
        for begin in range(0, max(num_sent, num_received), SLOT_BYTES):
            if begin < num_sent:
                self._send_chunk(source + begin, min(SLOT_BYTES, num_sent - begin), rank)
            if begin < num_received:
                self._receive_chunk(target + begin, min(SLOT_BYTES, num_received - begin), rank)

    def send(self, x: Tensor, rank: int) -> None:
        source, num_bytes = _memory_of(x)
        for begin in range(0, num_bytes, SLOT_BYTES):
            self._send_chunk(source + begin, min(SLOT_BYTES, num_bytes - begin), rank)

    def recv(self, out: Tensor, rank: int) -> None:
        target, num_bytes = _memory_of(out)
        for begin in range(0, num_bytes, SLOT_BYTES):
            self._receive_chunk(target + begin, min(SLOT_BYTES, num_bytes - begin), rank)

    def _send_chunk(self, source: int, size: int, rank: int) -> None:
        number, (sent, taken, box) = self._num_sent[rank], self._mailbox(self.rank, rank)
        self._wait(taken, number + 1 - NUM_SLOTS, rank)
        memmove(self._slot(box, number), source, size)
        self._num_sent[rank] = number + 1
        self._words.publish(sent, number + 1)

    def _receive_chunk(self, target: int, size: int, rank: int) -> None:
        number, (sent, taken, box) = self._num_received[rank], self._mailbox(rank, self.rank)
        self._wait(sent, number + 1, rank)
        memmove(target, self._slot(box, number), size)
        self._num_received[rank] = number + 1
        self._words.publish(taken, number + 1)

    def _mailbox(self, sender: int, receiver: int) -> tuple[int, int, int]:
        """Indices of the word of sent chunks, of the word of taken ones, and of the slots."""
        num_ranks = self.shape.num_ranks
        pair = num_ranks + sender * num_ranks + receiver
        return pair, pair + num_ranks * num_ranks, pair

    def _slot(self, box: int, number: int) -> int:
        return self._slots + (box * NUM_SLOTS + number % NUM_SLOTS) * SLOT_BYTES

    def _wait(self, word: int, value: int, rank: int) -> None:
        if not self._words.wait(word, value, self._limit_s):
            raise RankLost(rank, f"rank {self.rank} waited {self._limit_s:g} s for it")

    def close(self) -> None:
        self._words.close()
        self._memory.close()


def _memory_of(x: Tensor) -> tuple[int, int]:
    """Returns a tensor's address and bytes. Raises ValueError for what has no plain memory here."""
    if not x.is_cpu or not x.is_contiguous():
        raise ValueError(f"a tensor on {x.device}: shared memory moves contiguous CPU tensors")
    return x.data_ptr(), x.numel() * x.element_size()


def shared_memory_mesh(
    fd: int, shape: MeshShape, rank: int, exchange: Exchange = "fp32", limit_s: float = WAIT_S
) -> RankMesh:
    return RankMesh(SharedMemoryTransport(fd, shape, rank, limit_s), exchange)
