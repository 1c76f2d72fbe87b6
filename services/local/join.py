"""Credentials for processes that join a running cluster, also from other hosts."""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping
from pathlib import Path

import msgspec

from services.local.credentials import (
    Credential,
    check_name,
    check_region,
    nats_config,
    random_process_id,
    role_of,
)
from services.local.identity import save_credentials
from services.local.state import (
    LocalClusterState,
    changing,
    clusters_dir,
    running_cluster,
    save,
    write_secret,
)
from shared.config import is_loopback
from shared.errors import ConfigError
from shared.nats_urls import checked_host
from shared.regions.region_classes import region_classes


class NewCredential(msgspec.Struct, frozen=True, kw_only=True):
    credential: Credential
    nats_url: str
    is_reachable: bool  # other hosts can connect to it


def add_credential(
    role: str,
    process_id: str | None,
    host: str | None,
    region: str = "",
    environ: Mapping[str, str] = os.environ,
) -> NewCredential:
    """Adds a credential to the running local cluster's NATS. Raises ConfigError."""
    known_role = role_of(role)
    name = random_process_id(known_role) if process_id is None else process_id
    check_name(name)
    check_region(region)
    given_host = None if host is None else checked_host(host)
    directory, _ = running_cluster(clusters_dir(environ))
    with changing(directory) as state:
        credential = Credential(known_role, name, region=region)
        _grant(credential, directory, state)
    return NewCredential(
        credential=credential,
        nats_url=credential.nats_url(given_host or state.nats_host, state.nats_port),
        is_reachable=not is_loopback(state.nats_host),
    )


def _grant(credential: Credential, directory: Path, state: LocalClusterState) -> None:
    if not state.nats_host:
        raise ConfigError("this cluster uses an external NATS: add the credential there")
    if any(each.process_id == credential.process_id for each in state.credentials):
        raise ConfigError(f"process id {credential.process_id!r} is taken in this cluster")
    grown = msgspec.structs.replace(state, credentials=(*state.credentials, credential))
    text = nats_config(
        grown.credentials,
        host=state.nats_host,
        port=state.nats_port,
        links=state.links,
        classes=region_classes(state.region_classes),
    )
    write_secret(directory / "nats.conf", text)
    save_credentials(directory, grown.credentials)
    save(directory, grown)
    _reload(directory)


def _reload(directory: Path) -> None:
    """Makes nats-server reload its configuration; connections stay open."""
    try:
        os.kill(signalled_process(directory / "nats.pid"), signal.SIGHUP)
    except ProcessLookupError:
        pass  # `hearth up` starts it again, which reads the configuration
    except OSError as error:
        raise ConfigError(f"cannot reload nats-server: {error}") from None


def signalled_process(path: Path) -> int:
    """Reads a process id from a file. Raises ConfigError unless the id can be a single process."""
    try:
        process_id = int(path.read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot reload nats-server: {error}") from None
    if not 1 < process_id < 2**22:  # ids <= 0 are groups or all; Linux has no larger ids
        raise ConfigError(f"cannot reload nats-server: {process_id} is not a valid process id")
    return process_id
