"""Hearth as real processes on this machine, whose workers' steps take a stated time or none.

`cluster` starts servers alone; its processes are started, signalled and replaced one by one.
`hearth` is a full one that is ready.
"""

from __future__ import annotations

import asyncio
import subprocess
import time
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import httpx
import msgspec
import psutil

from benchmarks.serving.closed_loop import Target
from services.cli.cluster.service_options import DEMO_MODEL_NAME
from shared.subjects import CredentialRole, credential_of
from shared.tenancy.tenant_admin import new_api_key, save_api_key, save_client
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

START_TIMEOUT_S = 300.0  # the first start compiles kernels
POLL_S = 0.05
OPERATOR_NAME = "benchmark-operator"
TENANT, CLIENT = "benchmark", "benchmark-client"  # the client over NATS is one of the tenant
ROOM = ("--max-batch-tokens", "8192", "--max-sequences", "1024")  # of workers that take no time
Processes = dict[str, psutil.Process]

SERVICES: dict[str, CredentialRole] = {
    "kv_index": "kv_index",
    "scheduler": "scheduler",
    "gateway": "gateway",
}
SPLIT: dict[str, CredentialRole] = {**SERVICES, "prefill": "prefill", "decode": "decode"}
ONE_WORKER: dict[str, CredentialRole] = {**SERVICES, "worker": "worker"}


@dataclass
class Process:
    process_id: str
    popen: subprocess.Popen[bytes]
    log_path: Path
    url: str = ""  # address of a gateway

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
        """Returns the log's entries with this name."""
        return events_of(self.output(), name)


def events_of(log: str, name: str) -> list[dict[str, Any]]:
    """Returns the entries with this name among JSON lines; other lines are ignored."""
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
    """A cluster of real processes. `region` is that of its services, `processes` includes ended
    ones.
    """

    folder: Path
    nats: NatsServer
    redis: RedisServer
    region: str = ""
    api_key: str = field(default_factory=new_api_key)
    processes: list[Process] = field(default_factory=list)

    def start(
        self,
        role: CredentialRole,
        process_id: str,
        *,
        command: Sequence[str] = (),
        nats_port: int | None = None,
        environ: Mapping[str, str] = {},
        options: Mapping[str, object] = {},
    ) -> Process:
        """Starts a service and returns at once.

        `command` has python's arguments; by default those of a service. `nats_port` is the port of
        a relay to NATS.
        """
        url = f"http://127.0.0.1:{free_port()}" if role == "gateway" else ""
        arguments = [*(command or _command(role))]
        for name, value in {**_identity(process_id), **_address(url), **options}.items():
            arguments += [f"--{name}", str(value)]
        log_path = self.folder / f"{len(self.processes)}-{process_id}.log"
        variables = {**self._environ(process_id, nats_port), **environ}
        if url:
            variables["HEARTH_OPERATOR_TOKEN"] = OPERATOR_TOKEN
        popen = start_python(arguments, variables, log_path)
        self.processes.append(Process(process_id, popen, log_path, url))
        return self.processes[-1]

    async def ready(self, gateway: Process, *others: Process) -> None:
        """Waits until the gateway accepts requests and knows the others. Raises RuntimeError if one
        of them ends, or TimeoutError.
        """
        by_id = {each.process_id: each for each in others}
        deadline = time.monotonic() + START_TIMEOUT_S
        async with httpx.AsyncClient(timeout=2, headers=OPERATOR, trust_env=False) as http:
            while missing := by_id.keys() - await known_processes(http, gateway.url):
                for each in (gateway, *others):
                    if not each.is_running:
                        raise RuntimeError(f"{each.process_id} ended: {each.output()[-2000:]}")
                if time.monotonic() > deadline:
                    logs = {each: by_id[each].output()[-2000:] for each in missing}
                    raise TimeoutError(f"{gateway.process_id} does not know all: {logs}")
                await asyncio.sleep(POLL_S)

    def stop(self) -> None:
        for process in self.processes:
            process.popen.kill()
            process.popen.wait()
        self.nats.stop()
        self.redis.stop()

    def _environ(self, process_id: str, nats_port: int | None) -> dict[str, str]:
        port = self.nats.port if nats_port is None else nats_port
        return {
            "HEARTH_NATS_URL": f"nats://{credential_of(process_id)}:{PASSWORD}@127.0.0.1:{port}",
            "HEARTH_REDIS_URL": self.redis.url,
        }


def _identity(process_id: str) -> dict[str, object]:
    credential, _, instance = process_id.partition(".")
    return {"process-id": credential, "instance": instance or "-"}


def _address(url: str) -> dict[str, object]:
    return {"http-port": url.rpartition(":")[2]} if url else {}


def _command(role: CredentialRole) -> list[str]:
    command = ["-m", "services", role.replace("_", "-")]
    return [*command, *MODEL] if role == "gateway" else command


AnyCluster = TypeVar("AnyCluster", bound=Cluster)


@asynccontextmanager
async def running(cluster: AnyCluster) -> AsyncIterator[AnyCluster]:
    """Stops its processes and servers in the end."""
    try:
        await save_api_key(cluster.redis.url, cluster.api_key, TENANT)
        await save_client(cluster.redis.url, CLIENT, TENANT)
        yield cluster
    finally:
        cluster.stop()


def credentials(services: Mapping[str, CredentialRole]) -> list[tuple[CredentialRole, str]]:
    """Returns the credentials of the services, of the client and of the operator."""
    roles = [(role, name) for name, role in services.items()]
    return [*roles, ("client", CLIENT), ("operator", OPERATOR_NAME)]


@asynccontextmanager
async def hearth(
    services: Mapping[str, CredentialRole],
    folder: Path,
    *,
    step_s: float,
    redis: RedisServer | None = None,
    nats: NatsServer | None = None,
    commands: Mapping[str, Sequence[str]] | None = None,
) -> AsyncIterator[tuple[Target, Processes]]:
    """Runs services behind a gateway. Stops `redis` and `nats` at the end, also if the caller
    started them.

    A caller starts them to read and write records, or to share them with other peers. `commands`
    has, by name, the commands of services that are started in another way.
    """
    nats = NatsServer(folder, credentials(services)) if nats is None else nats
    async with running(Cluster(folder, nats, redis or RedisServer())) as cluster:
        given = {**_idle_workers(services.items(), step_s), **(commands or {})}
        for name, role in services.items():
            cluster.start(role, name, command=given.get(name, ()))
        (gateway,) = (each for each in cluster.processes if each.url)
        await cluster.ready(gateway, *(each for each in cluster.processes if not each.url))
        found = {each.process_id: psutil.Process(each.popen.pid) for each in cluster.processes}
        template, *_ = found["gateway"].children()  # others are for grammars
        found |= {"chat template": template}
        found |= {
            "nats-server": psutil.Process(nats.pid),
            "redis": psutil.Process(cluster.redis.pid),
        }
        url = nats.url(CLIENT)
        yield Target(gateway.url, cluster.api_key, DEMO_MODEL_NAME, nats_url=url), found


def _idle_workers(
    services: Iterable[tuple[str, CredentialRole]], step_s: float
) -> dict[str, list[str]]:
    module = ["-m", "benchmarks.serving.worker", str(step_s)]
    return {name: [*module, role, *MODEL, *ROOM] for name, role in services if role in ROLES}
