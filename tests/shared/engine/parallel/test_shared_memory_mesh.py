"""Ranks over one memfd: the same bits as without it, and a rank that is silent is named."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor

from shared.engine.parallel.lanes import Exchange
from shared.engine.parallel.mesh import LocalMesh, Mesh
from shared.engine.parallel.mesh_shape import MeshShape, RankLost
from shared.engine.parallel.rank_mesh import RankMesh
from shared.engine.parallel.transport import shared_words
from shared.engine.parallel.transport.mesh_memory import (
    SLOT_BYTES,
    create_mesh_memory,
    memory_bytes,
)
from shared.engine.parallel.transport.shared_memory_mesh import SharedMemoryTransport
from shared.engine.parallel.transport.shared_words import (
    LINE_BYTES,
    SharedWords,
    create_memory,
    map_memory,
)
from tests.shared.engine.parallel.rank_threads import run_meshes
from tests.shared.engine.parallel.test_mesh import GATHER, HALVE, bits, lanes_of, own_lanes
from tests.support.waiting import LIMIT_S


@contextmanager
def transports(shape: MeshShape, limit_s: float = LIMIT_S) -> Iterator[list[SharedMemoryTransport]]:
    fd = create_mesh_memory(shape)
    ranks = range(shape.num_ranks)
    made = [SharedMemoryTransport(fd, shape, rank, limit_s) for rank in ranks]
    os.close(fd)
    try:
        yield made
    finally:
        for each in made:
            each.close()


@pytest.mark.parametrize("tp", [2, 4, 8])
@pytest.mark.parametrize("all_gather_bytes", [GATHER, HALVE])
@pytest.mark.parametrize("exchange", ["fp32", "bf16"])
def test_sums_have_the_bits_of_one_rank(tp: int, all_gather_bytes: int, exchange: Exchange) -> None:
    sizes = [(1, 5), (3, 7), (2, SLOT_BYTES // 8 + 3), (1, 1), (1, 2048)]
    lanes = [lanes_of(size, seed, num_empty=seed) for seed, size in enumerate(sizes)]
    expected = [bits(LocalMesh(exchange).add(each, torch.bfloat16)) for each in lanes]

    def work(mesh: Mesh) -> list[bytes]:
        return [bits(mesh.add(own_lanes(mesh, each), torch.bfloat16)) for each in lanes]

    with transports(MeshShape(tp)) as made:
        meshes = [RankMesh(each, exchange, all_gather_bytes) for each in made]
        assert all(found == expected for found in run_meshes(meshes, work))


def test_ranks_of_unlike_speed_never_see_an_overwritten_slot() -> None:
    """A fast rank runs ahead by all chunks that the protocol allows."""
    num_rounds = 60

    def work(mesh: Mesh) -> list[int]:
        found = []
        for number in range(num_rounds):
            if mesh.rank == number % 3:
                time.sleep(0.0005)
            x = torch.full((4,), number * 10 + mesh.rank)
            found.append(mesh.gather(x, 0)[::4].tolist())
        return found

    expected = [[number * 10 + rank for rank in range(4)] for number in range(num_rounds)]
    with transports(MeshShape(4)) as made:
        assert run_meshes([RankMesh(each) for each in made], work) == [expected] * 4


def test_stages_pass_large_tensors_in_order() -> None:
    shape = MeshShape(2, 2)
    num_elements = 5 * SLOT_BYTES // 4 + 3  # more than a mailbox holds

    def work(mesh: Mesh) -> list[Tensor]:
        if mesh.rank < 2:
            for seed in range(3):
                mesh.send(torch.arange(num_elements) + seed + 100 * mesh.rank)
            return []
        return [mesh.recv((num_elements,), torch.int64) for _ in range(3)]

    with transports(shape) as made:
        found = run_meshes([RankMesh(each) for each in made], work)
    for rank in (0, 1):
        expected = [torch.arange(num_elements) + seed + 100 * rank for seed in range(3)]
        assert all(map(torch.equal, found[rank + 2], expected))


def test_silent_rank_is_named_after_the_limit() -> None:
    with transports(MeshShape(4), limit_s=0.05) as made:
        meshes = [RankMesh(each) for each in made]

        def work(mesh: Mesh) -> None:
            if mesh.rank != 2:
                mesh.gather(torch.zeros(3), 0)

        started = time.monotonic()
        with pytest.raises(RankLost, match=r"rank 2 is lost: rank \d waited 0.05 s") as caught:
            run_meshes(meshes, work)
        assert caught.value.rank == 2
        assert time.monotonic() - started < 5


def test_full_mailbox_of_a_silent_rank_is_reported() -> None:
    with transports(MeshShape(1, 2), limit_s=0.05) as made:
        mesh = RankMesh(made[0])
        mesh.send(torch.zeros(2))
        mesh.send(torch.zeros(2))
        with pytest.raises(RankLost, match="rank 1 is lost"):
            mesh.send(torch.zeros(2))


def test_words_wrap_around() -> None:
    fd = create_memory("words", 4096)
    words = SharedWords(map_memory(fd, 4096), 2, spins=0)
    words.publish(1, 2**32 - 1)
    assert words.wait(1, 2**32 - 1, 0.01)
    assert not words.wait(1, 2**32, 0.01)
    words.publish(1, 2**32 + 1)
    assert words.wait(1, 2**32, 0.01)
    assert words.wait(0, 0, 0.01)
    words.close()
    os.close(fd)


def test_memory_of_another_size_is_rejected() -> None:
    fd = create_memory("short", LINE_BYTES)
    with pytest.raises(ValueError, match=f"64 bytes: {memory_bytes(2)} are needed"):
        SharedMemoryTransport(fd, MeshShape(2), 0)
    os.close(fd)


def test_tensor_without_plain_memory_is_rejected() -> None:
    with (
        transports(MeshShape(1, 2)) as (first, _),
        pytest.raises(ValueError, match="contiguous CPU tensors"),
    ):
        first.send(torch.zeros(4, 4).t(), 1)


def test_machine_that_reorders_stores_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_words.platform, "machine", lambda: "aarch64")
    with pytest.raises(ValueError, match="x86-64 only, not on aarch64"):
        shared_words.check_machine()
