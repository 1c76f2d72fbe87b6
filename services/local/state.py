"""The private directory of a local cluster: its secrets, its logs, and its address for commands.

$XDG_STATE_HOME/hearth/clusters/<random name>/     mode 0700
    starting.json   what a cluster that starts waits for
    lock            held by the running `hearth up`, whose process id it has; a free lock means a
                    dead cluster
    cluster.json    URL, API key, NATS address, credentials, Redis URL; of a running cluster alone
    nats.conf redis.conf nats.pid
    appendonly.aof appendonlydir       the tenants, keys and usage of the cluster's Redis
    logs/<process_id>.log
    tmp             symlink to the processes' temporary directory, where socket paths are short

The folder of `hearth up --state` has the same files, and `kept.json` (`identity.py`). It outlives
the cluster with its Redis files; a symlink in `clusters` leads commands to it.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
import time
from collections.abc import Iterator, Mapping
from hashlib import sha256
from pathlib import Path
from typing import IO

import msgspec

from services.local.credentials import Credential
from services.local.processes.start_record import FILE_NAME as _STARTING
from services.local.processes.start_record import Start, read_start
from services.local.state_home import state_home
from shared.errors import ConfigError
from shared.lifecycle.socket_directory import make_socket_directory
from shared.subjects import CredentialRole
from shared.transport.link_config import SiteLinks
from shared.transport.wire_errors import UNREADABLE

_LOCK = "lock"
_CLUSTER = "cluster.json"
_TMP = "tmp"
_SOCKET_NAME_BYTES = 32  # names of sockets that the processes make below it
_REDIS_DIR = "appendonlydir"  # Redis 7's; Redis 6 has a file
_OF_ONE_RUN = (_CLUSTER, _STARTING, "nats.conf", "redis.conf", "nats.pid")
LOCK_POLL_S = 0.05
LOCK_WAIT_S = 0.5  # commands that look for clusters hold locks for microseconds
END_WAIT_S = 5.0  # then the Redis of a cluster that was killed has ended, too


class LocalClusterState(msgspec.Struct, frozen=True, kw_only=True):
    url: str
    api_key: str
    http_cert: str = ""  # PEM file of an HTTPS gateway's certificate
    model_name: str = ""  # the first of those that it was started with
    operator_token: str = ""  # opens the gateway's /v1/cluster
    nats_host: str = ""  # empty: the cluster uses an external NATS
    nats_port: int = 0
    redis_url: str = ""
    credentials: tuple[Credential, ...] = ()
    links: SiteLinks | None = None  # to other sites
    region_classes: tuple[str, ...] = ()

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

    def __init__(self, path: Path, lock: IO[str], link: Path | None = None) -> None:
        """`link`: of a folder that outlives the cluster, what leads commands to it."""
        self.path = path
        self.logs = path / "logs"
        self.scratch = (path / _TMP).resolve()
        self._lock = lock
        self._link = link

    @property
    def lock(self) -> int:
        """The descriptor of the lock, which a child that inherits it holds, too."""
        return self._lock.fileno()

    @property
    def is_kept(self) -> bool:
        """Whether the folder outlives the cluster."""
        return self._link is not None

    @classmethod
    def create(cls, parent: Path) -> StateDir:
        """Creates a directory, and before it removes those of dead clusters, which may fill the
        disk. Raises ConfigError.
        """
        _remove_dead(parent)
        try:
            parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            path = Path(tempfile.mkdtemp(prefix="", dir=parent))
            try:
                lock = _lock_new(path)
                (path / "logs").mkdir(mode=0o700)
                _make_scratch(path)
            except OSError:
                _remove(path)
                raise
        except OSError as error:
            raise ConfigError(f"cannot store state in {parent}: {error.strerror}") from None
        return cls(path, lock)

    @classmethod
    def open(cls, folder: Path, parent: Path) -> StateDir:
        """Opens a folder that outlives its cluster, or makes it. Raises ConfigError, also if
        another process uses it, or if it is a folder of something else.
        """
        path = folder.expanduser().resolve()
        try:
            _check_kept(path)
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
            path.chmod(0o700)
            lock = _lock_kept(path)
            _remove_run(path)  # of a cluster that was killed
            (path / "logs").mkdir(mode=0o700, exist_ok=True)
            _make_scratch(path)
            parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            link = parent / f"kept-{sha256(os.fsencode(path)).hexdigest()[:12]}"
            link.unlink(missing_ok=True)
            link.symlink_to(path)
        except OSError as error:
            raise ConfigError(f"cannot store state in {path}: {error.strerror}") from None
        _remove_dead(parent)
        return cls(path, lock, link)

    def write_secret(self, name: str, text: str) -> Path:
        return write_secret(self.path / name, text)

    def publish(self, state: LocalClusterState) -> None:
        save(self.path, state)

    def close(self, *, retain_logs: bool) -> None:
        """Removes the directory, or all its files except the logs. Of a kept folder, only what
        belongs to one run is removed.
        """
        if self._link is not None:
            self._link.unlink(missing_ok=True)
            _remove_run(self.path)
        elif retain_logs:
            shutil.rmtree(self.scratch, ignore_errors=True)
            for each in self.path.iterdir():
                if each.is_file() and each.name != _LOCK:
                    each.unlink()
            shutil.rmtree(self.path / _REDIS_DIR, ignore_errors=True)
        else:
            _remove(self.path)
        self._lock.close()


def write_secret(path: Path, text: str) -> Path:
    """Replaces the file atomically; only the owner can read it at any moment. Raises ConfigError,
    and leaves the file as it was.
    """
    temporary = None
    try:
        descriptor, temporary = tempfile.mkstemp(dir=path.parent)  # mode 0600
        with os.fdopen(descriptor, "w") as file:
            file.write(text)
            file.flush()
            os.fsync(descriptor)  # else a power loss may leave an empty file under the name
        Path(temporary).replace(path)
    except OSError as error:
        if temporary is not None:
            Path(temporary).unlink(missing_ok=True)
        raise ConfigError(f"{path} cannot be written: {error.strerror}") from None
    return path


def read_secret(path: Path) -> bytes | None:
    """Returns None if there is no such file. Raises ConfigError."""
    try:
        return path.read_bytes()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from None


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
        if is_running(directory) and (directory / _CLUSTER).exists():  # else it is still starting
            return directory, _read(directory)
    starting = starting_cluster(parent)
    if starting is not None:
        raise ConfigError(starting.text)
    raise ConfigError("no local cluster is running here: start one with `hearth up`")


class StartingCluster(msgspec.Struct, frozen=True):
    """A cluster that is not ready yet. `holder` is the id of its `hearth up`."""

    holder: int
    start: Start

    @property
    def text(self) -> str:
        waits = f", waits for {', '.join(self.start.waits_for)}" if self.start.waits_for else ""
        return f"a cluster is starting (process {self.holder}{waits})"


def starting_cluster(parent: Path) -> StartingCluster | None:
    """Returns the newest cluster that is starting."""
    for directory in _by_age(parent):
        if is_running(directory) and not (directory / _CLUSTER).exists():
            with contextlib.suppress(ConfigError):  # it has just stopped
                holder = holder_of(directory)
                if Path("/proc", str(holder)).exists():  # else its Redis ends
                    return StartingCluster(holder, read_start(directory))
    return None


def newest_cluster(parent: Path) -> tuple[Path, bool]:
    """Returns the directory of the cluster that started last, and whether it runs; one that has
    ended has failed or was killed, as the others leave none. Raises ConfigError if there is none.
    """
    directories = _by_age(parent)
    running = next(filter(is_running, directories), None)
    if running is None and not directories:
        raise ConfigError("no local cluster is running here: start one with `hearth up`")
    return running or directories[0], running is not None


def _by_age(parent: Path) -> list[Path]:
    """Returns the directories of clusters, the newest first."""
    found = []
    with contextlib.suppress(OSError):
        for each in parent.iterdir():
            # Another process removes it, or it is another user's.
            with contextlib.suppress(OSError):
                found.append(((each / _LOCK).stat().st_mtime_ns, each))
    return [each for _, each in sorted(found, reverse=True)]


def is_running(directory: Path) -> bool:
    """Whether a process holds the lock of this cluster."""
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


def _remove_dead(parent: Path) -> None:
    for directory in _by_age(parent):
        lock = _locked(directory)
        if lock is not None:
            _remove(directory)
            lock.close()


def _remove(directory: Path) -> None:
    if directory.is_symlink():  # to a folder that outlives its cluster
        directory.unlink(missing_ok=True)
        return
    shutil.rmtree((directory / _TMP).resolve(), ignore_errors=True)
    shutil.rmtree(directory, ignore_errors=True)


def _lock_new(path: Path) -> IO[str]:
    """Returns the lock of a new directory, which is visible only once it is locked."""
    lock = (path / ".lock").open("a")
    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    _write_holder(lock)
    (path / ".lock").rename(path / _LOCK)
    return lock


def _make_scratch(path: Path) -> None:
    (path / _TMP).symlink_to(make_socket_directory("hearth-", name_bytes=_SOCKET_NAME_BYTES))


def _remove_run(path: Path) -> None:
    """Removes what belongs to one run from a folder that outlives it."""
    for name in _OF_ONE_RUN:
        (path / name).unlink(missing_ok=True)
    if (path / _TMP).is_symlink():
        shutil.rmtree((path / _TMP).resolve(), ignore_errors=True)
        (path / _TMP).unlink()


def _check_kept(path: Path) -> None:
    """Raises ConfigError for a folder with files of something else, which would become private."""
    if path.is_dir() and not (path / _LOCK).exists() and any(path.iterdir()):
        raise ConfigError(f"--state {path} has other files: give a new or an empty folder")


def _lock_kept(path: Path) -> IO[str]:
    """Returns the lock, with this process's id in its file. Raises ConfigError if another process
    holds it.
    """
    started = time.monotonic()
    while (lock := _locked(path)) is None:
        holder = (path / _LOCK).read_text().strip()
        wait_s = LOCK_WAIT_S if Path("/proc", holder or "-").exists() else END_WAIT_S
        if time.monotonic() > started + wait_s:
            raise ConfigError(f"--state {path} is in use by `hearth up` (process {holder})")
        time.sleep(LOCK_POLL_S)
    os.fchmod(lock.fileno(), 0o600)
    _write_holder(lock)
    return lock


def _write_holder(lock: IO[str]) -> None:
    lock.truncate(0)
    lock.write(f"{os.getpid()}\n")
    lock.flush()


def holder_of(directory: Path) -> int:
    """Returns the id of the process that runs the cluster. Raises ConfigError."""
    try:
        return int((directory / _LOCK).read_text())
    except (OSError, ValueError):
        raise ConfigError("the cluster has just stopped") from None
