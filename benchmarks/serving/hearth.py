"""A full Hearth cluster of real processes whose workers' steps take no time."""

from __future__ import annotations

import asyncio
import subprocess
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import psutil

from benchmarks.serving.closed_loop import Target
from services.cli.cluster.service_options import DEMO_MODEL_NAME
from shared.subjects import CredentialRole
from shared.tenancy.tenant_admin import new_api_key, save_api_key, save_client
from tests.support.cluster.service_processes import (
    MODEL,
    OPERATOR,
    OPERATOR_TOKEN,
    known_processes,
    start_python,
)
from tests.support.cluster.timing import ROLES
from tests.support.servers import NatsServer, RedisServer, free_port

ROOT = Path(__file__).resolve().parents[2]
START_TIMEOUT_S = 60.0
OPERATOR_NAME = "benchmark-operator"
TENANT, CLIENT = "benchmark", "benchmark-client"  # the client over NATS is one of the tenant
Processes = dict[str, psutil.Process]

SERVICES: dict[str, CredentialRole] = {
    "kv_index": "kv_index",
    "scheduler": "scheduler",
    "gateway": "gateway",
}
SPLIT: dict[str, CredentialRole] = {**SERVICES, "prefill": "prefill", "decode": "decode"}
ONE_WORKER: dict[str, CredentialRole] = {**SERVICES, "worker": "worker"}


@asynccontextmanager
async def hearth(
    services: dict[str, CredentialRole],
    folder: Path,
    *,
    step_s: float,
    redis: RedisServer | None = None,
    nats: NatsServer | None = None,
    commands: Mapping[str, list[str]] | None = None,
) -> AsyncIterator[tuple[Target, Processes]]:
    """`commands`: of services that are started in another way, by name. Stops `redis` and `nats`
    in the end, also those that the caller started, to read and write records or for other peers.
    """
    nats = NatsServer(folder, credentials(services)) if nats is None else nats
    redis = RedisServer() if redis is None else redis
    url, api_key = f"http://127.0.0.1:{free_port()}", new_api_key()
    started: dict[str, subprocess.Popen[bytes]] = {}
    try:
        await save_api_key(redis.url, api_key, TENANT)
        await save_client(redis.url, CLIENT, TENANT)
        for name, role in services.items():
            environ = {"HEARTH_NATS_URL": nats.url(name), "HEARTH_REDIS_URL": redis.url}
            command = (commands or {}).get(name) or _command(role, step_s)
            command = [*command, "--process-id", name, "--instance", "-"]
            if role == "gateway":
                command += ["--http-port", url.rpartition(":")[2]]
                environ["HEARTH_OPERATOR_TOKEN"] = OPERATOR_TOKEN
            started[name] = start_python(command, environ, folder / f"{name}.log")
        await _ready(url, set(services) - {"gateway"})
        found = {name: psutil.Process(process.pid) for name, process in started.items()}
        template, *_ = found["gateway"].children()  # others are for grammars
        found |= {"chat template": template}
        found |= {"nats-server": psutil.Process(nats.pid), "redis": psutil.Process(redis.pid)}
        yield Target(url, api_key, DEMO_MODEL_NAME, nats_url=nats.url(CLIENT)), found
    finally:
        for process in started.values():
            process.kill()
            process.wait()
        nats.stop()
        redis.stop()


def credentials(services: dict[str, CredentialRole]) -> list[tuple[CredentialRole, str]]:
    """Of the services and of who measures them."""
    roles = [(role, name) for name, role in services.items()]
    return [*roles, ("client", CLIENT), ("operator", OPERATOR_NAME)]


def _command(role: CredentialRole, step_s: float) -> list[str]:
    if role in ROLES:
        room = ["--max-batch-tokens", "8192", "--max-sequences", "1024"]
        return ["-m", "benchmarks.serving.worker", str(step_s), role, *MODEL, *room]
    command = ["-m", "services", role.replace("_", "-")]
    return [*command, *MODEL] if role == "gateway" else command


async def _ready(url: str, wanted: set[str]) -> None:
    """Waits until the gateway has every other process."""
    deadline = time.monotonic() + START_TIMEOUT_S
    async with httpx.AsyncClient(timeout=2, headers=OPERATOR, trust_env=False) as client:
        while missing := wanted - await known_processes(client, url):
            if time.monotonic() > deadline:
                raise TimeoutError(f"not ready: {missing}")
            await asyncio.sleep(0.05)
