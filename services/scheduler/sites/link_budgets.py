"""The links over which other sites push KV to this one: rate, and until when each is busy.

All pushes of a site share its link, whatever their models and workers. The rate is learned from
what decode workers have received: the highest one counts, as a push that shares the link, or that
waits for its computation, sees less of it. A rate that is not measured for a while rises, so that a
link that was slow once is tried again. Rates are of KV before compression: what a codec saves makes
a link faster. No I/O.
"""

from __future__ import annotations

from services.scheduler.backlog import ModelKey
from services.scheduler.throughput import RunningRatio
from shared.messages import ModelCard, SitePushes, WorkerLoad

START_BYTES_PER_S = 125e6  # 1 Gbit/s
MIN_BYTES_PER_S, MAX_BYTES_PER_S = 1e3, 1e12
DOUBLED_S = 60.0  # time without a measurement in which the estimate doubles
# A try at a link that is as slow as before then takes eight times what was expected.
MAX_DOUBLINGS = 3.0
LOWER_SHARE = 0.25  # weight of a measurement below the estimate
MIN_MEASURED_BYTES = 64 << 10  # fewer bytes measure the round trip
RATIO_TOKENS = 1024.0


class LinkRate:
    """Bytes of KV per second over one link."""

    def __init__(self, now: float, bytes_per_s: float = START_BYTES_PER_S) -> None:
        self._bytes_per_s = bytes_per_s
        self._measured_at = now

    def estimate(self, now: float) -> float:
        num_doublings = min((now - self._measured_at) / DOUBLED_S, MAX_DOUBLINGS)
        return min(self._bytes_per_s * 2.0**num_doublings, MAX_BYTES_PER_S)

    def add(self, num_bytes: float, seconds: float, now: float) -> None:
        """Adds what was pushed in so many seconds. Ignores a few bytes."""
        if num_bytes < MIN_MEASURED_BYTES or seconds <= 0.0:
            return
        measured = min(max(num_bytes / seconds, MIN_BYTES_PER_S), MAX_BYTES_PER_S)
        share = 1.0 if measured >= self._bytes_per_s else LOWER_SHARE
        self._bytes_per_s += share * (measured - self._bytes_per_s)
        self._measured_at = now


class LinkBudgets:
    """The links of this site, by the name of the other one."""

    def __init__(self, start_bytes_per_s: float = START_BYTES_PER_S) -> None:
        self._start_bytes_per_s = start_bytes_per_s
        self._rates: dict[str, LinkRate] = {}
        self._free_at: dict[str, float] = {}
        self._token_bytes: dict[ModelKey, RunningRatio] = {}  # bytes pushed per token
        self._counted: dict[str, dict[str, SitePushes]] = {}  # by decode worker, then by site

    def bytes_per_s(self, site: str, now: float) -> float:
        return self._rate(site, now).estimate(now)

    def known_bytes_per_s(self, site: str, now: float) -> float | None:
        """Returns the rate of a link over which KV has been placed; None for others."""
        known = self._rates.get(site)
        return None if known is None else known.estimate(now)

    def push_token_s(self, site: str, model: ModelKey, card: ModelCard, now: float) -> float:
        """Returns the seconds that the KV of one token takes over the link."""
        return self._ratio(model, card).value / self.bytes_per_s(site, now)

    def free_at(self, site: str) -> float:
        """Returns when the link has sent what was assigned to it; a time that has passed if it is
        free.
        """
        return self._free_at.get(site, 0.0)

    def assign(self, site: str, seconds: float, now: float) -> None:
        """Adds the seconds of a push to the link; takes them back if they are negative."""
        self._free_at[site] = max(self.free_at(site), now) + seconds

    def observe(self, worker_id: str, load: WorkerLoad, card: ModelCard, now: float) -> None:
        """Learns from the counters of a decode worker of this site."""
        if not load.site_pushes and worker_id not in self._counted:
            return
        before = self._counted.get(worker_id, {})
        model = card.name, card.revision, card.block_size
        for each in load.site_pushes:
            self._add(before.get(each.site, SitePushes(each.site)), each, model, card, now)
        self._counted[worker_id] = {each.site: each for each in load.site_pushes}

    def forget(self, worker_id: str) -> None:
        self._counted.pop(worker_id, None)

    def _add(
        self, last: SitePushes, new: SitePushes, model: ModelKey, card: ModelCard, now: float
    ) -> None:
        num_tokens, num_bytes = new.num_tokens - last.num_tokens, new.num_bytes - last.num_bytes
        seconds = new.link_s - last.link_s
        if min(num_tokens, num_bytes, seconds) < 0:  # another process
            return
        self._rate(new.site, now).add(num_bytes, seconds, now)
        if num_tokens:
            self._ratio(model, card).add(num_bytes, num_tokens)

    def _rate(self, site: str, now: float) -> LinkRate:
        return self._rates.setdefault(site, LinkRate(now, self._start_bytes_per_s))

    def _ratio(self, model: ModelKey, card: ModelCard) -> RunningRatio:
        known = self._token_bytes.get(model)
        if known is None:
            known = RunningRatio(float(card.kv_bytes_per_token), RATIO_TOKENS)
            self._token_bytes[model] = known
        return known
