"""A local cluster of three models on one host, as `hearth up` runs it: its supervisor restarts what
ends. Also what /proc shows of the host's processes.

The models are the demo model with other last norms: a stream that went on with the worker of
another model would show.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from safetensors.torch import load_file, save_file

from services.cli.cluster.service_options import DEMO_MODEL_DIR
from services.local.cluster import LocalCluster
from services.local.model_list import NamedModel
from services.local.plan import UpOptions
from shared.background import Background
from shared.clock import MonotonicClock
from shared.errors import HearthError
from shared.lifecycle.host_models import ReceivedModels
from shared.messages import (
    Done,
    Heartbeat,
    HostedModel,
    HostLoad,
    ModelWaking,
    ParkModel,
    WakeModel,
)
from shared.subjects import HEARTBEATS, host_models
from shared.transport.bus import NatsBus
from tests.support.waiting import NotReached, until_changed

HOST = "host-1"
MODELS = ("a", "b", "c")
BUDGET_BYTES = 3 << 30
REQUEST_TIMEOUT_S = 60.0  # of the gateway, for every request
DEADLINE_S = 60.0
COMMAND_TIMEOUT_S = 10.0
FRESH_S = 1.0  # of a heartbeat of a process that lives


@dataclass
class HostSite:
    """What heartbeats say, and commands to the host."""

    cluster: LocalCluster
    bus: NatsBus
    newest: dict[str, Heartbeat] = field(default_factory=dict)
    received_at: dict[str, float] = field(default_factory=dict)
    _changed: asyncio.Event = field(default_factory=asyncio.Event)

    def __post_init__(self) -> None:
        self.background = Background()
        self._models = ReceivedModels(self.bus, MonotonicClock(), self.background)

    def receive(self, heartbeat: Heartbeat) -> None:
        self.newest[heartbeat.process_id] = self._models.complete(heartbeat)
        self.received_at[heartbeat.process_id] = time.monotonic()
        self._changed.set()

    @property
    def load(self) -> HostLoad:
        heartbeat = self.newest.get(HOST)
        if heartbeat is None or heartbeat.host is None:
            return HostLoad(devices=())
        return heartbeat.host

    def model(self, name: str) -> HostedModel | None:
        return next((each for each in self.load.models if each.name == name), None)

    def state(self, name: str) -> str:
        found = self.model(name)
        return "unknown" if found is None else found.state

    async def until(self, predicate: Callable[[], bool], *, timeout_s: float = DEADLINE_S) -> None:
        await until_changed(
            predicate, self._changed, timeout_s=timeout_s, seen=lambda: self.load.models
        )

    def forget(self) -> None:
        """Until the next heartbeat of each process."""
        self.newest.clear()
        self.received_at.clear()

    async def wake(self, name: str) -> None:
        """Until it is hot."""
        while self.state(name) != "hot":
            with contextlib.suppress(HearthError):
                await self.command(name, WakeModel, ModelWaking)
            with contextlib.suppress(NotReached):
                await self.until(lambda: self.state(name) == "hot", timeout_s=2.0)

    async def park(self, name: str) -> None:
        """Until it is in standby."""
        await self.until(lambda: self.state(name) in ("hot", "standby"))
        await self.command(name, ParkModel, Done)
        await self.until(lambda: self.state(name) == "standby")

    async def command(
        self, name: str, kind: type[WakeModel | ParkModel], reply_type: type[ModelWaking | Done]
    ) -> None:
        """Raises HearthError."""
        found = self.model(name)
        if found is None:
            return
        message = kind(model=name, revision=found.revision)
        await self.bus.request(host_models(HOST), message, reply_type, timeout_s=COMMAND_TIMEOUT_S)

    # ── workers ──────────────────────────────────────────────────────────────────────────────────

    def living_workers(self, name: str) -> list[str]:
        """Those of a model that have sent a heartbeat within FRESH_S."""
        now = time.monotonic()
        return [
            each.process_id
            for each in self.newest.values()
            if each.model is not None and each.model.name == name and each.state != "stopped"
            if now - self.received_at[each.process_id] < FRESH_S
        ]

    def used_bytes(self) -> int:
        """Of all models: as the host counts them, or with the caches that workers report."""
        load = self.load
        counted = sum(each.used_bytes for each in load.devices)
        return max(counted, self._cache_bytes() + sum(each.weights_bytes for each in load.models))

    def _cache_bytes(self) -> int:
        found = 0
        for worker_id in (each for name in MODELS for each in self.living_workers(name)):
            load, card = self.newest[worker_id].load, self.newest[worker_id].model
            if load is not None and card is not None:
                found += load.num_total_blocks * card.block_size * card.kv_bytes_per_token
        return found

    def pid_of_host(self) -> int:
        return self.cluster.pid_of(HOST)

    def worker_pids(self) -> dict[int, str]:
        """The names of the logs to which workers of this site write, by pid: also orphans."""
        found = {}
        for entry in Path("/proc").iterdir():
            if not entry.name.isdecimal():
                continue
            with contextlib.suppress(OSError):
                log = (entry / "fd" / "1").readlink()
                if log.parent == self.worker_logs and log.stem != "template":
                    found[int(entry.name)] = log.stem
        return found

    def pid_of_worker(self, name: str) -> int:
        return next(pid for pid, each in self.worker_pids().items() if is_log_of(each, name))

    @property
    def worker_logs(self) -> Path:
        return Path(os.environ["XDG_STATE_HOME"], "hearth", "hosts", HOST, "logs").resolve()


def is_log_of(log_name: str, model: str) -> bool:
    """Whether it is the log of a model's workers."""
    return log_name.startswith(f"{model}-")


def write_models(folder: Path) -> tuple[NamedModel, ...]:
    """A folder of each model: another weight of the last norm, and links to all other files."""
    found = []
    for index, name in enumerate(MODELS):
        directory = folder / name
        directory.mkdir()
        for each in DEMO_MODEL_DIR.iterdir():
            if each.suffix != ".safetensors":
                (directory / each.name).symlink_to(each)
        weights = load_file(DEMO_MODEL_DIR / "model.safetensors")
        weights["model.norm.weight"] = weights["model.norm.weight"].roll(index)
        save_file(weights, directory / "model.safetensors", {"format": "pt"})
        found.append(NamedModel(name, str(directory)))
    return tuple(found)


@contextlib.asynccontextmanager
async def running_site(folder: Path) -> AsyncIterator[HostSite]:
    """`folder`: of its state, models and logs."""
    models = write_models(folder)
    options = UpOptions(
        model_dir=DEMO_MODEL_DIR,
        models=models,
        http_port=0,
        num_prefill=0,
        num_decode=0,
    )
    environ = {
        "XDG_STATE_HOME": str(folder),
        "HEARTH_BUDGET": f"cpu={BUDGET_BYTES >> 20}MiB",
        "HEARTH_REQUEST_TIMEOUT_S": f"{REQUEST_TIMEOUT_S:g}",
    }
    with _environ(environ):
        cluster = LocalCluster(options, MonotonicClock(), state_parent=folder / "clusters")
        async with cluster:
            assert cluster.operator is not None
            url, process_id = cluster.operator
            bus = await NatsBus.connect(url, process_id=process_id)
            site = HostSite(cluster, bus)
            try:
                await bus.subscribe(HEARTBEATS, Heartbeat, site.receive)
                yield site
            finally:
                await site.background.stop()
                await bus.close()


@contextlib.contextmanager
def _environ(values: dict[str, str]) -> Iterator[None]:
    """Of this process, from which a local cluster takes that of its services."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value
