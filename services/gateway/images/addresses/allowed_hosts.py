"""Which addresses of images an operator allows. Pure: nothing is resolved here.

An entry is a host name, with a port if it is not 443: `images.example.com`, `cdn.example:8443`.
`http://` before it allows unencrypted fetches from it, and from port 80 by default.
"""

from __future__ import annotations

import ipaddress
from typing import NamedTuple, Self
from urllib.parse import SplitResult, quote, urlsplit

from services.gateway.images.input_image import NOT_FETCHED, InputImage, bad_image
from shared.config import IMAGE_HOST

PORTS = {"https": 443, "http": 80}
MAX_URL_CHARS = 8192
_CHECKED_QUOTES = "/%:@!$&'()*+,;=?-._~"  # what stays as it is in a path or a query


class Origin(NamedTuple):
    scheme: str
    host: str
    port: int


class Address(NamedTuple):
    """Where an image is. `target`: the path and the query."""

    origin: Origin
    target: str


def _origin_of(entry: str) -> Origin:
    """Returns what an operator's entry allows; it was checked with the configuration."""
    found = IMAGE_HOST.fullmatch(entry)
    assert found is not None, "checked with the configuration"
    scheme = found[1] or "https"
    return Origin(scheme, found[2], int(found[3] or PORTS[scheme]))


class AllowedHosts:
    def __init__(self, origins: frozenset[Origin]) -> None:
        self._origins = origins

    @classmethod
    def of(cls, entries: tuple[str, ...]) -> Self:
        return cls(frozenset(_origin_of(each) for each in entries))

    def address_of(self, image: InputImage) -> Address:
        """Raises InvalidRequest for an address that is not allowed, which names the image."""
        if not self._origins:
            raise bad_image(image.place, NOT_FETCHED)
        address = _address(image)
        if address.origin not in self._origins:
            scheme, host, port = address.origin
            shown = f"{scheme}://{host[:128]}" + ("" if port == PORTS[scheme] else f":{port}")
            raise bad_image(image.place, f"images are not fetched from {shown}")
        return address


def _address(image: InputImage) -> Address:
    """Raises InvalidRequest."""
    url = image.address
    if len(url) > MAX_URL_CHARS:
        raise bad_image(image.place, f"the address is longer than {MAX_URL_CHARS} characters")
    try:
        parts = urlsplit(url)
        scheme, host = parts.scheme.lower(), (parts.hostname or "").rstrip(".").lower()
        port = parts.port or PORTS.get(scheme, 0)
    except ValueError:
        raise bad_image(image.place, "the address cannot be read") from None
    if not host.isascii():
        host = _in_ascii(host)
    if scheme not in PORTS or not host or "@" in parts.netloc:
        raise bad_image(image.place, "the address cannot be read")
    return Address(Origin(scheme, host, port), _target(parts))


def _in_ascii(host: str) -> str:
    try:
        return host.encode("idna").decode("ascii")
    except UnicodeError:
        return ""


def _target(parts: SplitResult) -> str:
    path = quote(parts.path or "/", safe=_CHECKED_QUOTES)
    query = quote(parts.query, safe=_CHECKED_QUOTES)
    return f"{path}?{query}" if query else path


def is_public(address: str) -> bool:
    """Whether an IP address is one of the public internet: no private, loopback, link-local,
    multicast or reserved one, and none inside an IPv6 address that carries one of IPv4.
    """
    found = ipaddress.ip_address(address.partition("%")[0])
    if isinstance(found, ipaddress.IPv6Address):
        inner = _inner(found)
        if inner is not None:
            return is_public(str(inner))
    return found.is_global and not (
        found.is_multicast or found.is_reserved or found.is_loopback or found.is_link_local
    )


_NAT64 = (ipaddress.ip_network("64:ff9b::/96"), ipaddress.ip_network("64:ff9b:1::/48"))
_COMPATIBLE = ipaddress.ip_network("::/96")


def _inner(address: ipaddress.IPv6Address) -> ipaddress.IPv4Address | None:
    """Returns the IPv4 address in a mapped, translated, tunnelled or compatible one."""
    if address.ipv4_mapped is not None:
        return address.ipv4_mapped
    if address.sixtofour is not None:
        return address.sixtofour
    if address.teredo is not None:
        return address.teredo[1]
    if any(address in each for each in (*_NAT64, _COMPATIBLE)):
        return ipaddress.IPv4Address(int(address) & 0xFFFF_FFFF)
    return None
