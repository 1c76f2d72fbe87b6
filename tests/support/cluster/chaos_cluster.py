"""A cluster whose processes can be killed, frozen, thawed and restarted, by name.

Two of each service except the index, so that each row has a spare; only the test restarts
processes.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Iterable, Mapping
from pathlib import Path

import httpx
import msgspec

from services.cli.cluster.service_options import DEMO_MODEL_DIR, DEMO_MODEL_NAME
from services.local.credentials import role_of
from services.local.servers import nats_environ
from shared.subjects import CredentialRole
from shared.tenancy.tenant_admin import new_api_key, save_api_key, save_client
from shared.transport.link_config import SiteLinks
from shared.transport.server_config import NatsUser, nats_server_config
from tests.support.cluster.monitored_process import STEP_VARIABLE
from tests.support.cluster.process_template import ForkedProcess, template
from tests.support.cluster.service_processes import (
    OPERATOR,
    OPERATOR_TOKEN,
    known_processes,
    process_environ,
    start_python,
)
from tests.support.servers import PASSWORD, Server, find_binary, free_port
from tests.support.waiting import LIMIT_S

START_TIMEOUT_S = 300.0  # the first start compiles kernels
POLL_S = 0.05
_ENCODE_OPTIONS = {"dtype", "device"}  # of a worker's

SERVICES: dict[str, CredentialRole] = {
    "kv_index-1": "kv_index",
    "scheduler-1": "scheduler",
    "scheduler-2": "scheduler",
    "prefill-1": "prefill",
    "prefill-2": "prefill",
    "decode-1": "decode",
    "decode-2": "decode",
    "gateway-1": "gateway",
    "gateway-2": "gateway",
}
SERVERS = ("nats-server", "redis-server")
MONITOR = "monitor"
MONITORED = ("-m", "tests.support.cluster.monitored_process")
CLIENT, TENANT = "client-1", "chaos"
OBSERVER = "observer-1"


class ChaosCluster:
    """A cluster of real processes that tests kill and freeze.

    `step_s` is the step time of the timing engine; None serves `model`, its folder and name,
    instead. `environ_of` and `options_of` are additional variables and options of single services,
    by name. With `links` it is one of several sites.
    """

    def __init__(
        self,
        folder: Path,
        *,
        step_s: float | None,
        model: tuple[Path, str] = (DEMO_MODEL_DIR, DEMO_MODEL_NAME),
        worker_options: Mapping[str, str] = {},
        scheduler_options: Mapping[str, str] = {},
        gateway_options: Mapping[str, str] = {},
        services: Iterable[str] = SERVICES,
        environ_of: Mapping[str, Mapping[str, str]] = {},
        options_of: Mapping[str, Mapping[str, str]] = {},
        links: SiteLinks | None = None,
    ) -> None:
        self.folder = folder
        self.links = links
        self.services = {name: role_of(name.rpartition("-")[0]) for name in services}
        self.api_key = new_api_key()
        self.urls = {n: f"http://127.0.0.1:{free_port()}" for n in self.named("gateway")}
        self._step_s = step_s
        self._model = model
        self._environ_of = environ_of
        self._options_of = options_of
        self._options: dict[str, Mapping[str, str]] = {
            "prefill": worker_options,
            "decode": worker_options,
            "encode": {n: each for n, each in worker_options.items() if n in _ENCODE_OPTIONS},
            "worker": worker_options,
            "scheduler": scheduler_options,
            "gateway": gateway_options,
        }
        self._processes: dict[str, subprocess.Popen[bytes] | ForkedProcess] = {}
        self._servers: dict[str, Server] = {}

    def named(self, role: str) -> list[str]:
        return [name for name, each in self.services.items() if each == role]

    def num_more_ranks(self, role: str) -> int:
        """Returns the number of rank processes of these workers beyond one each."""
        named = self.named(role)
        return sum(int(self._options_of.get(name, {}).get("tp", 1)) - 1 for name in named)

    @property
    def nats_url(self) -> str:
        return self._nats_url_of(MONITOR)

    @property
    def nats_port(self) -> int:
        return self._servers["nats-server"].port

    @property
    def client_url(self) -> str:
        """Returns the NATS address of the tenant's client."""
        return self._nats_url_of(CLIENT)

    @property
    def observer_url(self) -> str:
        return self._nats_url_of(OBSERVER)

    # ── lifecycle ────────────────────────────────────────────────────────────────────────────────

    async def start(self) -> None:
        """Waits until every gateway has every process."""
        self._servers["nats-server"] = self._nats()
        self._servers["redis-server"] = _redis(free_port(), self.folder)
        await self._store_key()
        for name in self.services:
            self._launch(name)
        await self.wait_until_ready()

    def stop(self) -> None:
        """Kills the remaining processes: a test that checks a clean exit requests it before."""
        for process in self._processes.values():
            if process.poll() is None:
                process.kill()
            process.wait()
        for server in self._servers.values():
            server.stop()

    async def wait_until_ready(self, timeout_s: float = START_TIMEOUT_S) -> None:
        deadline = time.monotonic() + timeout_s
        async with httpx.AsyncClient(timeout=2, headers=OPERATOR, trust_env=False) as client:
            while missing := await self._missing(client):
                assert time.monotonic() < deadline, f"not ready: {missing}"
                await asyncio.sleep(POLL_S)

    async def _missing(self, client: httpx.AsyncClient) -> set[str]:
        """Returns the names of processes that some gateway does not know."""
        wanted = {name for name, role in self.services.items() if role != "gateway"}
        missing: set[str] = set()
        for url in self.urls.values():
            missing |= wanted - await known_processes(client, url)
        return missing

    # ── faults ───────────────────────────────────────────────────────────────────────────────────

    def pid(self, name: str) -> int:
        return self._servers[name].pid if name in SERVERS else self._processes[name].pid

    def rank_pid(self, name: str, rank: int) -> int:
        """Returns the process of a worker's rank."""
        children = [
            int(pid)
            for task in Path(f"/proc/{self.pid(name)}/task").iterdir()
            for pid in (task / "children").read_text().split()
        ]
        ranks = [each for each in sorted(children) if b"rank_process" in command_line(each)]
        return ranks[rank]  # started in order

    def kill(self, name: str) -> None:
        if name in SERVERS:
            self._servers[name].stop()
        else:
            self._processes[name].kill()

    def freeze(self, name: str) -> None:
        os.kill(self.pid(name), signal.SIGSTOP)

    def break_device(self, name: str) -> None:
        """Makes every later step of this worker raise. The worker must have the timing engine."""
        os.kill(self.pid(name), signal.SIGUSR2)

    def thaw(self, name: str) -> None:
        os.kill(self.pid(name), signal.SIGCONT)

    def terminate(self, name: str) -> None:
        self._processes[name].send_signal(signal.SIGTERM)

    @property
    def has_lost(self) -> bool:
        """Whether one of its processes has ended."""
        return any(each.poll() is not None for each in self._processes.values())

    async def ended(self, name: str, timeout_s: float) -> int:
        """Returns the exit status. Raises TimeoutExpired."""
        return await asyncio.to_thread(self._processes[name].wait, timeout_s)

    async def restart(self, name: str) -> None:
        """Restarts an ended process on the same ports; Redis reads its append-only file."""
        if name in SERVERS:
            await asyncio.to_thread(self._servers[name].start)
        else:
            self._processes[name].wait()
            self._launch(name)

    # ── held objects ─────────────────────────────────────────────────────────────────────────────

    async def census(self, name: str) -> dict[str, int]:
        """Returns live objects, tasks and descriptors of a service."""
        pid = self.pid(name)
        path = self._census_folder / f"{pid}.json"
        path.unlink(missing_ok=True)
        os.kill(pid, signal.SIGUSR1)
        async with asyncio.timeout(LIMIT_S):
            while not path.exists():
                await asyncio.sleep(POLL_S)
        return msgspec.json.decode(path.read_bytes(), type=dict[str, int]) | descriptors(pid)

    def log_of(self, name: str) -> str:
        return (self.folder / f"{name}.log").read_text(errors="replace")

    @property
    def _census_folder(self) -> Path:
        path = self.folder / "census"
        path.mkdir(exist_ok=True)
        return path

    # ─────────────────────────────────────────────────────────────────────────────────────────────

    def _nats(self) -> Server:
        port = free_port()
        users = [NatsUser(role, name, PASSWORD) for name, role in self.services.items()]
        users += [NatsUser("client", CLIENT, PASSWORD), NatsUser("observer", OBSERVER, PASSWORD)]
        text = nats_server_config(users, host="127.0.0.1", port=port, links=self.links)
        monitor = f'users: [\n    {{user: "{MONITOR}", password: "{PASSWORD}"}}\n'
        path = self.folder / "nats.conf"
        path.write_text(text.replace("users: [\n", monitor, 1))
        environ = nats_environ(os.environ, num_cores=len(os.sched_getaffinity(0)))
        return Server([find_binary("nats-server"), "-c", str(path)], port, environ)

    async def _store_key(self) -> None:
        await save_api_key(self.redis_url, self.api_key, TENANT)
        await save_client(self.redis_url, CLIENT, TENANT)

    @property
    def redis_url(self) -> str:
        return f"redis://127.0.0.1:{self._servers['redis-server'].port}/0"

    def _nats_url_of(self, name: str) -> str:
        return f"nats://{name}:{PASSWORD}@127.0.0.1:{self.nats_port}"

    def _launch(self, name: str) -> None:
        log_path = self.folder / f"{name}.log"
        arguments, environ = self._arguments(name), self._environ(name)
        if all(each.startswith("HEARTH_") for each in self._environ_of.get(name, {})):
            environ = process_environ(environ)
            self._processes[name] = template().start(arguments, environ, log_path)
        else:  # libraries read their variables when they are imported
            self._processes[name] = start_python([*MONITORED, *arguments], environ, log_path)

    def _arguments(self, name: str) -> list[str]:
        role = self.services[name]
        options = {"process-id": name, "instance": "-", **self._options.get(role, {})}
        options |= self._options_of.get(name, {})
        if self.links is not None and role in ("gateway", "scheduler"):
            options |= {"site": self.links.site}
        if role == "gateway":
            options |= {"http-port": self.urls[name].rpartition(":")[2], "lame-duck-s": "0"}
            options |= {"operator-token": OPERATOR_TOKEN}
        command = [str(self._census_folder), role.replace("_", "-")]
        if role in ("gateway", "encode", "prefill", "decode", "worker"):
            directory, model_name = self._model
            command += ["--model-dir", str(directory), "--model-name", model_name]
        for option, value in options.items():
            command += [f"--{option}", value] if value else [f"--{option}"]
        return command

    def _environ(self, name: str) -> dict[str, str]:
        environ = {
            "HEARTH_MAX_LOCAL_PREFILL_TOKENS": "4",  # otherwise decode computes these short prompts
            "HEARTH_NATS_URL": self._nats_url_of(name),
            "HEARTH_REDIS_URL": self.redis_url,
        }
        if self._step_s is not None:
            environ[STEP_VARIABLE] = str(self._step_s)
        return environ | self._environ_of.get(name, {})


def command_line(pid: int) -> bytes:
    return Path(f"/proc/{pid}/cmdline").read_bytes()


def descriptors(pid: int) -> dict[str, int]:
    """Returns the number of open descriptors and of those for shared memory."""
    links = []
    for each in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(OSError):
            links.append(str(each.readlink()))
    return {
        "descriptors": len(links),
        "memfds": sum(link.startswith("/memfd:") for link in links),
    }


def _redis(port: int, folder: Path) -> Server:
    arguments = ["--port", str(port), "--bind", "127.0.0.1", "--save", "", "--appendonly", "yes"]
    arguments += ["--dir", str(folder)]
    return Server([find_binary("redis-server"), *arguments], port)
