"""What one process sees of each link: whether states arrive, what it sent over it. No I/O.

    expected ──state──▶ connected ──no state for CUT_S──▶ cut ──state──▶ connected

A gateway of the other site sends a state each second. One that is refused is none, and leaves its
reason. While this process has no connection to its own server, or its loop hangs, it judges no
link.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from math import inf

import structlog

from shared.lifecycle.health import HEARTBEAT_INTERVAL_S, SILENCE_LIMIT_S, SITE_INTERVAL_S
from shared.messages import MAX_LINKS, LinkLoad
from shared.subjects import ANY, at_site
from shared.telemetry.log_text import printable
from shared.transport.site_bytes import SiteBytes

log = structlog.get_logger(__name__)

CUT_S = SILENCE_LIMIT_S * SITE_INTERVAL_S / HEARTBEAT_INTERVAL_S
MAX_PROBLEM = 200  # characters
FORGET_CUT_S = 86_400.0  # a site that was removed is not lost for ever


@dataclass(slots=True)
class _Link:
    heard_at: float  # the last state, or the start of this process
    changed_at: float
    region: str | None = None  # before the first state
    is_cut: bool = False
    problem: str = ""
    refused_at: float = -inf  # the last state that was
    counts: dict[str, int] = field(default_factory=dict)  # by field of LinkLoad
    bytes_to_all: int = 0  # part of what was sent to every site

    def problem_at(self, now: float) -> str:
        """Returns "" once no state is refused any more."""
        return self.problem if now - self.refused_at <= CUT_S else ""


class LinkLoads:
    """`expected` are the sites to which this one has links: a link that has never worked is cut."""

    def __init__(self, expected: Iterable[str], site_bytes: SiteBytes, now: float) -> None:
        self._links = {site: _Link(now, now) for site in expected}
        self._expected = frozenset(self._links)
        self._site_bytes = site_bytes
        self._sent_to_all = 0
        self._judged_from = now

    def region_of(self, site: str) -> str | None:
        """Returns None for a site that has never been heard, "" for one without a region."""
        link = self._links.get(site)
        return None if link is None else link.region

    def heard(self, site: str, region: str, now: float) -> None:
        """Counts a state."""
        link = self._links.get(site)
        if link is None:
            link = self._links[site] = _Link(now, now)
        if link.is_cut:
            log.warning("link_connected", site=site, after_s=round(now - link.changed_at, 1))
            link.is_cut, link.changed_at = False, now
        link.heard_at, link.region = now, region
        self.count(site, "num_states")

    def refused(self, site: str, problem: str, now: float) -> None:
        """Takes in why a state was refused."""
        link = self._links.setdefault(site, _Link(now, now))
        link.problem, link.refused_at = printable(problem)[:MAX_PROBLEM], now

    def count(self, site: str, name: str) -> None:
        """Adds 1 to a count of LinkLoad."""
        link = self._links.get(site)
        if link is not None:
            link.counts[name] = link.counts.get(name, 0) + 1

    def loads(
        self, now: float, round_trip_s: Callable[[str], float | None], *, can_judge: bool
    ) -> tuple[LinkLoad, ...]:
        """Returns the links, those that are cut first, at most MAX_LINKS."""
        self._count_sent_to_all()
        if not can_judge:
            self._judged_from = now
        for site, link in list(self._links.items()):
            self._judge(site, link, now)
        found = (self._load(site, each, now, round_trip_s) for site, each in self._links.items())
        return tuple(sorted(found, key=lambda each: (not each.is_cut, each.site))[:MAX_LINKS])

    def _judge(self, site: str, link: _Link, now: float) -> None:
        if link.is_cut and now - link.changed_at > FORGET_CUT_S and site not in self._expected:
            del self._links[site]
        elif not link.is_cut and now - max(link.heard_at, self._judged_from) > CUT_S:
            link.is_cut, link.changed_at = True, link.heard_at
            why = {"reason": problem} if (problem := link.problem_at(now)) else {}
            log.warning(
                "link_cut", site=site, region=link.region or "", since_s=round(CUT_S), **why
            )

    def _count_sent_to_all(self) -> None:
        """Adds the bytes that were sent to all sites to each link that is connected."""
        sent = self._site_bytes.sent[ANY]
        for link in self._links.values():
            if not link.is_cut:
                link.bytes_to_all += sent - self._sent_to_all
        self._sent_to_all = sent

    def _load(
        self, site: str, link: _Link, now: float, round_trip_s: Callable[[str], float | None]
    ) -> LinkLoad:
        return LinkLoad(
            site=site,
            region=link.region or "",
            is_cut=link.is_cut,
            changed_s=round(now - link.changed_at, 1),
            round_trip_s=None if link.is_cut else round_trip_s(at_site(site, "")),
            sent_bytes=self._site_bytes.sent[site] + link.bytes_to_all,
            received_bytes=self._site_bytes.received[site],
            problem=link.problem_at(now),
            **link.counts,
        )
