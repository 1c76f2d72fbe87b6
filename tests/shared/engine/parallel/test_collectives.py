"""A model over real processes has the bits of one rank, by shared memory and by Gloo."""

from __future__ import annotations

import os
import re
import signal
import time
from pathlib import Path

import pytest
import torch

from shared.engine.parallel.mesh import LocalMesh, Mesh
from shared.engine.parallel.mesh_shape import MeshShape, RankLost
from shared.engine.parallel.rank_mesh import RankMesh
from shared.engine.parallel.transport.collectives import (
    Backend,
    DistributedTransport,
    distributed_mesh,
)
from shared.engine.parallel.transport.mesh_memory import create_mesh_memory
from shared.engine.parallel.transport.shared_memory_mesh import shared_memory_mesh
from tests.shared.engine.parallel.forked_ranks import run_forked
from tests.shared.engine.parallel.processes.mlp import Mlp
from tests.shared.engine.parallel.test_mesh import GATHER, HALVE, bits, lanes_of, own_lanes
from tests.support.waiting import LIMIT_S

ROOT = Path(__file__).resolve().parents[4]
BATCHES = (1, 33, 2)


def run_model(mesh: Mesh) -> bytes:
    mlp = Mlp(mesh)
    return b"".join(mlp.run(rows, seed) for seed, rows in enumerate(BATCHES))


@pytest.fixture(scope="module")
def expected() -> bytes:
    return run_model(LocalMesh())


@pytest.mark.each_value(2)
@pytest.mark.parametrize("shape", [(4, 1), (2, 2), (2, 1), (8, 1), (1, 2)], ids=str)
@pytest.mark.parametrize("transport", ["shared_memory", "gloo"])
def test_model_has_the_bits_of_one_rank(
    shape: tuple[int, int], transport: str, tmp_path: Path, expected: bytes
) -> None:
    mesh_shape, fd = MeshShape(*shape), create_mesh_memory(MeshShape(*shape))

    def connect(rank: int) -> Mesh:
        if transport == "shared_memory":
            return shared_memory_mesh(fd, mesh_shape, rank, limit_s=LIMIT_S)
        address = f"file://{tmp_path}/rendezvous"
        return distributed_mesh(address, mesh_shape, rank, limit_s=LIMIT_S)

    found = run_forked(mesh_shape.num_ranks, connect, run_model)
    os.close(fd)
    last = mesh_shape.stage_ranks(mesh_shape.pp - 1)
    assert [found[rank] for rank in last] == [expected] * len(last)


def test_halved_sums_over_gloo_have_the_bits_of_one_rank(tmp_path: Path) -> None:
    sizes = [(1, 1), (3, 7), (2, 50_003)]  # with one element a rank has nothing to send
    lanes = [lanes_of(size, seed) for seed, size in enumerate(sizes)]

    def connect(rank: int) -> Mesh:
        address = f"file://{tmp_path}/rendezvous"
        transport = DistributedTransport(address, MeshShape(4), rank, limit_s=LIMIT_S)
        return RankMesh(transport, all_gather_bytes=HALVE)

    def work(mesh: Mesh) -> bytes:
        return b"".join(bits(mesh.add(own_lanes(mesh, each), torch.bfloat16)) for each in lanes)

    expected = b"".join(bits(LocalMesh().add(each, torch.bfloat16)) for each in lanes)
    assert run_forked(4, connect, work) == [expected] * 4


HAS_NO_TWO_GPUS = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="there are no two GPUs")


@pytest.mark.parametrize(
    "backend", ["gloo", pytest.param("nccl", marks=[pytest.mark.gpu, HAS_NO_TWO_GPUS])]
)
@pytest.mark.parametrize("all_gather_bytes", [GATHER, HALVE])
def test_sums_have_the_bits_of_one_rank_over_gloo_and_nccl(
    backend: Backend, all_gather_bytes: int, tmp_path: Path
) -> None:
    """NCCL has a GPU for each rank; the sums are those of a CPU."""
    lanes = lanes_of((5, 333), 3)

    def work(mesh: Mesh) -> bytes:
        own = own_lanes(mesh, lanes).to(device_of(backend, mesh.rank))
        return bits(mesh.add(own, torch.bfloat16).cpu())

    def connect(rank: int) -> Mesh:
        transport = transport_of(backend, MeshShape(2), rank, tmp_path)
        return RankMesh(transport, all_gather_bytes=all_gather_bytes)

    expected = bits(LocalMesh().add(lanes, torch.bfloat16))
    assert run_forked(2, connect, work) == [expected] * 2


@pytest.mark.parametrize(
    "backend", ["gloo", pytest.param("nccl", marks=[pytest.mark.gpu, HAS_NO_TWO_GPUS])]
)
def test_stages_send_hidden_states_over_gloo_and_nccl(backend: Backend, tmp_path: Path) -> None:
    hidden = lanes_of((7, 65), 5)[0].to(torch.bfloat16)

    def work(mesh: Mesh) -> bytes:
        if mesh.rank == 0:
            mesh.send(hidden.to(device_of(backend, 0)))
            return b""
        return bits(mesh.recv(hidden.shape, hidden.dtype).cpu())

    def connect(rank: int) -> Mesh:
        return RankMesh(transport_of(backend, MeshShape(1, 2), rank, tmp_path))

    assert run_forked(2, connect, work) == [b"", bits(hidden)]


def device_of(backend: Backend, rank: int) -> torch.device:
    return torch.device(f"cuda:{rank}" if backend == "nccl" else "cpu")


def transport_of(
    backend: Backend, shape: MeshShape, rank: int, folder: Path
) -> DistributedTransport:
    device = device_of(backend, rank)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    address = f"file://{folder}/rendezvous"
    return DistributedTransport(
        address, shape, rank, backend=backend, device=device, limit_s=LIMIT_S
    )


@pytest.mark.parametrize("shape", [MeshShape(2), MeshShape(1, 2)])
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_lost_peer_raises_over_gloo(how: signal.Signals, shape: MeshShape, tmp_path: Path) -> None:
    """A killed peer at once, a stopped one after the limit: in a stage, and between stages."""
    limit_s = 30.0 if how == signal.SIGKILL else 0.3
    read_fd, write_fd = os.pipe()

    def connect(rank: int) -> Mesh:
        (tmp_path / str(rank)).write_text(str(os.getpid()))
        return distributed_mesh(f"file://{tmp_path}/r", shape, rank, limit_s=limit_s)

    def work(mesh: Mesh) -> bytes:
        if mesh.rank == 0:
            os.read(read_fd, 1)  # the peer has connected, too
            os.kill(os.getpid(), how)
        os.write(write_fd, b"\0")
        started = time.monotonic()
        with pytest.raises(RankLost):
            _ = mesh.gather(torch.zeros(4), 0) if shape.pp == 1 else mesh.recv((4,), torch.float32)
        os.kill(int((tmp_path / "0").read_text()), signal.SIGKILL)
        return str(time.monotonic() - started).encode()

    _, found = run_forked(2, connect, work, lost_rank=0)
    os.close(read_fd)
    os.close(write_fd)
    assert float(found) < 5.0


def test_only_collectives_imports_torch_distributed() -> None:
    """An all-reduce elsewhere would make bits depend on the number of ranks."""
    pattern = re.compile(r"torch\.distributed|from torch import .*distributed|all_reduce\(")
    folders = [ROOT / name for name in ("shared", "kernels", "services")]
    files = [path for folder in folders for path in folder.rglob("*.py")]
    found = {path.name for path in files if pattern.search(path.read_text())}
    assert found == {"collectives.py"}
    text = (ROOT / "shared" / "engine" / "parallel" / "transport" / "collectives.py").read_text()
    assert "all_reduce(" not in text
