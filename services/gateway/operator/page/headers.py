"""The security headers of the page, and the check of Host that stops DNS rebinding."""

from __future__ import annotations

from ipaddress import AddressValueError, IPv4Address
from typing import Any

from litestar.connection import ASGIConnection
from litestar.exceptions import NotFoundException
from litestar.handlers import BaseRouteHandler

Connection = ASGIConnection[Any, Any, Any, Any]
LOOPBACK_NAMES = frozenset({"localhost", "127.0.0.1", "[::1]"})
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
    "require-trusted-types-for 'script'; trusted-types 'none'"
)
SECURITY_HEADERS = {
    "content-security-policy": POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
}


class HostCheck:
    """A guard against DNS rebinding: a gateway bound to loopback answers only requests whose Host
    is a loopback name, since a page of another site may use a foreign name that resolves to
    loopback.
    """

    def __init__(self, http_host: str) -> None:
        self._is_loopback = http_host in {"localhost", "::1"} or _is_loopback_v4(http_host)

    async def __call__(self, connection: Connection, _: BaseRouteHandler) -> None:
        if self._is_loopback and not _is_loopback_name(connection.headers.get("host", "")):
            raise NotFoundException


def _is_loopback_name(host: str) -> bool:
    """Whether the host, with an optional port, is localhost or a loopback address. A name that only
    begins like an address is not.
    """
    name, _, port = host.rpartition(":")
    if not port.isdigit():
        name = host
    return name.lower() in LOOPBACK_NAMES or _is_loopback_v4(name)


def _is_loopback_v4(name: str) -> bool:
    try:
        return IPv4Address(name).is_loopback
    except AddressValueError:
        return False
