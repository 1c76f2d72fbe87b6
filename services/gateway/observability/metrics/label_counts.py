"""Counters by labels whose number of series is bounded."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator

from prometheus_client.core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector

MAX_TENANTS = 200
OTHER = "other"  # the label of all further tenants


class TenantLabels:
    """The label of each tenant: the first MAX_TENANTS have their own for the life of the
    process.
    """

    def __init__(self) -> None:
        self._known: set[str] = set()

    def of(self, tenant_id: str) -> str:
        """Returns the tenant's label. An empty id, of a request without a known tenant, stays
        empty.
        """
        if not tenant_id or tenant_id in self._known:
            return tenant_id
        if len(self._known) >= MAX_TENANTS:
            return OTHER
        self._known.add(tenant_id)
        return tenant_id


class LabelCounts(Collector):
    """A counter by labels. Only the event loop adds; any thread may collect."""

    def __init__(self, name: str, text: str, *labels: str) -> None:
        self._name = name
        self._text = text
        self._labels = labels
        self.counts: Counter[tuple[str, ...]] = Counter()

    def add(self, *values: str, count: float = 1) -> None:
        self.counts[values] += count  # type: ignore[assignment]

    def retain(self, label: str, values: Collection[str]) -> None:
        """Removes the series with other values of the label, except the empty value."""
        place = self._labels.index(label)
        kept = {key: n for key, n in self.counts.items() if not key[place] or key[place] in values}
        self.counts = Counter(kept)

    def collect(self) -> Iterator[Metric]:
        family = CounterMetricFamily(self._name, self._text, labels=self._labels)
        for values, count in self.counts.copy().items():
            family.add_metric(values, count)
        yield family
