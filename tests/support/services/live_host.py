"""A host process with real workers of small models, on a real NATS server and Redis."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from services.cli.cluster.service_options import DEMO_MODEL_DIR
from shared.background import Background
from shared.clock import MonotonicClock
from shared.lifecycle.host_models import ReceivedModels
from shared.messages import (
    Done,
    DrainState,
    DrainWorker,
    Heartbeat,
    HostedModel,
    HostLoad,
    ModelWaking,
    ParkModel,
    WakeModel,
)
from shared.model_registry.admin import RegistryAdmin
from shared.store import RedisStore
from shared.subjects import HEARTBEATS, CredentialRole, host_models
from shared.transport.bus import NatsBus
from tests.support.cluster.chaos_cluster import command_line
from tests.support.servers import NatsServer, RedisServer, free_port
from tests.support.waiting import until, wait_until

USERS: tuple[tuple[CredentialRole, str], ...] = (
    ("host", "host-1"),
    ("worker", "worker-1"),
    ("scheduler", "scheduler-1"),
    ("gateway", "gateway-1"),
)
DEADLINE_S = 60.0
START_S = 300.0  # the first start of a model on a machine also compiles its kernels
LOG_CHARACTERS = 3000
DRAIN_S = 5.0


def link_model(directory: Path) -> Path:
    """Returns the small model of the repository, under another name."""
    directory.mkdir(parents=True)
    for each in DEMO_MODEL_DIR.iterdir():
        (directory / each.name).symlink_to(each)
    return directory


@dataclass
class LiveHost:
    nats: NatsServer
    redis: RedisServer
    folder: Path
    budget: str
    environ: Mapping[str, str] = field(default_factory=dict)
    process: subprocess.Popen[bytes] = field(init=False)
    others: list[subprocess.Popen[bytes]] = field(default_factory=list)
    metrics_port: int = field(default_factory=free_port)

    def start(self) -> None:
        command = [sys.executable, "-m", "services", "host", "--instance", "-"]
        command += ["--nats-url", self.nats.url("host-1")]
        command += ["--worker-nats-url", self.nats.url("worker-1")]
        command += ["--redis-url", self.redis.url, "--budget", self.budget]
        command += ["--state-dir", str(self.folder / "state"), "--num-threads", "1"]
        command += ["--drain-timeout-s", str(DRAIN_S), "--metrics-port", str(self.metrics_port)]
        self.process = self._launched(command, "host")

    def start_gateway(self) -> str:
        """Returns the URL of its probe once that answers."""
        port = free_port()
        command = [sys.executable, "-m", "services", "gateway", "--instance", "-"]
        command += ["--nats-url", self.nats.url("gateway-1"), "--redis-url", self.redis.url]
        command += ["--process-id", "gateway-1", "--http-port", str(port)]
        self.others.append(self._launched(command, "gateway"))
        wait_until(lambda: self._listens(port), seen=lambda: self._log_of("gateway"))
        return f"http://127.0.0.1:{port}/health"

    @property
    def health_url(self) -> str:
        return f"http://127.0.0.1:{self.metrics_port}/healthz"

    def _launched(self, command: list[str], name: str) -> subprocess.Popen[bytes]:
        with (self.folder / f"{name}.log").open("ab") as log:
            environ = {**os.environ, **self.environ}
            return subprocess.Popen(command, stdout=log, stderr=log, env=environ)

    def stop(self) -> None:
        self.process.send_signal(signal.SIGTERM)
        self.process.wait(DRAIN_S + 10)

    def kill(self) -> None:
        for each in (self.process, *self.others):
            each.kill()
            each.wait()

    @property
    def log(self) -> str:
        return self._log_of("host")

    def _log_of(self, name: str) -> str:
        path = self.folder / f"{name}.log"
        return path.read_text() if path.is_file() else ""

    @staticmethod
    def _listens(port: int) -> bool:
        with suppress(OSError):
            socket.create_connection(("127.0.0.1", port)).close()
            return True
        return False

    def worker_pids(self) -> list[int]:
        """Returns the process ids of the template's children."""
        return [pid for each in children(self.process.pid) for pid in children(each)]


def templates(host: LiveHost) -> list[int]:
    """Returns the children that workers are forked from."""
    return children_with(host, b"services.host.workers.worker_template")


def downloads(host: LiveHost) -> list[int]:
    return children_with(host, b"services.local.hub_process")


def children_with(host: LiveHost, module: bytes) -> list[int]:
    """Returns the host's children that run a module: one that has ended has no command line."""
    found = []
    for pid in children(host.process.pid):
        with suppress(OSError):  # it has just ended
            if module in command_line(pid):
                found.append(pid)
    return found


def children(pid: int) -> list[int]:
    try:
        text = Path(f"/proc/{pid}/task/{pid}/children").read_text()
    except OSError:
        return []
    return [int(each) for each in text.split()]


@contextmanager
def live_host(
    folder: Path, *, budget: str = "cpu=3GiB", environ: Mapping[str, str] = {}
) -> Iterator[LiveHost]:
    nats, redis = NatsServer(folder, USERS), RedisServer()
    host = LiveHost(nats, redis, folder, budget, environ)
    try:
        host.start()
        yield host
    finally:
        host.kill()
        nats.stop()
        redis.stop()


@dataclass
class Operator:
    """Commands the host as a scheduler does, and sees its heartbeats."""

    bus: NatsBus
    registry: RegistryAdmin
    host: LiveHost
    states: dict[str, list[str]] = field(default_factory=dict)  # of each model, in their order
    newest: dict[str, Heartbeat] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.background = Background()
        self._models = ReceivedModels(self.bus, MonotonicClock(), self.background)

    def receive(self, message: Heartbeat) -> None:
        self.newest[message.process_id] = self._models.complete(message)
        for each in self.load.models:
            states = self.states.setdefault(each.name, [])
            if states[-1:] != [each.state]:
                states.append(each.state)

    @property
    def load(self) -> HostLoad:
        heartbeat = self.newest.get("host-1")
        return (
            HostLoad(devices=()) if heartbeat is None or heartbeat.host is None else heartbeat.host
        )

    def model(self, name: str) -> HostedModel | None:
        return next((each for each in self.load.models if each.name == name), None)

    async def until(self, predicate: Callable[[], bool]) -> None:
        """Fails at once if the host ends: no later heartbeat can change anything."""
        await until(lambda: predicate() or self._has_ended(), timeout_s=START_S, seen=self.seen)
        assert not self._has_ended() or predicate(), f"the host ended\n{self.seen()}"

    def _has_ended(self) -> bool:
        return self.host.process.poll() is not None

    async def state(self, name: str, *states: str) -> HostedModel:
        """Waits for one of these states of a model. It fails at once if the model does."""

        def has_settled() -> bool:
            found = self.model(name)
            return found is not None and found.state in (*states, "failed")

        await self.until(has_settled)
        found = self.model(name)
        assert found is not None
        assert found.state in states, f"{name} failed: {found.failure}\n{self.seen()}"
        return found

    def seen(self) -> str:
        """Returns the states of each model in their order, and the end of the host's log."""
        lines = [f"{name}: {' → '.join(states)}" for name, states in self.states.items()]
        return "\n".join([*lines, self.host.log[-LOG_CHARACTERS:]])

    async def wake(self, name: str, revision: str = "r1") -> ModelWaking:
        message = WakeModel(model=name, revision=revision)
        return await self._command(message, ModelWaking)

    async def park(self, name: str, revision: str = "r1") -> Done:
        return await self._command(ParkModel(model=name, revision=revision), Done)

    async def drain(self, *, is_undone: bool = False) -> DrainState:
        message = DrainWorker(hand_over_s=None if is_undone else 0.0, is_undone=is_undone)
        return await self._command(message, DrainState)

    async def _command(self, message, reply_type):  # type: ignore[no-untyped-def]
        return await self.bus.request(
            host_models("host-1"), message, reply_type, timeout_s=DEADLINE_S
        )

    def kv_blocks(self, worker_id: str) -> int:
        load = self.newest[worker_id].load
        assert load is not None
        return load.num_total_blocks


@asynccontextmanager
async def operator(host: LiveHost) -> AsyncIterator[Operator]:
    url = host.nats.url("scheduler-1")
    bus = await NatsBus.connect(url, process_id="scheduler-1")
    store = RedisStore(host.redis.url, MonotonicClock(), timeout_s=5.0)
    found = Operator(bus, RegistryAdmin(store, time.time), host)
    try:
        await bus.subscribe(HEARTBEATS, Heartbeat, found.receive)
        yield found
    finally:
        await found.background.stop()
        await store.close()
        await bus.close()


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True
