"""A cluster of real processes that are started, signalled and replaced one by one."""

from __future__ import annotations

import asyncio
import subprocess
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import httpx
import msgspec

from benchmarks.adversity.worker import StepFaults
from shared.subjects import CredentialRole, credential_of
from shared.tenancy.tenant_admin import new_api_key, save_api_key
from shared.transport.server_config import NatsUser
from tests.support.cluster.service_processes import (
    MODEL,
    OPERATOR,
    OPERATOR_TOKEN,
    known_processes,
    start_python,
)
from tests.support.cluster.timing import ROLES
from tests.support.servers import PASSWORD, NatsServer, RedisServer, free_port
from tests.support.waiting import NotReached, until

START_TIMEOUT_S = 60.0
POLL_S = 0.05
NO_FAULTS = StepFaults()
SERVICES: tuple[CredentialRole, ...] = ("kv_index", "scheduler", "gateway")


@dataclass
class Process:
    process_id: str
    popen: subprocess.Popen[bytes]
    log_path: Path
    url: str = ""  # of a gateway

    @property
    def is_running(self) -> bool:
        return self.popen.poll() is None

    async def ended(self, timeout_s: float = 30.0) -> int | None:
        """Returns the exit status; None if the process still runs after `timeout_s`."""
        with suppress(NotReached):
            await until(lambda: not self.is_running, timeout_s=timeout_s)
        return self.popen.poll()

    def output(self) -> str:
        return self.log_path.read_text(errors="replace")

    def events(self, name: str) -> list[dict[str, Any]]:
        """The log's entries with this name."""
        return events_of(self.output(), name)


def events_of(log: str, name: str) -> list[dict[str, Any]]:
    """The entries with this name among JSON lines; other lines are ignored."""
    lines = (line for line in log.splitlines() if line.startswith("{"))
    entries = []
    for line in lines:
        try:
            entries.append(msgspec.json.decode(line))
        except msgspec.DecodeError:  # the last line, while it is written
            continue
    return [each for each in entries if each.get("event") == name]


@dataclass
class Cluster:
    """`region`: of the services. `processes`: all that were started, also those that have ended."""

    folder: Path
    nats: NatsServer
    redis: RedisServer
    api_key: str
    region: str = ""
    processes: list[Process] = field(default_factory=list)

    def start(
        self,
        role: CredentialRole,
        process_id: str,
        *,
        step_s: float = 0.01,
        faults: StepFaults = NO_FAULTS,
        nats_port: int | None = None,
        environ: Mapping[str, str] = {},
        options: Mapping[str, object] = {},
    ) -> Process:
        """`step_s` and `faults` are for workers. `nats_port`: of a relay. Returns at once."""
        url = f"http://127.0.0.1:{free_port()}" if role == "gateway" else ""
        command = _command(role, step_s, faults)
        chosen = {**_identity(process_id), **options}
        if url:
            chosen["http-port"] = url.rpartition(":")[2]
            chosen["operator-token"] = OPERATOR_TOKEN
        for name, value in chosen.items():
            command += [f"--{name}", str(value)]
        port = self.nats.port if nats_port is None else nats_port
        log_path = self.folder / f"{len(self.processes)}-{process_id}.log"
        popen = start_python(command, self._environ(process_id, port) | environ, log_path)
        self.processes.append(Process(process_id, popen, log_path, url))
        return self.processes[-1]

    def start_services(self, environ: Mapping[str, str] = {}) -> Process:
        """An index, a scheduler and a gateway. Returns the gateway."""
        options = {"region": self.region}
        services = [self.start(each, each, environ=environ, options=options) for each in SERVICES]
        return services[-1]

    async def ready(self, gateway: Process, *others: Process) -> None:
        """Waits until the gateway accepts requests and knows the others. Raises RuntimeError if one
        of them ends, or TimeoutError.
        """
        wanted = {each.process_id for each in others}
        async with (
            asyncio.timeout(START_TIMEOUT_S),
            httpx.AsyncClient(timeout=2, headers=OPERATOR, trust_env=False) as http,
        ):
            while not wanted <= await known_processes(http, gateway.url):
                for each in (gateway, *others):
                    if not each.is_running:
                        raise RuntimeError(f"{each.process_id} ended: {each.output()[-2000:]}")
                await asyncio.sleep(POLL_S)

    def stop(self) -> None:
        for process in self.processes:
            process.popen.kill()
            process.popen.wait()
        self.nats.stop()
        self.redis.stop()

    def _environ(self, process_id: str, nats_port: int) -> dict[str, str]:
        credential = credential_of(process_id)
        return {
            "HEARTH_NATS_URL": f"nats://{credential}:{PASSWORD}@127.0.0.1:{nats_port}",
            "HEARTH_REDIS_URL": self.redis.url,
        }


@asynccontextmanager
async def cluster(
    workers: Mapping[str, CredentialRole], *, region: str = "", regions: Mapping[str, str] = {}
) -> AsyncIterator[Cluster]:
    """NATS and Redis with credentials for the services, which are in `region`, and for `workers`,
    of which some are in `regions`. No process runs yet.
    """
    users = [NatsUser(role, role, PASSWORD, region) for role in SERVICES]
    users += [NatsUser(role, n, PASSWORD, regions.get(n, "")) for n, role in workers.items()]
    with TemporaryDirectory(prefix="hearth-adversity-") as name:
        folder = Path(name)
        nats = NatsServer(folder, users)
        started = Cluster(folder, nats, RedisServer(), new_api_key(), region)
        try:
            await save_api_key(started.redis.url, started.api_key, "benchmark")
            yield started
        finally:
            started.stop()


def _identity(process_id: str) -> dict[str, object]:
    credential, _, instance = process_id.partition(".")
    return {"process-id": credential, "instance": instance or "-"}


def _command(role: CredentialRole, step_s: float, faults: StepFaults) -> list[str]:
    if role in ROLES:
        module = ["-m", "benchmarks.adversity.worker", role]
        return [*module, str(step_s), str(faults.after_s), str(faults.poison_seed), *MODEL]
    command = ["-m", "services", role.replace("_", "-")]
    return [*command, *MODEL] if role == "gateway" else command
