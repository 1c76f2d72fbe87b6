"""Where KV may go that one site computes for another. Pure functions.

An address from another site is that site's claim: the networks that this site's operator names
limit where its workers connect, a path of a socket never leaves its host, and the KV is sealed.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from ipaddress import IPv4Network, IPv6Network, ip_address, ip_network

from msgspec import structs

from shared.errors import InvalidRequest
from shared.messages import KvTarget, KvTargets, LinkKey, RunPrefill

KV_FROM_SITES = "kv_from_sites/1"  # feature: takes KV that prefill workers of other sites push
MAX_TARGETS = 64

Network = IPv4Network | IPv6Network


def targets_for_sites(targets: KvTargets) -> KvTargets:
    """Returns the targets as prefill workers of other sites reach them: over TCP."""
    return tuple(_over_tcp(each) for each in targets)


def _over_tcp(target: KvTarget) -> KvTarget:
    return structs.replace(target, address=structs.replace(target.address, unix_path=""))


def kv_from_sites_problem(security: str, targets: KvTargets) -> str | None:
    """Returns why other sites cannot push KV to a decode worker; None if they can."""
    if security != "aead":
        return f"KV between sites is encrypted, and data_plane_security is {security}"
    names = [each.address.host for each in targets if not _is_address(each.address.host)]
    if names:
        return f"data_plane_advertised_host {names[0]!r} is no IP address, which links need"
    return None


def check_targets_of_site(request: RunPrefill) -> None:
    """Checks the targets that a gateway passes on. Raises InvalidRequest."""
    check_sealed(request.link_key)
    if not 1 <= len(request.targets) <= MAX_TARGETS:
        num = len(request.targets)
        raise InvalidRequest(f"{num} targets, expected 1 to {MAX_TARGETS}", param="targets")
    if any(each.address.unix_path for each in request.targets):
        raise InvalidRequest("a target of another site names a socket's path", param="targets")


def check_sealed(link_key: LinkKey | None) -> None:
    """Raises InvalidRequest unless KV is encrypted with the key."""
    security = "none" if link_key is None else link_key.security
    if security != "aead":
        reason = f"KV between sites is encrypted, and this link has the security {security}"
        raise InvalidRequest(reason, param="link_key")


def check_networks(targets: KvTargets, networks: Sequence[Network]) -> None:
    """Raises InvalidRequest unless all targets are addresses in the networks. A name could have
    another address when the worker connects.
    """
    for each in targets:
        host = each.address.host
        if not _is_address(host) or not _is_within(host, networks):
            raise InvalidRequest(f"{host} is in no network of --kv-networks", param="targets")


def networks_of(texts: Iterable[str]) -> tuple[Network, ...]:
    return tuple(map(ip_network, texts))


def _is_address(host: str) -> bool:
    try:
        ip_address(host)
    except ValueError:
        return False
    return True


def _is_within(host: str, networks: Sequence[Network]) -> bool:
    address = ip_address(host)
    return any(address in each for each in networks if each.version == address.version)
