"""`hearth rank` joins a worker over NATS; the worker's group ends with it."""

from __future__ import annotations

import asyncio
import os
import re
import resource
import signal
import subprocess
import sys
from asyncio.subprocess import PIPE, Process
from pathlib import Path

import msgspec
import pytest

from services.cli.cluster.service_options import DEMO_MODEL_DIR
from services.worker.model_loading import load_model
from services.worker.rank_leader import listening_for_ranks
from services.worker.worker import build_worker
from shared.config import RankConfig, WorkerConfig
from shared.engine.executors.group.group_executor import GroupExecutor
from shared.engine.parallel.processes.join import HostListener
from shared.errors import DeviceFailed, InvalidRequest
from shared.lifecycle.identity import connect
from shared.messages import JoinRanks, RanksAssigned
from shared.subjects import join_ranks
from shared.transport.bus import NatsBus
from tests.support.servers import NatsServer
from tests.support.services.running import WAIT_S


async def hearth_rank(nats: NatsServer, *options: str) -> Process:
    environ = {**os.environ, "HEARTH_NATS_URL": nats.url("worker-1")}
    command = (sys.executable, "-m", "services", "rank", *options)
    return await asyncio.create_subprocess_exec(*command, env=environ, stderr=PIPE)


def worker_config(nats: NatsServer, **changes: object) -> WorkerConfig:
    fields: dict = {"tp": 1, "pp": 2, "remote_ranks": 1, "num_threads": 2, "device": "cpu"}
    return WorkerConfig(
        nats_url=nats.url("worker-1"),
        process_id="worker-1",
        model_dir=DEMO_MODEL_DIR,
        **(fields | changes),
    )


def test_ranks_leave_no_core_dump() -> None:
    """It would have prompts and KV of tenants. Processes of ranks inherit the limit."""
    if resource.getrlimit(resource.RLIMIT_CORE)[1] == 0:
        pytest.skip("no process here may leave one")
    script = """if True:
        import resource
        from pathlib import Path
        from shared.config import RankConfig
        from services.worker.rank_service import run_rank
        hard = resource.getrlimit(resource.RLIMIT_CORE)[1]
        resource.setrlimit(resource.RLIMIT_CORE, (hard, hard))
        config = RankConfig(nats_url="", process_id="w", model_dir=Path(), ranks=0)
        run_rank(config)  # ends at once: there are no 0 ranks
        print(resource.getrlimit(resource.RLIMIT_CORE) == (0, hard))
    """
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.stdout == "True\n", done.stderr


async def test_worker_lives_and_dies_with_its_rank_on_another_host(
    nats_server: NatsServer,
) -> None:
    executors: list[GroupExecutor] = []

    def load(config: WorkerConfig, hosts: HostListener) -> GroupExecutor:
        executor = load_model(config, hosts)
        assert isinstance(executor, GroupExecutor)
        executors.append(executor)
        return executor

    rank = await hearth_rank(nats_server)
    async with asyncio.timeout(WAIT_S):
        worker = await build_worker(worker_config(nats_server), ("prefill", "decode"), load)
        (executor,) = executors
        await executor.check()
        rank.send_signal(signal.SIGTERM)
        await rank.wait()
        while not executor.has_ended:
            await asyncio.sleep(0.01)
    with pytest.raises(DeviceFailed, match=r"the connection to .* is lost"):
        await executor.check()
    await worker.stop()


async def test_ranks_that_a_worker_does_not_miss_are_refused(nats_server: NatsServer) -> None:
    config = worker_config(nats_server, pp=4, remote_ranks=2)
    own = await connect(config, "decode")
    async with listening_for_ranks(config, own):
        bus = await NatsBus.connect(nats_server.url("worker-1"), process_id="worker-1.other")

        async def asked(num_ranks: int) -> RanksAssigned:
            message = JoinRanks(host="other", num_ranks=num_ranks)
            subject = join_ranks("worker-1")
            return await bus.request(subject, message, RanksAssigned, timeout_s=WAIT_S)

        with pytest.raises(InvalidRequest, match="other offers 3 ranks: 2 are missing"):
            await asked(3)
        assert (await asked(2)).first_rank == 2
        await bus.close()
    await own.close()


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"remote_ranks": 2}, r"remote_ranks 2 is not in \[0, tp x pp, 2 ranks\)"),
        ({"rank_host": "10.0.0.1"}, "rank_host 10.0.0.1: ranks of several hosts send"),
        ({"nats_url": "nats://h:1"}, "NATS carries the key of ranks"),
    ],
)
def test_worker_needs_a_trusted_network(
    nats_server: NatsServer, changes: dict[str, object], problem: str
) -> None:
    config = msgspec.structs.replace(
        worker_config(nats_server), data_plane_security="none", **changes
    )
    (found,) = config.problems()
    assert re.search(problem, found)
    if "remote_ranks" not in changes:
        assert not list(msgspec.structs.replace(config, is_trusted_network=True).problems())


def test_rank_needs_a_trusted_network_and_a_worker(tmp_path: Path) -> None:
    def problems(**changes: object) -> list[str]:
        fields: dict = {"nats_url": "nats://w:p@h:1", "process_id": "w.1", "model_dir": tmp_path}
        return list(RankConfig(**(fields | changes)).problems())

    assert "NATS carries the key of ranks" in problems()[0]
    assert problems(is_trusted_network=True) == []
    assert RankConfig(nats_url="", process_id="w.1", model_dir=tmp_path).leader_id == "w"
    trusted = {"is_trusted_network": True}
    assert problems(ranks=0, **trusted) == ["ranks must be positive, not 0"]
    assert "must be CREDENTIAL" in problems(worker="a b", **trusted)[0]
