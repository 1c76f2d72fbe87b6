"""Links between simulated sites: leaf nodes in memory, with faults.

Which subject crosses, and what it is called on the other side, is read from the accounts that
`shared/transport/link_config.py` writes for a real nats-server; no second table can disagree.

    network of a ──leaving──▶ Link ──delay, cut, stall──▶ arriving ──▶ network of b

A link is a TCP connection: messages of one direction arrive in order, and what is under way when it
is cut is lost. A stalled direction holds its messages back, and its sender cannot know.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import combinations, count, product
from math import inf

from shared.regions.region_classes import NO_CLASSES, RegionClasses
from shared.transport.link_config import SiteLink, SiteLinks
from tests.support.world.bus import Parcel, SimulatedNetwork, matches

PROCESSES = "HEARTH"
_OF_LINK = "LINK_"
_EXPORT = re.compile(r'\{(\w+): "(\S+)", accounts: \[([^]]+)\]\}')
_IMPORT = re.compile(r'\{(\w+): \{account: (\S+), subject: "(\S+)"\}(?:, to: "(\S+)")?\}')
_MAY = re.compile(r"(publish|subscribe): \{allow: \[([^]]+)\]\}")


@dataclass(frozen=True)
class _Import:
    kind: str  # service: what is sent here goes there; stream: what is sent there comes here
    account: str
    subject: str  # there
    to: str  # here


class Accounts:
    """The accounts of one site's server: what they send to each other."""

    def __init__(self, links: SiteLinks) -> None:
        bodies = {PROCESSES: links.process_account_fields(), **dict(links.link_accounts(PROCESSES))}
        exports = {
            (name, kind, subject, to)
            for name, body in bodies.items()
            for kind, subject, accounts in _EXPORT.findall(body)
            for to in accounts.split(", ")
        }
        self._imports = {
            name: [
                _Import(kind, account, subject, to or subject)
                for kind, account, subject, to in _IMPORT.findall(body)
                if (account, kind, subject, name) in exports
            ]
            for name, body in bodies.items()
        }
        self._may = {
            name: {verb: re.findall(r'"(\S+)"', allowed) for verb, allowed in _MAY.findall(body)}
            for name, body in bodies.items()
        }
        self.leaving = lru_cache(4096)(self._leaving)
        self.arriving = lru_cache(4096)(self._arriving)

    def _leaving(self, subject: str) -> list[tuple[str, str]]:
        """Returns the peers that get what a process sends, and its subject on their link."""
        return [
            (account.removeprefix(_OF_LINK), each)
            for account, each in self._from(PROCESSES, subject)
            if account != PROCESSES and self._is_allowed(account, "subscribe", each)
        ]

    def _arriving(self, peer: str, subject: str) -> list[str]:
        """Returns the subjects under which processes get what comes from a peer."""
        if not self._is_allowed(_OF_LINK + peer, "publish", subject):
            return []
        sent = self._from(_OF_LINK + peer, subject)
        return [each for account, each in sent if account == PROCESSES]

    def _is_allowed(self, account: str, verb: str, subject: str) -> bool:
        """Whether the peer's user may; there is one at the server to which the peer connects."""
        if account not in self._may:
            return False
        allowed = self._may[account].get(verb)
        return allowed is None or any(matches(each, subject) for each in allowed)

    def _from(self, account: str, subject: str) -> Iterator[tuple[str, str]]:
        for name, imports in self._imports.items():
            for each in imports:
                mapped = None
                if each.kind == "service" and name == account:
                    mapped, to = _mapped(each.to, each.subject, subject), each.account
                elif each.kind == "stream" and each.account == account:
                    mapped, to = _mapped(each.subject, each.to, subject), name
                if mapped is not None:
                    yield to, mapped


def _mapped(pattern: str, target: str, subject: str) -> str | None:
    """Returns the subject that `target` makes of the wildcards of `pattern`, or None."""
    wanted, given, values = pattern.split("."), subject.split("."), dict[str, str]()
    if len(wanted) != len(given):
        return None
    numbers = count(1)
    for want, token in zip(wanted, given, strict=True):
        if want == "*" or want.startswith("$"):
            values[f"${next(numbers)}" if want == "*" else want] = token
        elif want != token:
            return None
    numbers = count(1)
    return ".".join(
        values[f"${next(numbers)}"] if each == "*" else values.get(each, each)
        for each in target.split(".")
    )


@dataclass(eq=False)
class Direction:
    """One direction of a link."""

    delay_s: float
    bytes_per_s: float = inf
    is_stalled: bool = False
    held: list[Callable[[], None]] = field(default_factory=list)
    last_arrival: float = 0.0
    free_at: float = 0.0  # when the last message has been sent


class Link:
    """The connection between two sites."""

    def __init__(self, first: str, second: str, delay_s: float, bytes_per_s: float) -> None:
        self.is_up = True
        self._num_cuts = 0
        pairs = (first, second), (second, first)
        self._directions = {pair: Direction(delay_s, bytes_per_s) for pair in pairs}

    def direction(self, sender: str, receiver: str) -> Direction:
        return self._directions[sender, receiver]

    def cut(self) -> None:
        """Ends the connection: what is under way is lost, and senders know at once."""
        self.is_up = False
        self._num_cuts += 1
        for each in self._directions.values():
            each.held.clear()

    def restore(self) -> None:
        self.is_up = True

    def stall(self, sender: str, receiver: str) -> None:
        self.direction(sender, receiver).is_stalled = True

    def resume(self, sender: str, receiver: str) -> None:
        """Delivers what the direction has held back."""
        direction = self.direction(sender, receiver)
        direction.is_stalled = False
        held, direction.held = direction.held, []
        for each in held:
            each()

    def carry(
        self, sender: str, receiver: str, num_bytes: int, deliver: Callable[[], None]
    ) -> None:
        direction = self.direction(sender, receiver)
        if direction.is_stalled:
            direction.held.append(lambda: self._send(direction, num_bytes, deliver))
        elif self.is_up:
            self._send(direction, num_bytes, deliver)

    def _send(self, direction: Direction, num_bytes: int, deliver: Callable[[], None]) -> None:
        loop, num_cuts = asyncio.get_running_loop(), self._num_cuts

        def arrive() -> None:
            if self._num_cuts == num_cuts:
                deliver()

        sent_at = max(loop.time(), direction.free_at) + num_bytes / direction.bytes_per_s
        direction.free_at = sent_at
        direction.last_arrival = max(sent_at + direction.delay_s, direction.last_arrival)
        loop.call_at(direction.last_arrival, arrive)


class LinkedNetworks:
    """Sites, each linked to each other or as `pairs` say."""

    def __init__(
        self,
        networks: dict[str, SimulatedNetwork],
        regions: dict[str, str],
        *,
        delay_s: float,
        bytes_per_s: float = inf,
        pairs: list[tuple[str, str]] | None = None,
        classes: RegionClasses = NO_CLASSES,
    ) -> None:
        self.networks = networks
        pairs = list(combinations(networks, 2)) if pairs is None else pairs
        self.links = {frozenset(pair): Link(*pair, delay_s, bytes_per_s) for pair in pairs}
        self.accounts = {
            name: Accounts(_links_of(name, pairs, regions, classes)) for name in networks
        }
        # (site, subject of arrival, data) of all that arrives, replies under ""
        self.taps: list[Callable[[str, str, bytes], None]] = []
        for name, network in networks.items():
            network.beyond = self._beyond(name)

    def link(self, first: str, second: str) -> Link:
        return self.links[frozenset((first, second))]

    def _beyond(self, site: str) -> Callable[[Parcel], int]:
        def send(parcel: Parcel) -> int:
            sent = self.accounts[site].leaving(parcel.wire_subject)
            return sum(self._cross(site, peer, subject, parcel) for peer, subject in sent)

        return send

    def _cross(self, site: str, peer: str, subject: str, parcel: Parcel) -> int:
        """Returns how many subscriptions there may be, as far as this site's server knows."""
        link, network = self.link(site, peer), self.networks[peer]
        arrivals = self.accounts[peer].arriving(site, subject)
        if not link.is_up or network.is_away or self.networks[site].is_away:
            return 0
        is_known = not (link.direction(peer, site).is_stalled or network.is_hanging)
        num_known = sum(network.num_receivers(each.rsplit(".", 2)[0]) for each in arrivals)

        def reply(responder: object, answer: bytes) -> None:
            def take() -> None:
                self._tap(site, "", answer)
                parcel.reply(responder, answer)  # type: ignore[arg-type]

            link.carry(peer, site, len(answer), take)

        def arrive() -> None:
            for each in arrivals:
                self._tap(peer, each, parcel.data)
                network.receive(each, Parcel(parcel.data, reply, each))

        link.carry(site, peer, len(parcel.data), arrive)
        return num_known if is_known else 1

    def _tap(self, site: str, subject: str, data: bytes) -> None:
        for each in self.taps:
            each(site, subject, data)


def _links_of(
    site: str, pairs: list[tuple[str, str]], regions: dict[str, str], classes: RegionClasses
) -> SiteLinks:
    """Returns the links of one site; of each pair the second connects to the first."""
    links = [
        SiteLink(peer=peer, region=regions.get(peer, ""), address="" if site == first else "h:1")
        for first, second in pairs
        for own, peer in product((site,), (first, second))
        if own in (first, second) and peer != own
    ]
    return SiteLinks(site=site, links=tuple(links), port=1, classes=classes)
