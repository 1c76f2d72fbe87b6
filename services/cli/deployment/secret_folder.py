"""The secrets of processes that a supervisor runs: Docker Compose, Kubernetes or systemd.

    NAME.nk                       the seed of a process's NATS key
    nats.conf                     of nats-server: public keys and permissions, no secret
    redis-ROLE.password, .url     of the Redis user of a role
    users.acl                     of redis-server: users, their commands, digests of passwords
    cluster-secret, operator-token, metrics-token
    prometheus-token              one value of the metrics-token, which has two in a rotation
    hf-token                      yours, for models of the hub; empty at first
    deployment.json               the processes, and options of the calls so far

What is there stays, so that a second call adds processes; a file that was deleted is made anew.
`nats.conf`, `users.acl` and the URLs follow from the others and are written each time.
"""

from __future__ import annotations

import os
import re
import secrets
from collections.abc import Iterable, Sequence
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import NamedTuple

import msgspec

from services.cli.deployment import folder_record
from services.cli.deployment.folder_record import FolderRecord
from services.local.credentials import (
    Credential,
    named_credentials,
    nats_config_with_nkeys,
    tls_block,
)
from services.local.redis_acl import REDIS_ROLES, acl_line
from shared.errors import ConfigError
from shared.nats_urls import authority, checked_host
from shared.subjects import CredentialRole

PROCESSES = (
    *("gateway=gateway", "scheduler=scheduler", "kv_index=kv-index", "prefill=prefill"),
    *("decode=decode", "prefill=prefill-gpu", "decode=decode-gpu", "host=host", "worker=worker"),
    *("encode=encode", "observer=observer", "operator=operator"),
)
METRICS_TOKEN, SCRAPE_TOKEN = "metrics-token", "prometheus-token"
TOKENS = ("cluster-secret", "operator-token", METRICS_TOKEN)
HUB_TOKEN = "hf-token"
REDIS_ADMIN = "redis-admin.password"
NATS_PORT, REDIS_PORT = 4222, 6379
TOKEN_BYTES = 32
_WITH_PORT = re.compile(r"(\[.+\]|[^:]+):(\d{1,5})")
# What a process of a role needs beside its NATS key: the option without its dashes, and the file
FILES_OF_ROLE: dict[CredentialRole, dict[str, str]] = {
    "gateway": {
        "redis-url": "redis-gateway.url",
        **{name: name for name in (*TOKENS, HUB_TOKEN)},
    },
    "scheduler": {},
    "kv_index": {"redis-url": "redis-kv_index.url", "cluster-secret": "cluster-secret"},
    "host": {"redis-url": "redis-host.url", HUB_TOKEN: HUB_TOKEN},
    "operator": {"redis-url": "redis-operator.url"},
    "observer": {},
    "encode": {HUB_TOKEN: HUB_TOKEN},
    "prefill": {HUB_TOKEN: HUB_TOKEN},
    "decode": {HUB_TOKEN: HUB_TOKEN},
    "worker": {HUB_TOKEN: HUB_TOKEN},
    "client": {},
}
# Containers read single files, mounted for their own user; the folder itself is closed to others
_FILE_MODE, _FOLDER_MODE = 0o644, 0o700
_OTHERS_ENTER = 0o001


class SecretFolder(NamedTuple):
    path: Path
    processes: Sequence[Credential]

    def text(self, name: str) -> str:
        """Returns the text of a file. Raises ConfigError."""
        try:
            return (self.path / name).read_text().strip()
        except OSError as error:
            raise ConfigError(f"{self.path / name}: {error.strerror}") from None


def record_with(
    path: Path | None, processes: Sequence[str], *, redis_host: str | None, tls: str | None
) -> FolderRecord:
    """Returns what the folder at `path`, or a new one, is for after a call with these options.
    Raises ConfigError.
    """
    named_credentials(processes)
    found = None if path is None else folder_record.read_record(path)
    record = found or FolderRecord(has_defaults=not processes)
    changed = record.with_given(processes, redis_host=redis_host, tls=tls)
    if found is None and path is not None:
        _check_keys(path, processes_of(changed))
    return changed


def processes_of(record: FolderRecord) -> list[Credential]:
    """Raises ConfigError."""
    return named_credentials(record.all_processes(PROCESSES))


def _check_keys(path: Path, processes: Iterable[Credential]) -> None:
    """Raises ConfigError for a folder without a record that has keys of other processes."""
    unnamed = {each.stem for each in path.glob("*.nk")} - {each.process_id for each in processes}
    if unnamed:
        raise ConfigError(
            f"{path} has keys that nats.conf would no longer know: {', '.join(sorted(unnamed))}. "
            "Name all of its processes with --process, or delete the files"
        )


def complete_folder(path: Path, record: FolderRecord, *, default_host: str) -> SecretFolder:
    """Creates what the folder lacks. `default_host` is that of Redis. Raises ConfigError."""
    folder = SecretFolder(path, processes_of(record))
    redis_address = _redis_address(record.redis_host or default_host)
    try:
        path.mkdir(mode=_FOLDER_MODE, parents=True, exist_ok=True)
        _check_closed(path)
        for name in TOKENS:
            _keep(path / name, secrets.token_hex(TOKEN_BYTES))
        _keep(path / SCRAPE_TOKEN, folder.text(METRICS_TOKEN).partition("\n")[0])
        _keep(path / HUB_TOKEN, "")
        _complete_nats(folder, record.tls or None)
        _complete_redis(folder, redis_address)
        text = msgspec.json.format(msgspec.json.encode(record)).decode()
        _write(path / folder_record.FILE, f"{text}\n")  # the last: what a failed call named is not
    except OSError as error:
        raise ConfigError(f"{error.filename or path}: {error.strerror}") from None
    return folder


def _check_closed(path: Path) -> None:
    """Raises ConfigError for a folder that was there, and that other users may enter."""
    if path.stat().st_mode & _OTHERS_ENTER:
        raise ConfigError(
            f"other users may enter {path}, and containers need its files readable: "
            f"chmod 700 {path}, or name a new folder"
        )


def _complete_nats(folder: SecretFolder, tls: str | None) -> None:
    path, named = folder.path, folder.processes
    text = nats_config_with_nkeys(named, path, host="0.0.0.0", port=NATS_PORT)
    for each in named:
        (path / f"{each.process_id}.nk").chmod(_FILE_MODE)
    _write(path / "nats.conf", text + ("" if tls is None else tls_block(tls)))


def _redis_address(given: str) -> str:
    """Returns the host and port of a host that may have a port. Raises ConfigError."""
    parts = _WITH_PORT.fullmatch(given)
    host, port = parts.groups() if parts else (given, REDIS_PORT)
    if not 0 < int(port) < 65536:
        raise ConfigError(f"--host {given!r}: no such port")
    return authority(checked_host(host), int(port))


def _complete_redis(folder: SecretFolder, address: str) -> None:
    path = folder.path
    admin = _keep(path / REDIS_ADMIN, secrets.token_hex(TOKEN_BYTES))
    lines = [f"user default on #{sha256(admin.encode()).hexdigest()} ~* &* +@all"]
    for role in REDIS_ROLES:
        password = _keep(path / f"redis-{role}.password", secrets.token_hex(TOKEN_BYTES))
        _write(path / f"redis-{role}.url", f"redis://{role}:{password}@{address}/0\n")
        lines.append(acl_line(role, password))
    _write(path / "users.acl", "\n".join(lines) + "\n")


def _keep(path: Path, text: str) -> str:
    """Returns the text of the file, which is created with `text` if it is missing."""
    if not path.exists():
        _write(path, f"{text}\n" if text else "")
    return path.read_text().strip()


def _write(path: Path, text: str) -> None:
    """Replaces the file at once: a server may read it meanwhile."""
    new = path.with_name(f".{path.name}.new")
    new.unlink(missing_ok=True)
    with open(new, "x", opener=partial(os.open, mode=_FILE_MODE)) as file:
        os.fchmod(file.fileno(), _FILE_MODE)  # whatever the umask is
        file.write(text)
        file.flush()
        os.fsync(file.fileno())  # else a power loss may leave an empty file under the name
    new.replace(path)
