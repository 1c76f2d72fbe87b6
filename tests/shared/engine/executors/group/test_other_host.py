"""A model whose last stage is on another host computes the bits of one process."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from shared.engine.executors.group.kv.group_push import GroupPushPort
from shared.engine.executors.group.load_group import load_group
from shared.engine.executors.group.messages import RankSetup
from shared.engine.executors.group.rank_computer import load_rank
from shared.engine.executors.load import load_executor
from shared.engine.executors.loading.load_options import LoadOptions
from shared.engine.parallel.mesh import Mesh
from shared.engine.parallel.mesh_shape import MeshShape
from shared.engine.parallel.processes.join import HostListener
from shared.engine.parallel.processes.rank_messages import RankIdentity, difference
from shared.errors import CheckpointError
from shared.kv_wire.sealing.link_keys import LinkKeys
from shared.randomness import SystemRandomness
from tests.shared.engine.executors.group.test_group_handoff import (
    Handoff,
    Worker,
    expected_bytes,
    open_receive,
)
from tests.shared.engine.executors.group.test_groups import OPTIONS, SHAPE, progress_of
from tests.shared.engine.parallel.rank_threads import run_ranks
from tests.support.engine.checkpoints import write_llama

WAIT_S = 20.0


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("llama")
    write_llama(folder, **SHAPE)
    return folder


@contextmanager
def other_host(
    shape: MeshShape, num_ranks: int, folder: Path
) -> Iterator[tuple[HostListener, subprocess.Popen]]:
    listener = HostListener("127.0.0.1", shape, num_ranks)
    assigned = listener.assign("other", num_ranks)
    address = "127.0.0.1", str(listener.port), assigned.key.hex()
    numbers = map(str, (assigned.ranks.start, num_ranks, shape.tp, shape.pp))
    module = "tests.shared.engine.executors.group.host_process"
    command = [sys.executable, "-m", module, *address, *numbers, str(folder)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as other:
        try:
            yield listener, other
        finally:
            listener.close()
            other.kill()


@pytest.mark.long
@pytest.mark.parametrize("tp", [1, 2])
async def test_ranks_on_two_hosts_have_the_results_of_one_process(folder: Path, tp: int) -> None:
    """The host that answers is not the leader's: masks, logprobs and KV come from there."""
    single = load_executor(folder, **OPTIONS)
    shape = MeshShape(tp, 2)
    with other_host(shape, tp, folder) as (hosts, other):
        group = load_group(folder, "cpu", shape, hosts, **OPTIONS)
        expected = await progress_of(single)
        assert await progress_of(group) == expected
        keys = LinkKeys("aead", SystemRandomness())
        push = await GroupPushPort.open(group.kv_links, kv_compression="off", security="none")
        worker = Worker(group, push, await open_receive(group, keys))
        assert await Handoff(worker, worker).run() == expected_bytes(worker)
        pairs = {(each.first, each.second) for each in group.links}
        assert pairs == ({(0, 1)} if tp == 1 else {(0, 1), (2, 3), (0, 2)})
        await worker.close()
        assert "the leader has ended the group" in other.communicate(timeout=WAIT_S)[0]


def test_ranks_of_another_checkpoint_differ(folder: Path, tmp_path: Path) -> None:
    write_llama(tmp_path, **SHAPE, seed=1)

    def identity(mesh: Mesh) -> RankIdentity:
        setup = RankSetup(
            model_dir=str((folder, tmp_path)[mesh.rank]),
            options=LoadOptions(dtype="bfloat16"),
            max_blocks=8,
            num_threads=1,
            kv=(),
            masks=-1,
        )
        return load_rank(setup, mesh).identity

    line = difference(run_ranks(MeshShape(1, 2), identity))
    assert re.fullmatch("rank 1 has weights digest '.*', another rank has '.*'", str(line))


@pytest.mark.long  # the parts: the test before, and parallel/processes/test_hosts.py
def test_host_with_another_checkpoint_is_named(folder: Path, tmp_path: Path) -> None:
    write_llama(tmp_path, **SHAPE, seed=1)
    shape = MeshShape(1, 2)
    with other_host(shape, 1, tmp_path) as (hosts, other):
        with pytest.raises(CheckpointError, match=r"rank 1 has weights digest '.*', another rank"):
            load_group(folder, "cpu", shape, hosts, **OPTIONS)
        assert "rank 1 has weights digest" in other.communicate(timeout=WAIT_S)[0]
