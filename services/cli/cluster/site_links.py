"""The links of a site from the options of a command: `PEER[@REGION]`, or `PEER[@REGION]=HOST:PORT`
for a link that this site opens.

The key of a link belongs to both sites: the one that accepts it creates `link-DIALLER@ACCEPTOR.nk`,
and its operator gives the file to the other one. There nats-server reads the seed from a variable
of its environment.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from services.local.credentials import check_name, check_region, created_key
from services.local.state_home import state_home
from shared.errors import ConfigError
from shared.subjects import ANY
from shared.transport.link_config import SiteLink, SiteLinks
from shared.transport.nkeys import UserKey

_HOST = re.compile(r"[A-Za-z0-9._-]+|\[[0-9A-Fa-f:.]+\]")


def site_links(
    site: str,
    arguments: Sequence[str],
    *,
    seeds: Path,
    host: str,
    port: int,
    tls: str | None = None,
) -> SiteLinks:
    """Returns the links, whose keys are in the directory `seeds`. Raises ConfigError."""
    check_site(site)
    peers = [each.partition("=")[0].partition("@")[0] for each in arguments]
    variables = [seed_variable(peer) for peer in peers]
    for peer in peers:
        check_site(peer)
        if peer == site:
            raise ConfigError(f"site {site!r} cannot have a link to itself")
        if peers.count(peer) > 1:
            raise ConfigError(f"two links to site {peer!r}; a site is linked once, from one side")
        if variables.count(seed_variable(peer)) > 1:
            raise ConfigError(f"{seed_variable(peer)} would be the key of several links: {peer!r}")
    links = tuple(_link(site, each, seeds) for each in arguments)
    return SiteLinks(site=site, links=links, host=host, port=port, tls=tls)


def local_links(site: str, arguments: Sequence[str], *, host: str, port: int) -> dict[str, Any]:
    """Returns the options of a local cluster with these links; none without any. The keys are in
    this user's folder, which all clusters of the user share. Raises ConfigError.
    """
    if bool(site) != bool(arguments):
        raise ConfigError("--site and --link belong together")
    if not site:
        return {}
    folder = state_home() / "hearth" / "links"
    links = site_links(site, arguments, seeds=folder, host=host, port=port)
    seeds = {
        seed_variable(each.peer): _seed_file(folder, site, each.peer).read_text().strip()
        for each in links.links
        if each.address
    }
    return {"links": links, "link_seeds": seeds}


def check_site(site: str) -> None:
    """Checks the name of a site. Raises ConfigError."""
    check_name(site, "site")
    if site == ANY:
        raise ConfigError(f"a site cannot have the name {ANY!r}")


def _link(site: str, argument: str, seeds: Path) -> SiteLink:
    named, has_address, address = argument.partition("=")
    peer, _, region = named.partition("@")
    check_region(region)
    if not has_address:
        key = created_key(_seed_file(seeds, peer, site))
        return SiteLink(peer=peer, region=region, key=key.public)
    host, _, port = address.rpartition(":")
    if not _HOST.fullmatch(host) or not port.isdecimal() or not 0 < int(port) < 65536:
        raise ConfigError(f"{argument!r} is not PEER[@REGION]=HOST:PORT")
    seed = _seed_file(seeds, site, peer)
    if not seed.exists():
        raise ConfigError(f"no {seed}: site {peer!r} creates this key, and sends it to this one")
    UserKey.of_file(seed)
    return SiteLink(peer=peer, region=region, address=address, seed=f"${seed_variable(peer)}")


def _seed_file(seeds: Path, dialler: str, acceptor: str) -> Path:
    return seeds / f"link-{dialler}@{acceptor}.nk"


def seed_variable(peer: str) -> str:
    """Returns the name of the variable with the seed of a link that this site opens."""
    return f"HEARTH_LINK_{peer.upper().replace('-', '_')}_SEED"
