"""What a local cluster is from one start to the next: its secrets, credentials and ports.

`kept.json`, mode 0600, in the folder of `hearth up --state`. Without such a folder all of it is new
at each start, except the API key for a Redis that runs on: that one is in the user's state folder.
"""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Iterable
from hashlib import sha256
from pathlib import Path

import msgspec

from services.local.credentials import Credential
from services.local.plan import UpOptions
from services.local.redis_acl import REDIS_ROLES
from services.local.servers import (
    DEFAULT_NATS_PORT,
    LOOPBACK,
    choose_http_port,
    chosen_port,
    default_or_free_port,
    free_port,
    kept_port,
)
from services.local.state import read_secret, write_secret
from shared.errors import ConfigError
from shared.tenancy.tenant_admin import new_api_key
from shared.transport.wire_errors import UNREADABLE

KEPT_FILE = "kept.json"
KEYS_FOLDER = "keys"


def _new_redis_passwords() -> dict[str, str]:
    return {role: secrets.token_hex(16) for role in REDIS_ROLES}


class ClusterIdentity(msgspec.Struct, frozen=True, kw_only=True):
    """Each value is a new one unless it is given. Of ports, 0 is one that is not chosen yet."""

    api_key: str = msgspec.field(default_factory=new_api_key)
    operator_token: str = msgspec.field(default_factory=lambda: secrets.token_urlsafe(16))
    cluster_secret: str = msgspec.field(default_factory=lambda: secrets.token_hex(32))
    redis_password: str = msgspec.field(default_factory=lambda: secrets.token_hex(16))
    redis_passwords: dict[str, str] = msgspec.field(default_factory=_new_redis_passwords)
    credentials: tuple[Credential, ...] = ()
    http_port: int = 0
    nats_port: int = 0
    redis_port: int = 0


def read_identity(directory: Path) -> ClusterIdentity | None:
    """Returns None if the folder has none yet. Raises ConfigError for one that cannot be read."""
    path = directory / KEPT_FILE
    data = read_secret(path)
    if data is None:
        return None
    try:
        return msgspec.json.decode(data, type=ClusterIdentity)
    except UNREADABLE as error:
        raise ConfigError(f"{path} cannot be read: {error}") from None


def save_identity(directory: Path, identity: ClusterIdentity) -> None:
    write_secret(directory / KEPT_FILE, msgspec.json.encode(identity).decode())


def save_credentials(directory: Path, credentials: tuple[Credential, ...]) -> None:
    """Keeps the credentials for the next start, if the cluster has one."""
    identity = read_identity(directory)
    if identity is not None:
        save_identity(directory, msgspec.structs.replace(identity, credentials=credentials))


def choose_ports(options: UpOptions, kept: ClusterIdentity, *, is_kept: bool) -> dict[str, int]:
    """Returns the ports of a start: given ones, else those of the last start, else new ones; none
    of a server that runs elsewhere. Raises ConfigError.
    """
    host, port = options.http_host, options.http_port
    ports = {"http_port": kept.http_port}
    if port or not kept.http_port:
        ports["http_port"] = choose_http_port(host, port)
    else:
        kept_port(host, kept.http_port, "--http")
    if options.nats_url is None:
        ports["nats_port"] = _nats_port(options, kept, is_kept=is_kept)
    if options.redis_url is None:
        ports["redis_port"] = _redis_port(kept)
    return ports


def _nats_port(options: UpOptions, kept: ClusterIdentity, *, is_kept: bool) -> int:
    host, port = options.advertise_host, options.nats_port
    if port is not None or not is_kept:
        return chosen_port(host, port)
    if kept.nats_port:
        return kept_port(host, kept.nats_port, "--nats-port")
    return default_or_free_port(host, DEFAULT_NATS_PORT)


def _redis_port(kept: ClusterIdentity) -> int:
    if kept.redis_port:
        with contextlib.suppress(ConfigError):  # processes of this cluster alone need to know it
            return kept_port(LOOPBACK, kept.redis_port, "")
    return free_port(LOOPBACK)


def with_kept_passwords(
    planned: Iterable[Credential], kept: Iterable[Credential]
) -> tuple[Credential, ...]:
    """Returns the planned credentials; those that are kept for the same process have its
    password.
    """
    known = {(each.role, each.process_id): each.password for each in kept}
    return tuple(
        msgspec.structs.replace(
            each, password=known.get((each.role, each.process_id), each.password)
        )
        for each in planned
    )


def with_other_kept(
    planned: tuple[Credential, ...], kept: Iterable[Credential]
) -> tuple[Credential, ...]:
    """Returns the planned credentials and those kept for other processes, such as workers on other
    hosts.
    """
    names = {each.process_id for each in planned}
    return (*planned, *(each for each in kept if each.process_id not in names))


def key_file(state_parent: Path, redis_url: str) -> Path:
    """Returns the file of the API key for an external Redis, which outlives the clusters that use
    it.
    """
    return state_parent.with_name(KEYS_FOLDER) / sha256(redis_url.encode()).hexdigest()[:16]


def read_key(path: Path | None) -> str | None:
    data = None if path is None else read_secret(path)
    return None if data is None else data.decode(errors="replace").strip() or None


def save_key(path: Path, api_key: str) -> None:
    """Without a folder to write to, the next start makes another key."""
    with contextlib.suppress(OSError, ConfigError):
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        write_secret(path, f"{api_key}\n")
