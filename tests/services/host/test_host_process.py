"""A real host process: real workers start, park and wake; hosts and workers die."""

import asyncio
import contextlib
import os
import signal
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from shared.errors import NoCapacity, UnknownModel, WorkerBusy
from tests.support.services.faulty_hub import ENDLESS, FAULTS, faulty_hub, hub_environ
from tests.support.services.live_host import (
    LiveHost,
    Operator,
    children,
    downloads,
    is_alive,
    link_model,
    live_host,
    operator,
    templates,
)
from tests.support.services.probes import Probes
from tests.support.services.unwritable_logs import full_disk, stopped_reader

SOME_FAULTS = ("cut", "kinds", *ENDLESS)
SECRETS = {
    "HF_TOKEN": "secret-of-the-hub",
    "HEARTH_OPERATOR_TOKEN": "secret-of-an-operator",
    "HEARTH_CLUSTER_SECRET": "secret-of-a-cluster",
    "AWS_SECRET_ACCESS_KEY": "secret-of-a-cloud",
}


@pytest.fixture(scope="module")
def host(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveHost]:
    folder = tmp_path_factory.mktemp("host")
    link_model(folder / "demo-a")
    link_model(folder / "demo-b")
    with faulty_hub() as url:
        environ = {**hub_environ(url, str(folder)), **SECRETS}
        with live_host(folder, environ=environ) as found:
            yield found


@pytest.fixture
async def op(host: LiveHost) -> AsyncIterator[Operator]:
    async with operator(host) as found:
        known = await found.registry.all()
        for name in ("demo-a", "demo-b"):
            if name not in known:
                await found.registry.add(name, str(host.folder / name))
        yield found


async def test_models_start_in_standby_wake_and_park(op: Operator) -> None:
    model = await op.state("demo-a", "standby")
    await op.state("demo-b", "standby")
    assert model.card is not None and model.kv_bytes == 0 and model.worker_id is not None
    recorded = (await op.registry.one("demo-a")).revisions[0].digest
    assert recorded == model.card.revision == model.revision
    await op.wake("demo-a", recorded)
    hot = await op.state("demo-a", "hot")
    await op.until(lambda: op.kv_blocks(hot.worker_id or "") > 0)
    await op.park("demo-a")
    await op.until(lambda: op.kv_blocks(hot.worker_id or "") == 0)
    parked = await op.state("demo-a", "standby")
    assert parked.worker_id == hot.worker_id


async def test_drained_host_wakes_nothing_until_that_is_undone(op: Operator) -> None:
    await op.state("demo-b", "standby")
    await op.state("demo-a", "standby")
    await op.wake("demo-a")
    hot = await op.state("demo-a", "hot")
    assert (await op.drain()).is_safe
    await op.until(lambda: op.newest[hot.worker_id or ""].state == "draining")
    with pytest.raises(WorkerBusy, match="host-1 is drained"):
        await op.wake("demo-b")
    await op.drain(is_undone=True)
    await op.until(lambda: op.newest[hot.worker_id or ""].state == "ready")
    assert (await op.state("demo-a", "hot")).worker_id == hot.worker_id
    await op.park("demo-a")
    await op.state("demo-a", "standby")


async def test_unknown_model_and_missing_source_are_clear_lines(
    op: Operator, host: LiveHost
) -> None:
    with pytest.raises(UnknownModel, match="does not have the model 'other', revision 'r1'"):
        await op.wake("other")
    await op.registry.add("missing", str(host.folder / "missing"))
    failed = await op.state("missing", "failed")
    assert failed.failure.startswith(f"source '{host.folder}/missing' is not a directory")
    assert failed.public_failure.startswith("its source is missing")
    with pytest.raises(AssertionError, match=r"missing failed: source '.*(?s:.)*missing: .*failed"):
        await op.state("missing", "standby")
    await op.registry.remove("missing")
    await op.until(lambda: op.model("missing") is None)


@pytest.mark.parametrize(
    "faults", [pytest.param(FAULTS, marks=pytest.mark.long, id="all"), SOME_FAULTS]
)
async def test_whatever_a_hub_does_fails_its_model_alone(
    op: Operator, host: LiveHost, faults: tuple[str, ...]
) -> None:
    before = await op.state("demo-a", "standby", "hot")
    pid = host.process.pid
    async with Probes({"host": host.health_url}) as probes:
        for fault in faults:
            await op.registry.add(fault, f"org/{fault}")
        for fault in faults:
            if fault in ENDLESS:
                continue
            failed = await op.state(fault, "failed")
            assert failed.failure.startswith(f"model 'org/{fault}'"), failed.failure
            assert len(failed.failure.splitlines()) == 1
    assert probes.num_failed["host"] == 0
    assert probes.p50_ms("host") < 1000
    for fault in faults:
        await op.registry.remove(fault)
    await op.until(lambda: all(op.model(fault) is None for fault in faults))
    await op.until(lambda: not downloads(host))
    after = await op.state("demo-a", "standby", "hot")
    assert (host.process.pid, host.process.poll()) == (pid, None)
    assert after.worker_id == before.worker_id


def test_workers_inherit_no_secret(host: LiveHost) -> None:
    found = []
    for pid in (*templates(host), *host.worker_pids()):
        with contextlib.suppress(OSError):  # it has just ended
            found.append(Path(f"/proc/{pid}/environ").read_bytes())
    assert len(found) >= 2
    for environ in found:
        assert b"secret-of" not in environ and b"nats://" not in environ
        assert b"PATH=" in environ


async def test_other_content_than_recorded_is_refused(op: Operator, host: LiveHost) -> None:
    link_model(host.folder / "altered")
    await op.registry.add("altered", str(host.folder / "altered"))
    await op.registry.record_digest("altered", "r1", "0" * 32)
    failed = await op.state("altered", "failed")
    assert f"and the catalogue has recorded {'0' * 32}" in failed.failure
    reason = "the model 'altered' cannot be served: its source has changed since it was added"
    with pytest.raises(NoCapacity, match=f"^{reason}$"):
        await op.wake("altered")
    await op.registry.remove("altered")


async def test_killed_worker_becomes_hot_again(op: Operator, host: LiveHost) -> None:
    await op.state("demo-a", "standby")
    await op.wake("demo-a")
    before = await op.state("demo-a", "hot")
    for pid in host.worker_pids():
        os.kill(pid, signal.SIGKILL)
    await op.until(
        lambda: (
            (found := op.model("demo-a")) is not None
            and found.state == "hot"
            and found.worker_id != before.worker_id
        )
    )


async def test_killed_template_is_replaced(op: Operator, host: LiveHost) -> None:
    before = await op.state("demo-b", "standby")
    (template,) = templates(host)
    os.kill(template, signal.SIGKILL)
    await op.until(
        lambda: (
            (found := op.model("demo-b")) is not None
            and found.state == "standby"
            and found.worker_id != before.worker_id
        )
    )


def test_second_host_on_one_state_folder_does_not_start(host: LiveHost, tmp_path: Path) -> None:
    other = LiveHost(host.nats, host.redis, tmp_path, host.budget)
    (tmp_path / "state").symlink_to(host.folder / "state")
    other.start()
    assert other.process.wait(30) == 2
    assert f"state_dir {tmp_path}/state is used by another host" in other.log


async def test_workers_of_a_frozen_host_go_on(op: Operator, host: LiveHost) -> None:
    await op.state("demo-a", "standby", "hot")
    await op.wake("demo-a")
    hot = await op.state("demo-a", "hot")
    assert hot.worker_id is not None
    worker_id = hot.worker_id
    os.kill(host.process.pid, signal.SIGSTOP)
    try:
        first = op.newest[worker_id].sequence_number
        await op.until(lambda: op.newest[worker_id].sequence_number > first + 9)  # 2.25 s
        assert op.newest[worker_id].state == "ready"
        seen = op.newest["host-1"].sequence_number
    finally:
        os.kill(host.process.pid, signal.SIGCONT)
    await op.until(lambda: op.newest["host-1"].sequence_number > seen + 3)
    assert (await op.state("demo-a", "hot")).worker_id == worker_id


async def test_template_that_hangs_stops_nothing(op: Operator, host: LiveHost) -> None:
    other = await op.state("demo-a", "standby", "hot")
    before = await op.state("demo-b", "standby")
    (template,) = templates(host)
    os.kill(template, signal.SIGSTOP)
    try:
        os.kill(worker_pid(template, "demo-b"), signal.SIGKILL)
        await op.until(
            lambda: (
                (found := op.model("demo-b")) is not None
                and found.state == "standby"
                and found.worker_id != before.worker_id
            )
        )
        assert (await op.state("demo-a", "standby", "hot")).worker_id == other.worker_id
    finally:
        os.kill(template, signal.SIGCONT)
    after = await op.state("demo-b", "standby")
    sequence_number = op.newest["host-1"].sequence_number
    await op.until(lambda: op.newest["host-1"].sequence_number > sequence_number + 3)
    assert (await op.state("demo-b", "standby")).worker_id == after.worker_id


def worker_pid(template: int, name: str) -> int:
    """By the log to which it writes."""
    return next(
        pid for pid in children(template) if name in str(Path(f"/proc/{pid}/fd/2").readlink())
    )


async def test_workers_die_with_their_host_and_return_although_no_log_can_be_written(
    op: Operator, host: LiveHost
) -> None:
    await op.state("demo-a", "standby", "hot")
    await op.state("demo-b", "standby")
    pids = [*children(host.process.pid), *host.worker_pids()]
    assert len(pids) >= 3  # a template and two workers
    host.kill()
    while any(is_alive(pid) for pid in pids):
        await asyncio.sleep(0.01)
    log = host.folder / "host.log"
    log.unlink()
    reader = stopped_reader(log)
    for each in (host.folder / "state" / "logs").iterdir():
        full_disk(each)
    op.newest.clear()
    host.start()
    pid = host.process.pid
    for name in ("demo-a", "demo-b"):
        model = await op.state(name, "standby")
        assert model.start_s < 60
    for closes in (False, True):
        if closes:
            os.close(reader)
        await op.wake("demo-a")
        before = await op.state("demo-a", "hot")
        for each in host.worker_pids():
            os.kill(each, signal.SIGKILL)
        await op.until(
            lambda before=before: (
                (found := op.model("demo-a")) is not None
                and found.state == "hot"
                and found.worker_id != before.worker_id
            )
        )
    assert host.process.poll() is None and host.process.pid == pid


def test_each_model_has_one_log(host: LiveHost) -> None:
    logs = {each.name for each in (host.folder / "state" / "logs").iterdir()}
    assert {"demo-a-r1.log", "demo-b-r1.log", "template.log"} <= logs
    assert all(each.rpartition("-")[2] in ("r1.log", "template.log") for each in logs), logs
