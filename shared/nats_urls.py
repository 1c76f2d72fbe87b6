"""The NATS URL of a process: one server, or a comma list of the servers of one cluster.

The servers share one credential, which stands in at least one of the URLs:
`nats://ID:PASSWORD@near:4222,nats://far:4222`, or with the file of a key's seed
`nats://ID@near:4222?seed=FILE,nats://far:4222`. They are tried in the order of the list.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple
from urllib.parse import SplitResult, parse_qs, urlsplit, urlunsplit

from shared.errors import ConfigError

SCHEMES = ("nats", "tls")
_HOST = re.compile(r"[A-Za-z0-9._-]+|[0-9A-Fa-f:.]*:[0-9A-Fa-f:.]*")
_BETWEEN_URLS = re.compile(r"\s*,\s*(?=[a-z]+://)")  # a password may contain a comma


class NatsServers(NamedTuple):
    """Servers and the credential of a NATS URL. `urls` have none, unless it is a token: a user
    without a password or a seed.
    """

    urls: list[str]
    user: str | None
    password: str | None
    seed_file: Path | None = None


def nats_servers(text: str) -> NatsServers:
    """Returns the servers of a URL, which may be a comma list. Raises ConfigError."""
    parts = _split(text)
    _check_servers(parts)
    credentials = {_credential(each) for each in parts} - {""}
    if len(credentials) > 1:
        raise ConfigError("nats_url has two credentials: its servers must share one")
    credential = credentials.pop() if credentials else ""
    seeds = {_seed_file(each) for each in parts} - {None}
    if len(seeds) > 1:
        raise ConfigError("nats_url has two seeds: its servers must share one")
    if seeds:
        if not credential or ":" in credential:
            raise ConfigError("nats_url with a seed has the name of its credential: nats://NAME@…")
        return NatsServers([_url(each) for each in parts], None, None, seeds.pop())
    user, has_password, password = credential.partition(":")
    if has_password:
        return NatsServers([_url(each) for each in parts], user, password)
    prefix = f"{credential}@" if credential else ""
    return NatsServers([_url(each, prefix) for each in parts], None, None)


def user_of(text: str) -> str | None:
    """Returns the user name, which is the process id; None without one."""
    names = (each.username for each in _split(text))
    return next((name for name in names if name), None)


def api_user(user: str) -> str:
    """Returns a gateway's user among the API clients. No credential has a name with a dot."""
    return f"{user}.api"


def without_password(text: str) -> str:
    """Returns the URLs without credentials, for logs and errors."""
    return ",".join(
        urlunsplit((each.scheme, _host_and_port(each), each.path, "", "")) for each in _split(text)
    )


def checked_host(text: str) -> str:
    """Returns a host name or an IP address, without the brackets of IPv6. Raises ConfigError."""
    host = text[1:-1] if text.startswith("[") and text.endswith("]") else text
    if not _HOST.fullmatch(host):
        raise ConfigError(f"{text!r} is neither the name of a host nor an IP address")
    return host


def authority(host: str, port: int) -> str:
    """Formats `host:port` for URLs and listen addresses: an IPv6 address in brackets (RFC 3986)."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _split(text: str) -> list[SplitResult]:
    return [urlsplit(each) for each in _BETWEEN_URLS.split(text.strip())]


def _check_servers(parts: list[SplitResult]) -> None:
    for each in parts:
        if each.scheme not in SCHEMES:
            expected = " or ".join(f"{scheme}://" for scheme in SCHEMES)
            raise ConfigError(f"nats_url must start with {expected}, as each server of a list")
        try:
            _ = each.port
        except ValueError as error:
            raise ConfigError(f"nats_url: {error}") from None
        if not each.hostname or "," in each.hostname:
            raise ConfigError(f"nats_url: no server at {_host_and_port(each)!r}")
    if len({each.scheme for each in parts}) > 1:
        raise ConfigError("nats_url mixes nats:// and tls://")


def _seed_file(parts: SplitResult) -> Path | None:
    """Raises ConfigError."""
    options = parse_qs(parts.query, keep_blank_values=True)
    unknown = options.keys() - {"seed"}
    if unknown or parts.fragment:
        raise ConfigError(f"nats_url: unknown option {min(unknown, default='#')!r}, only seed is")
    found = options.get("seed")
    return None if found is None else Path(found[-1])


def _url(parts: SplitResult, prefix: str = "") -> str:
    return urlunsplit(parts._replace(netloc=prefix + _host_and_port(parts), query=""))


def _host_and_port(parts: SplitResult) -> str:
    return parts.netloc.rpartition("@")[2]


def _credential(parts: SplitResult) -> str:
    return parts.netloc.rpartition("@")[0]
