"""Credentials of a cluster's processes: one per process, with the process id as user name."""

from __future__ import annotations

import re
import secrets
from collections.abc import Sequence
from urllib.parse import urlsplit

import msgspec

from shared.errors import ConfigError
from shared.subjects import CredentialRole, nats_server_config

ROLES: tuple[CredentialRole, ...] = (
    "gateway",
    "scheduler",
    "prefill",
    "decode",
    "kv_index",
    "worker",
    "observer",
)
_NAME = re.compile(r"[A-Za-z0-9_-]+")


class Credential(msgspec.Struct, frozen=True):
    role: CredentialRole
    process_id: str
    password: str = msgspec.field(default_factory=lambda: secrets.token_hex(16))

    def nats_url(self, host: str, port: int) -> str:
        return f"nats://{self.process_id}:{self.password}@{host}:{port}"


def role_of(text: str) -> CredentialRole:
    """`kv-index` and `kv_index` name the same role. Raises ConfigError."""
    for role in ROLES:
        if role == text.replace("-", "_"):
            return role
    raise ConfigError(f"unknown role {text!r}; expected {', '.join(ROLES)}")


def random_process_id(role: str) -> str:
    return f"{role}-{secrets.token_hex(3)}"


def process_id_for(role: str, nats_url: str) -> str:
    """The URL's user name, else a random process id for the role."""
    return urlsplit(nats_url).username or random_process_id(role)


def nats_config(credentials: Sequence[Credential], *, host: str, port: int) -> str:
    users = [(each.role, each.process_id, each.password) for each in credentials]
    return nats_server_config(users, host=host, port=port)


def nats_config_with_variables(
    names: Sequence[tuple[CredentialRole, str]], *, host: str, port: int
) -> str:
    """A configuration without secrets: each password is `$HEARTH_<PROCESS_ID>_PASSWORD`.

    nats-server reads unquoted variables from its environment.
    """
    variables = {process_id: _password_variable(process_id) for _, process_id in names}
    text = nats_server_config(
        [(role, process_id, variables[process_id]) for role, process_id in names],
        host=host,
        port=port,
    )
    for variable in variables.values():
        text = text.replace(f'"{variable}"', variable)
    return text


def _password_variable(process_id: str) -> str:
    return f"$HEARTH_{process_id.upper().replace('-', '_')}_PASSWORD"


def check_name(process_id: str) -> None:
    """Checks a name for subjects and nats-server's configuration. Raises ConfigError."""
    if not _NAME.fullmatch(process_id):
        raise ConfigError(f"process id {process_id!r} may have letters, digits, - and _ only")


def named_roles(arguments: Sequence[str]) -> list[tuple[CredentialRole, str]]:
    """Parses roles and process ids such as `decode=decode-1`. Raises ConfigError."""
    pairs = []
    for argument in arguments:
        role, separator, process_id = argument.partition("=")
        if not separator or not process_id:
            raise ConfigError(f"{argument!r} is not ROLE=PROCESS_ID")
        check_name(process_id)
        pairs.append((role_of(role), process_id))
    variables = [_password_variable(process_id) for _, process_id in pairs]
    if len(set(variables)) < len(variables):  # - and _ give the same variable
        raise ConfigError("two processes have the same name, or the same password variable")
    return pairs
