"""The links of a site as people see them, from the heartbeats of its processes. No I/O.

A link is cut if one of the processes hears nothing of it. Counts and speeds are sums.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import msgspec

from shared.messages import Heartbeat, LinkLoad

WINDOW_S = 5.0
MAX_MODELS = 32  # that are named of a site


class LinkView(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One row of the table. `for_s` are the seconds since it was cut, or connected. Rates are bytes
    a second, of messages of this site's gateways and schedulers.
    """

    site: str
    region: str = ""
    is_cut: bool = False
    for_s: int = 0
    round_trip_s: float | None = None
    sent_per_s: float = 0.0
    received_per_s: float = 0.0
    kv_per_s: float = 0.0  # bytes of KV that its workers push to those here, before compression
    kv_limit_per_s: float | None = None  # what the link carries of it, as schedulers estimate
    num_placed: int = 0  # requests of this site that were placed there
    num_spilled: int = 0  # of these, those that found no room here
    num_moved: int = 0  # streams that left the site before their end
    num_served: int = 0  # its requests that were taken here
    num_refused_states: int = 0
    models: tuple[str, ...] = ()
    problem: str = ""  # why states of the site are refused

    @property
    def loss(self) -> str:
        """Returns a line on a link that is cut, or whose states are refused; empty for others."""
        cut = f"cut for {self.for_s} s" if self.is_cut else ""
        found = ": ".join(filter(None, (cut, self.problem)))
        return f"link to site {self.site}: {found}" if found else ""


class LinkViews:
    """What each process has reported within WINDOW_S."""

    def __init__(self) -> None:
        self._reports: dict[str, deque[tuple[float, Heartbeat]]] = {}

    def observe(self, heartbeat: Heartbeat, now: float) -> None:
        name, is_of_link = heartbeat.process_id, heartbeat.links or _kv_bytes(heartbeat)
        if heartbeat.state == "stopped" or not (is_of_link or name in self._reports):
            self._reports.pop(name, None)
            return
        reports = self._reports.setdefault(name, deque())
        if reports and reports[-1][1].epoch != heartbeat.epoch:
            reports.clear()
        reports.append((now, heartbeat))
        while now - reports[0][0] > WINDOW_S:
            reports.popleft()

    def views(
        self, is_live: Callable[[str], bool], models: Mapping[str, Sequence[str]]
    ) -> list[LinkView]:
        """Returns the links by name. `models` are those of each site."""
        self._reports = {name: each for name, each in self._reports.items() if is_live(name)}
        links: dict[str, list[LinkLoad]] = {}
        rates: dict[str, list[tuple[float, float]]] = {}
        kv: Counter[str] = Counter()
        for reports in self._reports.values():
            kv.update(_kv_rates(reports))
            for load, rate in _with_rates(reports):
                links.setdefault(load.site, []).append(load)
                rates.setdefault(load.site, []).append(rate)
        return [
            _view(links[site], rates[site], kv[site], models.get(site, ()))
            for site in sorted(links)
        ]


def _kv_bytes(heartbeat: Heartbeat) -> dict[str, int]:
    """Returns the bytes of KV that a decode worker has received, by site."""
    load = heartbeat.load
    return {} if load is None else {each.site: each.num_bytes for each in load.site_pushes}


def _kv_rates(reports: Sequence[tuple[float, Heartbeat]]) -> dict[str, int]:
    (first_at, first), (last_at, last) = reports[0], reports[-1]
    before, seconds = _kv_bytes(first), last_at - first_at
    if seconds <= 0:
        return {}
    return {
        site: round((num_bytes - before.get(site, 0)) / seconds)
        for site, num_bytes in _kv_bytes(last).items()
    }


def _with_rates(
    reports: Sequence[tuple[float, Heartbeat]],
) -> Iterator[tuple[LinkLoad, tuple[float, float]]]:
    """Yields the links of a process, with bytes sent and received a second."""
    (first_at, first), (last_at, last) = reports[0], reports[-1]
    before, seconds = {each.site: each for each in first.links}, last_at - first_at
    for load in last.links:
        then = before.get(load.site)
        if then is None or seconds <= 0:
            yield load, (0.0, 0.0)
            continue
        num_sent = load.sent_bytes - then.sent_bytes
        num_received = load.received_bytes - then.received_bytes
        yield load, (num_sent / seconds, num_received / seconds)


def _view(
    loads: Sequence[LinkLoad],
    rates: Sequence[tuple[float, float]],
    kv_per_s: float,
    models: Iterable[str],
) -> LinkView:
    is_cut = any(each.is_cut for each in loads)
    round_trips = [each.round_trip_s for each in loads if each.round_trip_s is not None]
    return LinkView(
        site=loads[0].site,
        region=next((each.region for each in loads if each.region), ""),
        is_cut=is_cut,
        for_s=int(max(each.changed_s for each in loads if each.is_cut == is_cut)),
        round_trip_s=min(round_trips, default=None),
        sent_per_s=round(sum(each[0] for each in rates)),
        received_per_s=round(sum(each[1] for each in rates)),
        kv_per_s=kv_per_s,
        kv_limit_per_s=max((each.kv_bytes_per_s or 0.0 for each in loads), default=0.0) or None,
        num_placed=sum(each.num_placed for each in loads),
        num_spilled=sum(each.num_spilled for each in loads),
        num_moved=sum(each.num_moved for each in loads),
        num_served=sum(each.num_served for each in loads),
        num_refused_states=sum(each.num_refused_states for each in loads),
        models=tuple(models)[:MAX_MODELS],
        problem=next((each.problem for each in loads if each.problem), ""),
    )
