"""Credentials of a cluster's processes: one per process, with the process id as user name."""

from __future__ import annotations

import os
import re
import secrets
from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import get_args

import msgspec

from shared.errors import ConfigError
from shared.nats_urls import authority, user_of
from shared.regions.region_classes import NO_CLASSES, RegionClasses
from shared.subjects import CredentialRole, process_id_of, random_instance
from shared.transport.link_config import SiteLinks
from shared.transport.nkeys import UserKey
from shared.transport.server_config import NatsUser, NkeyUser, nats_server_config

ROLES: tuple[CredentialRole, ...] = get_args(CredentialRole)
_NAME = re.compile(r"[A-Za-z0-9_-]+")


class Credential(msgspec.Struct, frozen=True):
    """A credential. `process_id` is that of its only process here, and the first part of
    its replicas' ids.
    """

    role: CredentialRole
    process_id: str
    password: str = msgspec.field(default_factory=lambda: secrets.token_hex(16))
    region: str = ""

    def nats_url(self, host: str, port: int) -> str:
        return f"nats://{self.process_id}:{self.password}@{authority(host, port)}"


def role_of(text: str) -> CredentialRole:
    """Returns the role: `kv-index` and `kv_index` are the same. Raises ConfigError."""
    for role in ROLES:
        if role == text.replace("-", "_"):
            return role
    raise ConfigError(f"unknown role {text!r}; expected {', '.join(ROLES)}")


def random_process_id(role: str) -> str:
    return f"{role}-{random_instance()}"


def process_id_for(
    role: str, nats_url: str, *, credential: str | None = None, instance: str | None = None
) -> str:
    """Returns the process id: `credential` (default: the URL's user name, else a random name for
    the role) with `instance` (default: random, so that replicas may share a credential; "-": none).
    """
    name = credential or user_of(nats_url) or random_process_id(role)
    return process_id_of(name, random_instance() if instance is None else instance)


def nats_config(
    credentials: Sequence[Credential],
    *,
    host: str,
    port: int,
    links: SiteLinks | None = None,
    classes: RegionClasses = NO_CLASSES,
) -> str:
    users = [
        NatsUser(each.role, each.process_id, each.password, each.region) for each in credentials
    ]
    return nats_server_config(users, host=host, port=port, links=links, classes=classes)


def nats_config_with_variables(
    named: Sequence[Credential], *, host: str, port: int, classes: RegionClasses = NO_CLASSES
) -> str:
    """Returns a configuration without secrets: each password is `$HEARTH_<PROCESS_ID>_PASSWORD`.

    nats-server reads unquoted variables from its environment.
    """
    variables = [_password_variable(each.process_id) for each in named]
    users = [
        NatsUser(each.role, each.process_id, variable, each.region)
        for each, variable in zip(named, variables, strict=True)
    ]
    text = nats_server_config(users, host=host, port=port, classes=classes)
    for variable in variables:
        text = text.replace(f'"{variable}"', variable)
    return text


def nats_config_with_nkeys(
    named: Sequence[Credential],
    seeds: Path,
    *,
    host: str,
    port: int,
    links: SiteLinks | None = None,
    classes: RegionClasses = NO_CLASSES,
) -> str:
    """Returns a configuration without secrets: each user by the public key of `seeds`/NAME.nk,
    which is created if it is missing. Raises ConfigError.
    """
    users = [
        NkeyUser(
            each.role, each.process_id, created_key(seeds / f"{each.process_id}.nk"), each.region
        )
        for each in named
    ]
    return nats_server_config(users, host=host, port=port, links=links, classes=classes)


def created_key(path: Path) -> UserKey:
    """Returns the key of a seed's file, which is created if it is missing. Raises ConfigError."""
    if path.exists():
        return UserKey.of_file(path)
    key = UserKey.create()
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with open(path, "x", opener=partial(os.open, mode=0o600)) as file:
            file.write(f"{key.seed}\n")
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from None
    return key


def tls_block(directory: str) -> str:
    """Makes nats-server require TLS, and a certificate of the same authority of each client.

    A client may start the handshake at once, or wait for the server's first line. Raises
    ConfigError.
    """
    if not directory.isprintable() or '"' in directory or "\\" in directory:
        raise ConfigError(f"--tls {directory!r}: nats-server takes no such path")
    return (
        "tls {\n"
        f'  cert_file: "{directory}/server.crt"\n'
        f'  key_file: "{directory}/server.key"\n'
        f'  ca_file: "{directory}/ca.crt"\n'
        "  verify: true\n"
        '  handshake_first: "auto"\n'
        "}\n"
    )


def _password_variable(process_id: str) -> str:
    return f"$HEARTH_{process_id.upper().replace('-', '_')}_PASSWORD"


def check_name(name: str, kind: str = "process id") -> None:
    """Checks a name for subjects and nats-server's configuration. Raises ConfigError."""
    if not _NAME.fullmatch(name):
        raise ConfigError(f"{kind} {name!r} may have letters, digits, - and _ only")


def check_region(region: str) -> None:
    """Checks the name of a region. Raises ConfigError."""
    if region and not _NAME.fullmatch(region):
        raise ConfigError(f"region {region!r} may have letters, digits, - and _ only")


def check_classes(classes: RegionClasses, regions: Iterable[str]) -> None:
    """Checks that the regions of classes are among `regions`, those of the processes and links of a
    site. Raises ConfigError.
    """
    known = set(regions)
    for text, name in zip(classes.texts(), classes.regions, strict=True):
        for region in sorted(classes.regions[name] - known):
            raise ConfigError(
                f"region class {text!r} names {region!r}, which is the region of no process and no "
                "link here"
            )


def named_credentials(arguments: Sequence[str]) -> list[Credential]:
    """Parses `decode=decode-1`, or `decode=decode-1@eu` with a region. Raises ConfigError."""
    named = []
    for argument in arguments:
        role, separator, name = argument.partition("=")
        process_id, _, region = name.partition("@")
        if not separator or not process_id:
            raise ConfigError(f"{argument!r} is not ROLE=NAME or ROLE=NAME@REGION")
        check_name(process_id)
        check_region(region)
        named.append(Credential(role_of(role), process_id, region=region))
    variables = [_password_variable(each.process_id) for each in named]
    if len(set(variables)) < len(variables):  # - and _ give the same variable
        raise ConfigError("two processes have the same name, or the same password variable")
    return named
