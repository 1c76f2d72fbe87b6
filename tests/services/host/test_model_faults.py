"""Whatever work on one model raises fails that model, and the host goes on."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from msgspec.structs import replace

from services.cli.cluster.service_options import DEMO_MODEL_DIR
from services.host.budget import ModelKey
from services.host.hosted_model import StartAction, StopAction
from services.host.hosted_revisions import HostedRevision
from services.host.records import Records
from services.host.service import HostService
from services.host.sources import ModelSource
from services.host.workers import workers as module
from services.host.workers.workers import Worker
from shared.clock import MonotonicClock
from shared.config import HostConfig, WorkerConfig
from shared.errors import ConfigError
from shared.messages import Heartbeat
from shared.model_registry.record import RegisteredModel, RegisteredRevision
from shared.randomness import SystemRandomness
from shared.regions.region_check import RegionCheck
from tests.services.faults.test_item_faults import ERRORS
from tests.support.waiting import LIMIT_S, until
from tests.support.world.store import MemoryStore

SOURCE = ModelSource(
    model_dir=str(DEMO_MODEL_DIR),
    block_size=16,
    max_context_tokens=64,
    kv_bytes_per_token=64,
    weights_bytes=1 << 20,
    process_bytes=1 << 20,
)


@pytest.fixture
async def host(tmp_path: Path) -> AsyncIterator[HostService]:
    config = HostConfig(
        nats_url="nats://127.0.0.1:1",
        worker_nats_url="nats://worker-1:x@127.0.0.1:1",
        redis_url="redis://127.0.0.1:1",
        process_id="host-1",
    )
    bus: Any = SimpleNamespace(process_id="host-1", regions=RegionCheck())
    host = HostService(
        config,
        bus,
        MemoryStore(),
        MonotonicClock(),
        SystemRandomness(),
        budgets={"cpu": 1 << 30},
        records=Records(tmp_path),
    )
    yield host
    await host._background.stop()
    host._records.close()


def add_model(host: HostService, name: str) -> HostedRevision:
    revision = RegisteredRevision(name="r1", source="/models/a")
    model = RegisteredModel(name=name, revisions=(revision,), num_standby=1)
    hosted = HostedRevision(ModelKey(name, "r1"), model, revision, source=SOURCE)
    host.registry.revisions[hosted.key] = hosted
    host._put(hosted)
    return hosted


@pytest.mark.parametrize("error", ERRORS)
async def test_start_that_raises_fails_its_model_alone(
    host: HostService, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    reported: list[Any] = []
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: reported.append(context))

    async def fail(*arguments: object, **fields: object) -> None:
        raise error

    monkeypatch.setattr(host._workers, "launch", fail)
    hosted = add_model(host, "a")
    (action,) = host.states.next_actions(host._clock.now())
    host._carry_out(action)
    await asyncio.gather(*host._background._tasks)
    state = host.states.find(hosted.key)
    assert state is not None and type(error).__name__ in state.failure
    assert (hosted.worker_id, host._by_worker, reported) == (None, {}, [])


@pytest.mark.parametrize("error", ERRORS)
async def test_search_that_raises_is_repeated(
    host: HostService, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    tries: list[str] = []

    async def find(model: RegisteredModel, revision: RegisteredRevision) -> ModelSource:
        tries.append(model.name)
        if len(tries) < 4:
            raise error
        return SOURCE

    pauses: list[float] = []

    async def sleep(seconds: float) -> None:
        pauses.append(seconds)

    monkeypatch.setattr(host.registry._finder, "find", find)
    monkeypatch.setattr(host._clock, "sleep", sleep)
    revision = RegisteredRevision(name="r1", source="/models/a")
    host.registry.update({"a": RegisteredModel(name="a", revisions=(revision,))})
    (hosted,) = host.registry.revisions.values()
    assert hosted.search is not None
    async with asyncio.timeout(LIMIT_S):
        await hosted.search
    assert (hosted.source, hosted.failure, pauses) == (SOURCE, "", [10, 20, 40])


@pytest.mark.parametrize("error", ERRORS)
async def test_command_that_raises_kills_the_worker_of_its_model(
    host: HostService, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    killed: list[str] = []
    monkeypatch.setattr(host._workers, "has", lambda worker_id: True)
    monkeypatch.setattr(host._workers, "signal", lambda worker_id, number: killed.append(worker_id))
    hosted = add_model(host, "a")
    hosted.worker_id = "worker-1.a"
    hosted.parking = asyncio.get_running_loop().create_future()
    parking = hosted.parking

    async def work() -> None:
        raise error

    host._start_item(hosted, work())
    await asyncio.gather(*host._background._tasks)
    assert killed == ["worker-1.a"]
    assert parking.exception() is not None and hosted.parking is None


@pytest.mark.parametrize("error", ERRORS)
async def test_template_that_cannot_be_read_is_replaced(
    host: HostService, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    reported: list[Any] = []
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: reported.append(context))
    workers = host._workers
    killed = asyncio.Event()
    monkeypatch.setattr(module, "send_signal", lambda process, number: killed.set())
    process: Any = SimpleNamespace(pid=0, wait=lambda: _status_after(killed))
    templates = iter([process])

    async def execute(*arguments: object, **fields: object) -> Any:
        try:
            return next(templates)
        except StopIteration:
            raise ConfigError("no further template") from None

    async def read(template: object) -> None:
        raise error

    monkeypatch.setattr(workers, "_exec", execute)
    monkeypatch.setattr(workers, "_read", read)
    async with asyncio.timeout(LIMIT_S):
        await workers._run_templates()
        await workers._background.idle()
    assert (workers._templates, workers._template, reported) == ([], None, [])


async def _status_after(killed: asyncio.Event) -> int:
    await killed.wait()
    return -9


@pytest.mark.parametrize("error", ERRORS)
async def test_admission_that_raises_kills_its_worker(
    host: HostService, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    killed: list[str] = []
    monkeypatch.setattr(host._workers, "has", lambda worker_id: True)
    monkeypatch.setattr(host._workers, "signal", lambda worker_id, number: killed.append(worker_id))

    async def admit(*arguments: object) -> None:
        raise error

    monkeypatch.setattr(host._admission, "admit", admit)
    hosted = add_model(host, "a")
    hosted.worker_id = "worker-1.a"
    host._by_worker[hosted.worker_id] = hosted
    host._on_heartbeat(
        Heartbeat(
            process_id=hosted.worker_id,
            epoch=1,
            sequence_number=1,
            roles=("decode",),
            state="ready",
            interval_s=0.25,
        )
    )
    await host._background.idle()
    assert killed == ["worker-1.a"]


@pytest.mark.parametrize("is_removed", [False, True])
async def test_model_that_is_changed_back_while_its_worker_ends_is_served_again(
    host: HostService, *, is_removed: bool
) -> None:
    hosted = add_model(host, "a")
    state = host.states.find(hosted.key)
    assert state is not None
    state.enter("starting", host._clock.now())
    hosted.worker_id = "worker-1.a"
    host._by_worker[hosted.worker_id] = hosted
    as_before = {"a": hosted.model}
    host._reader.models = {} if is_removed else {"a": replace(hosted.model, kv_dtype="fp8")}
    host._on_registry()
    (stop,) = host.states.next_actions(host._clock.now())
    assert isinstance(stop, StopAction)
    host._reader.models = as_before
    host._on_registry()
    host._on_end(Worker(worker_id="worker-1.a", pid=0, log_path=Path()), 0, "")
    (start,) = host.states.next_actions(host._clock.now())
    assert start == StartAction(hosted.key, "cpu", None)


@pytest.mark.parametrize("leaves", [False, True])
async def test_worker_that_is_unwanted_before_it_has_started_ends(
    host: HostService, monkeypatch: pytest.MonkeyPatch, *, leaves: bool
) -> None:
    launching, signals = asyncio.Event(), []

    async def launch(config: WorkerConfig, *, log_name: str) -> Worker:
        await launching.wait()
        return Worker(worker_id=config.process_id, pid=1, log_path=Path())

    def end(worker_id: str, number: signal.Signals) -> None:
        if launching.is_set():  # before, there is no process
            signals.append(number)
            host._on_end(Worker(worker_id=worker_id, pid=1, log_path=Path()), -number, "")

    async def announce(state: str) -> None:
        pass

    monkeypatch.setattr(host._workers, "launch", launch)
    monkeypatch.setattr(host._workers, "signal", end)
    monkeypatch.setattr(host.health_monitor, "transition_to", announce)
    hosted = add_model(host, "a")
    for action in host.states.next_actions(host._clock.now()):
        host._carry_out(action)
    await until(lambda: host._by_worker)
    if leaves:
        leaving = asyncio.create_task(host.drain())
        await until(lambda: host._is_leaving)
    else:
        host.states.remove(hosted.key)
        for action in host.states.next_actions(host._clock.now()):
            host._carry_out(action)
    launching.set()
    await until(lambda: signals == [signal.SIGTERM])
    if leaves:
        async with asyncio.timeout(LIMIT_S):
            await leaving
    assert (host._by_worker, hosted.worker_id) == ({}, None)
