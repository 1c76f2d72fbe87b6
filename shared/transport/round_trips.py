"""Round-trip times to peers, estimated like those of TCP's retransmission timer (RFC 6298). No I/O.

A request waits for its base time, which covers the peer's work, plus the estimate: a mean and four
deviations. A peer may also be a queue group, named by its subject: then its members share one
estimate, and their differences are part of its deviation. The processes of another site share one,
too: that of the link.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

from shared.subjects import SITE_SEPARATOR, is_at_site, site_in

UNKNOWN_S = 0.5  # estimate for a peer without a measurement: more than any two cities are apart
MAX_WAIT_S = 2.0
MEAN_SHARE = 1 / 8  # weights of a new measurement, as in RFC 6298
DEVIATION_SHARE = 1 / 4
NUM_DEVIATIONS = 4
PROBE_INTERVAL_S = 5.0
# Of a site whose round trip is known: each process probes each site.
SITE_PROBE_INTERVAL_S = 30.0
IN_USE_S = 60.0  # time since the last request
MAX_PEERS = 8192  # peers with estimates; the least recently used one is dropped


@dataclass(slots=True)
class RoundTrip:
    """The mean and mean deviation of the round trips to one peer, in seconds; None if not
    measured.
    """

    mean_s: float | None = None
    deviation_s: float = 0.0

    @property
    def estimate_s(self) -> float:
        """An upper bound of nearly all round trips."""
        if self.mean_s is None:
            return UNKNOWN_S
        return self.mean_s + NUM_DEVIATIONS * self.deviation_s

    def add(self, measured_s: float) -> None:
        """Adds a measurement, unless it is the first and slower than any distance.

        The peer hung then, and the requests to its next process must not wait for as long.
        """
        measured_s = min(max(measured_s, 0.0), UNKNOWN_S)
        if self.mean_s is None and measured_s == UNKNOWN_S:
            return
        if self.mean_s is None:
            self.mean_s, self.deviation_s = measured_s, measured_s / 2
            return
        error_s = abs(measured_s - self.mean_s)
        self.deviation_s += DEVIATION_SHARE * (error_s - self.deviation_s)
        self.mean_s += MEAN_SHARE * (measured_s - self.mean_s)


@dataclass(slots=True)
class _Peer:
    round_trip: RoundTrip
    name: str  # of several that share the estimate, the one used last
    used_at: float = -inf
    updated_at: float = -inf  # measured or probed

    def is_due(self, now: float) -> bool:
        is_known_site = is_at_site(self.name) and self.round_trip.mean_s is not None
        interval_s = SITE_PROBE_INTERVAL_S if is_known_site else PROBE_INTERVAL_S
        return now - self.used_at < IN_USE_S and now - self.updated_at >= interval_s


class RoundTrips:
    def __init__(self) -> None:
        self._peers: dict[str, _Peer] = {}  # the least recently used one first

    def estimate_s(self, peer: str) -> float:
        known = self._peers.get(_key(peer))
        return UNKNOWN_S if known is None else known.round_trip.estimate_s

    def mean_s(self, peer: str) -> float:
        """Returns the mean round trip to `peer`, or UNKNOWN_S if it is not measured."""
        measured_s = self.measured_s(peer)
        return UNKNOWN_S if measured_s is None else measured_s

    def measured_s(self, peer: str) -> float | None:
        known = self._peers.get(_key(peer))
        return None if known is None else known.round_trip.mean_s

    def use(self, peer: str, now: float) -> None:
        """Keeps a peer in use, so that it is probed."""
        self._take(peer).used_at = now

    def wait_s(
        self,
        peer: str,
        base_s: float,
        now: float,
        *,
        unknown_s: float = UNKNOWN_S,
        is_use: bool = True,
    ) -> float:
        """Returns how long a request to `peer`, sent now, waits for its reply, in seconds.

        `unknown_s` is the estimate as long as the peer is not measured. A request with `is_use`
        needs the peer; one that only measures or checks it must not keep it in use.
        """
        known = self._take(peer)
        if is_use:
            known.used_at = now
        is_known = known.round_trip.mean_s is not None
        return min(base_s + (known.round_trip.estimate_s if is_known else unknown_s), MAX_WAIT_S)

    def record(self, peer: str, measured_s: float, now: float) -> None:
        known = self._take(peer)
        known.round_trip.add(measured_s)
        known.updated_at = now

    def due_for_probe(self, now: float) -> list[str]:
        """Returns peers in use without a measurement for their interval, and counts each as probed
        now.
        """
        due = [each for each in self._peers.values() if each.is_due(now)]
        for each in due:
            each.updated_at = now
        return [each.name for each in due]

    def _take(self, peer: str) -> _Peer:
        key = _key(peer)
        known = self._peers.pop(key, None) or _Peer(RoundTrip(), peer)
        known.name = peer
        if len(self._peers) >= MAX_PEERS:
            del self._peers[next(iter(self._peers))]
        self._peers[key] = known
        return known


def _key(peer: str) -> str:
    site = site_in(peer)
    return peer if site is None else site + SITE_SEPARATOR
