"""The private directory of a local cluster: its secrets, its logs, and its address for commands.

$XDG_STATE_HOME/hearth/clusters/<random name>/     mode 0700
    lock            held by the running `hearth up`; a free lock means a dead cluster
    cluster.json    URL, API key, NATS address, credentials, Redis URL
    nats.conf redis.conf nats.pid
    appendonly.aof appendonlydir       the tenants, keys and usage of the cluster's Redis
    logs/<process_id>.log
    tmp             symlink to the processes' temporary directory, where socket paths are short
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO

import msgspec

from services.local.credentials import Credential
from services.local.state_home import state_home
from shared.errors import ConfigError
from shared.lifecycle.socket_directory import make_socket_directory
from shared.subjects import CredentialRole
from shared.transport.wire_errors import UNREADABLE

_LOCK = "lock"
_CLUSTER = "cluster.json"
_TMP = "tmp"
_SOCKET_NAME_BYTES = 32  # names of sockets that the processes make below it
_REDIS_DIR = "appendonlydir"  # Redis 7's; Redis 6 has a file


class LocalClusterState(msgspec.Struct, frozen=True, kw_only=True):
    url: str
    api_key: str
    model_name: str = ""  # the first of those that it was started with
    operator_token: str = ""  # opens the gateway's /v1/cluster
    nats_host: str = ""  # empty: the cluster uses an external NATS
    nats_port: int = 0
    redis_url: str = ""
    credentials: tuple[Credential, ...] = ()

    def nats_url_of(self, role: CredentialRole) -> str | None:
        """Returns the URL with the first credential of this role, or None without one, as with an
        external NATS.
        """
        for each in self.credentials:
            if each.role == role:
                return each.nats_url(self.nats_host, self.nats_port)
        return None


def clusters_dir(environ: Mapping[str, str] = os.environ) -> Path:
    """Returns the folder of all clusters. Raises ConfigError."""
    return state_home(environ) / "hearth" / "clusters"


class StateDir:
    """One cluster's directory, locked while this object is open."""

    def __init__(self, path: Path, lock: IO[str]) -> None:
        self.path = path
        self.logs = path / "logs"
        self.scratch = (path / _TMP).resolve()
        self._lock = lock

    @classmethod
    def create(cls, parent: Path) -> StateDir:
        """Creates a directory, and removes those of dead clusters. Raises ConfigError."""
        try:
            parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            path = Path(tempfile.mkdtemp(prefix="", dir=parent))
            lock = (path / ".lock").open("a")
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            (path / ".lock").rename(path / _LOCK)  # visible only once it is locked
        except OSError as error:
            raise ConfigError(f"cannot store state in {parent}: {error.strerror}") from None
        _remove_dead(parent, retained=path)
        (path / "logs").mkdir(mode=0o700)
        (path / _TMP).symlink_to(make_socket_directory("hearth-", name_bytes=_SOCKET_NAME_BYTES))
        return cls(path, lock)

    def write_secret(self, name: str, text: str) -> Path:
        return write_secret(self.path / name, text)

    def publish(self, state: LocalClusterState) -> None:
        save(self.path, state)

    def close(self, *, retain_logs: bool) -> None:
        """Removes the directory, or all its files except the logs."""
        if retain_logs:
            shutil.rmtree(self.scratch, ignore_errors=True)
            for each in self.path.iterdir():
                if each.is_file() and each.name != _LOCK:
                    each.unlink()
            shutil.rmtree(self.path / _REDIS_DIR, ignore_errors=True)
        else:
            _remove(self.path)
        self._lock.close()


def write_secret(path: Path, text: str) -> Path:
    """Replaces the file atomically; only the owner can read it at any moment."""
    descriptor, temporary = tempfile.mkstemp(dir=path.parent)  # mode 0600
    with os.fdopen(descriptor, "w") as file:
        file.write(text)
    Path(temporary).replace(path)
    return path


def save(directory: Path, state: LocalClusterState) -> None:
    write_secret(directory / _CLUSTER, msgspec.json.encode(state).decode())


@contextlib.contextmanager
def changing(directory: Path) -> Iterator[LocalClusterState]:
    """Yields the state under an exclusive lock. Raises ConfigError if the cluster has stopped."""
    try:
        descriptor = os.open(directory, os.O_RDONLY)
    except OSError:
        raise ConfigError("the cluster has just stopped") from None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield _read(directory)
    finally:
        os.close(descriptor)


def _read(directory: Path) -> LocalClusterState:
    try:
        return msgspec.json.decode((directory / _CLUSTER).read_bytes(), type=LocalClusterState)
    except OSError:
        raise ConfigError("the cluster has just stopped") from None
    except UNREADABLE:
        raise ConfigError("the running cluster uses another version of Hearth") from None


def running_cluster(parent: Path) -> tuple[Path, LocalClusterState]:
    """Returns the running cluster that started last. Raises ConfigError if there is none."""
    for directory in _by_age(parent):
        if _is_running(directory) and (directory / _CLUSTER).exists():  # else it is still starting
            return directory, _read(directory)
    raise ConfigError("no local cluster is running here: start one with `hearth up`")


def _by_age(parent: Path) -> list[Path]:
    """Returns the directories of clusters, the newest first."""
    try:
        directories = [each for each in parent.iterdir() if (each / _LOCK).exists()]
    except OSError:
        return []
    return sorted(directories, key=lambda each: (each / _LOCK).stat().st_mtime_ns, reverse=True)


def _is_running(directory: Path) -> bool:
    lock = _locked(directory)
    if lock is not None:
        lock.close()
    return lock is None and directory.exists()


def _locked(directory: Path) -> IO[str] | None:
    """Returns the lock, or None if another process holds it; the kernel frees a dead
    process's lock.
    """
    try:
        file = (directory / _LOCK).open("a")
    except OSError:
        return None  # another process removes the directory
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        file.close()
        return None
    return file


def _remove_dead(parent: Path, *, retained: Path) -> None:
    for directory in _by_age(parent):
        lock = None if directory == retained else _locked(directory)
        if lock is not None:
            _remove(directory)
            lock.close()


def _remove(directory: Path) -> None:
    shutil.rmtree((directory / _TMP).resolve(), ignore_errors=True)
    shutil.rmtree(directory, ignore_errors=True)
