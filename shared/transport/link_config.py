"""Links between sites: leaf nodes of nats-server, each bound to an account of its own.

    HEARTH ──site.b.…──▶ LINK_b ═══leaf node═══▶ LINK_a ──linked.a.…──▶ HEARTH
    site a                                                                site b

An account of a link imports and exports the subjects of that link alone: what leaves has the name
of the peer, and what arrives gets the name of the peer from this site's own server. Nothing goes
from one link's account to another's, so no site relays, and no site reaches a process of another by
any other subject. The peer's user has the permissions of its link besides, and may connect as a
leaf node only. Data of a region class crosses a link only if the class contains the peer's region.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec

from shared.nats_urls import authority
from shared.regions.region_classes import NO_CLASSES, RegionClasses
from shared.subjects import (
    ANY,
    LINKED_COMMANDS,
    NO_REGION,
    PREFIX,
    STATES_OF_SITES,
    carries_data,
    in_class,
)

DEFAULT_LEAF_PORT = 7422
RECONNECT_S = 1.0
REPLIES = "_R_.>"  # nats-server's subjects for replies to another account
_STATE = ("gateway", "state")


class SiteLink(msgspec.Struct, frozen=True, kw_only=True):
    """A link to the site `peer`, whose region this site's operator names.

    `key` is the public key with which the peer connects here. With `address` this site connects
    there, with `seed`: a seed, or a variable that nats-server reads from its environment.
    """

    peer: str
    region: str = ""
    key: str = ""
    address: str = ""
    seed: str = ""

    @property
    def account(self) -> str:
        return f"LINK_{self.peer}"


class SiteLinks(msgspec.Struct, frozen=True, kw_only=True):
    """The links of one site. `tls` is a directory with server.crt, server.key and ca.crt."""

    site: str
    links: tuple[SiteLink, ...]
    host: str = "127.0.0.1"
    port: int
    tls: str | None = None
    classes: RegionClasses = NO_CLASSES

    def process_account_fields(self) -> str:
        """Returns exports and imports of the account of the processes."""
        accounts = ", ".join(each.account for each in self.links)
        exports = [_stream(_leaving(ANY, *_STATE), accounts)]
        imports = []
        for link in self.links:
            for role, verb, name in self._commands(link):
                arriving = in_class(_arriving(link, role, verb), name)
                leaving = in_class(_leaving(link.peer, role, verb), name)
                exports.append(_service(arriving, link.account))
                imports.append(_import("service", link.account, leaving))
            state, seen_as = _leaving(self.site, *_STATE), _state_of(link)
            imports.append(_import("stream", link.account, state, seen_as))
        return _fields(exports, imports)

    def _commands(self, link: SiteLink) -> Iterator[tuple[str, str, str]]:
        """Yields role, verb and region class of what crosses a link; "" is no class."""
        for role, verb in LINKED_COMMANDS:
            is_data = carries_data(verb)
            for name in ("", *(self.classes.with_region(link.region) if is_data else ())):
                yield role, verb, name

    def link_accounts(self, processes: str) -> Iterator[tuple[str, str]]:
        """Yields name and body of the accounts of the links. `processes` is the account of the
        processes.
        """
        for link in self.links:
            yield link.account, self._users(link) + self._crossings(link, processes)

    def _crossings(self, link: SiteLink, processes: str) -> str:
        exports, imports = [_stream(_leaving(self.site, *_STATE), processes)], []
        for role, verb, name in self._commands(link):
            leaving = in_class(_leaving(link.peer, role, verb), name)
            arriving = in_class(_arriving(link, role, verb), name)
            sent_as = in_class(_leaving(self.site, role, verb), name)
            exports.append(_service(leaving, processes))
            imports.append(_import("service", processes, arriving, sent_as))
        state, sent_as = _leaving(ANY, *_STATE), _leaving(link.peer, *_STATE)
        imports.append(_import("stream", processes, state, sent_as))
        return _fields(exports, imports)

    def _users(self, link: SiteLink) -> str:
        """Returns the user of a peer that connects here; none for a link that this site opens."""
        if link.address:
            return ""
        names = ("", *self.classes.with_region(link.region))
        sends, receives = (
            ", ".join(f'"{each}"' for each in (*self._subjects(site, names), REPLIES))
            for site in (self.site, link.peer)
        )
        return (
            f'    users: [{{nkey: {link.key}, allowed_connection_types: ["LEAFNODE"], '
            f"permissions: {{publish: {{allow: [{sends}]}}, "
            f"subscribe: {{allow: [{receives}]}}}}}}]\n"
        )

    def _subjects(self, site: str, classes: Sequence[str]) -> tuple[str, ...]:
        return tuple(in_class(f"{PREFIX}.site.{site}.>", each) for each in classes)

    def leafnodes_block(self) -> str:
        remotes = "".join(self._remote(each) for each in self.links if each.address)
        return (
            f'leafnodes {{\n{self._listener()}  reconnect: "{RECONNECT_S:g}s"\n'
            f"  remotes: [\n{remotes}  ]\n}}\n"
        )

    def _listener(self) -> str:
        """Returns the options with which peers connect here. The address is not advertised: a peer
        may reach it by another one only.
        """
        if all(each.address for each in self.links):
            return ""
        tls = f"  tls {{{self._files()}, verify: true}}\n" if self.tls else ""
        return f'  listen: "{authority(self.host, self.port)}"\n  no_advertise: true\n{tls}'

    def _remote(self, link: SiteLink) -> str:
        scheme, tls = ("tls", f", tls: {{{self._files()}}}") if self.tls else ("nats-leaf", "")
        return (
            f'    {{url: "{scheme}://{link.address}", nkey: {link.seed}, '
            f"account: {link.account}{tls}}}\n"
        )

    def _files(self) -> str:
        return (
            f'cert_file: "{self.tls}/server.crt", key_file: "{self.tls}/server.key", '
            f'ca_file: "{self.tls}/ca.crt"'
        )


def _leaving(site: str, role: str, verb: str) -> str:
    return f"{PREFIX}.site.{site}.{role}.*.*.{verb}.*.*"


def _arriving(link: SiteLink, role: str, verb: str) -> str:
    return f"{PREFIX}.linked.{link.peer}.{role}.*.*.{verb}.*.*"


def _state_of(link: SiteLink) -> str:
    parts = STATES_OF_SITES.split(".")
    parts[3], parts[8] = link.peer, link.region or NO_REGION
    return ".".join((*parts, "*", "*"))


def _service(subject: str, account: str) -> str:
    return f'{{service: "{subject}", accounts: [{account}]}}'


def _stream(subject: str, accounts: str) -> str:
    return f'{{stream: "{subject}", accounts: [{accounts}]}}'


def _import(kind: str, account: str, subject: str, to: str = "") -> str:
    """Formats an import. The wildcards of `to` are those of `subject`, in order."""
    mapped = f', to: "{_numbered(to)}"' if to else ""
    return f'{{{kind}: {{account: {account}, subject: "{subject}"}}{mapped}}}'


def _numbered(subject: str) -> str:
    first, *others = subject.split("*")
    return first + "".join(f"${index}{part}" for index, part in enumerate(others, start=1))


def _fields(exports: Sequence[str], imports: Sequence[str]) -> str:
    both = (("exports", exports), ("imports", imports))
    return "".join(
        f"    {name}: [\n{''.join(f'      {each}{chr(10)}' for each in entries)}    ]\n"
        for name, entries in both
    )
