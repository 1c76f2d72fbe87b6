"""The gateway's Prometheus metrics."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from pathlib import Path

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from services.gateway.observability.metrics.copied_tenants import CopyCounts, copy_families
from services.gateway.observability.metrics.exposition import exposition
from services.gateway.observability.metrics.histograms import (
    Histogram,
    ModelHistograms,
    own_histograms,
)
from services.gateway.observability.metrics.label_counts import LabelCounts, TenantLabels
from services.gateway.observability.metrics.load_counts import MovedStreams, latency_counts
from services.gateway.observability.metrics.preparation import PoolLoad, preparation_families
from services.gateway.observability.metrics.redis import MemoryUse, redis_families
from services.gateway.observability.metrics.request_histograms import ITL, SPECS, TTFT, observe
from services.gateway.observability.metrics.stopped_workers import StoppedWorkers
from services.gateway.observability.metrics.vllm import VllmCollector
from services.gateway.streams.actions import (
    Report,
    ReportNumericsChange,
    ReportResubmission,
    ReportUnlikePrefill,
)
from shared.errors import InvalidRequest
from shared.messages import GatewayLoad, SiteRequests
from shared.metrics.families.fleet import FleetCollector
from shared.metrics.families.member import Member
from shared.metrics.machine import MachineCollector
from shared.subjects import site_in
from shared.telemetry.timeline import Timeline
from shared.tls import TlsFiles

NAMES = ("hearth", "vllm")
MAX_CODES = 64  # codes of rejections that heartbeats report
MAX_SITE_REQUESTS = 64  # triples of site, region and tenant that they report


class OwnCollector(Collector):
    """The metrics that this gateway counts itself."""

    def __init__(self) -> None:
        self.requests = LabelCounts(
            "hearth_requests",
            "Ended requests; outcome: stop, length, tool_calls, or an error code.",
            "model",
            "dialect",
            "outcome",
            "tenant",
        )
        self.tokens = LabelCounts(
            "hearth_tokens",
            "Tokens of ended requests: prompt, cached (part of prompt), output, "
            "reasoning (part of output).",
            "model",
            "kind",
            "tenant",
        )
        self.resubmissions = LabelCounts(
            "hearth_resubmissions",
            "Times a request was resubmitted, by cause, such as the loss of its worker.",
            "reason",
        )
        self.tool_calls = LabelCounts(
            "hearth_tool_calls", "Complete tool calls in ended requests.", "outcome"
        )
        self.slow_clients = LabelCounts(
            "hearth_slow_clients", "Connections closed because the client did not read."
        )
        self.dropped_messages = LabelCounts(
            "hearth_dropped_messages",
            "Requests over NATS without a valid reply subject: nobody can be answered.",
        )
        self.stored_responses = LabelCounts(
            "hearth_stored_responses",
            "Responses to keep for later requests; "
            "outcome: stored, evicted, too_large, forbidden, failed.",
            "outcome",
        )
        self.site_requests = LabelCounts(
            "hearth_site_requests",
            "Ended requests by the site and the region of their last worker, where it has any.",
            "site",
            "region",
            "tenant",
        )
        self.histograms: dict[str, ModelHistograms] = {}
        self.num_loaded_models: Callable[[], int] = lambda: 0
        self.num_dropped_spans: Callable[[], int] | None = None
        self.redis: Callable[[], MemoryUse | None] = lambda: None
        self.unfinished_deletion_s: Callable[[], float] = lambda: 0.0
        self.copied_tenants: Callable[[], CopyCounts | None] = lambda: None
        self.certificate_expires_at: Callable[[], float | None] = lambda: None
        self.preparation: Callable[[], Mapping[str, PoolLoad]] = dict
        for each in (self.slow_clients, self.dropped_messages):
            each.add(count=0)  # a series without labels exists from the start

    @property
    def counts(self) -> tuple[LabelCounts, ...]:
        return (
            *(self.requests, self.tokens, self.resubmissions, self.tool_calls),
            *(self.slow_clients, self.dropped_messages, self.stored_responses, self.site_requests),
        )

    def collect(self) -> Iterator[Metric]:
        for each in self.counts:
            yield from each.collect()
        yield GaugeMetricFamily(
            "hearth_loaded_models",
            "Models whose tokenizer and chat template are loaded.",
            self.num_loaded_models(),
        )
        yield from preparation_families(self.preparation())
        if self.num_dropped_spans is not None:
            yield CounterMetricFamily(
                "hearth_spans_dropped",
                "Spans of traces that no collector took.",
                self.num_dropped_spans(),
            )
        expires_at = self.certificate_expires_at()
        if expires_at is not None:
            yield GaugeMetricFamily(
                "hearth_certificate_expiry_timestamp_seconds",
                "End of the certificate that HTTPS serves, in seconds since 1970.",
                expires_at,
            )
        yield GaugeMetricFamily(
            "hearth_unfinished_deletion_seconds",
            "Age of the oldest order to drop a tenant's KV that has not finished; 0: none.",
            self.unfinished_deletion_s(),
        )
        yield from redis_families(self.redis())
        yield from copy_families(self.copied_tenants())
        yield from own_histograms(SPECS, self.histograms)

    def finished(self) -> Mapping[tuple[str, str], float]:
        """Returns the number of ended requests by model and outcome."""
        totals: Counter[tuple[str, str]] = Counter()
        for (model, _, outcome, _), count in self.requests.counts.copy().items():
            totals[model, outcome] += count
        return totals


class GatewayMetrics:
    """The metrics of one gateway. Only the event loop counts; any thread may render or collect
    `own`.
    """

    def __init__(self, gateway_id: str = "", site: str = "") -> None:
        """`site` is the name of this one for others; empty: it has no links."""
        self._site = site
        self.own = OwnCollector()
        self._gateway_id = gateway_id
        self._members: Callable[[], Iterable[Member]] = tuple
        self.stopped_workers = StoppedWorkers()
        self._num_open_streams: Callable[[], int] = lambda: 0
        self._region_of: Callable[[str], str] = lambda process_id: ""
        self._tenants = TenantLabels()
        self._load: Counter[str] = Counter()  # keys are fields of GatewayLoad
        self.rejections: Counter[str] = Counter()  # requests without any output, by error code
        self._moved = MovedStreams()
        self._registries = {"hearth": CollectorRegistry(), "vllm": CollectorRegistry()}
        self._registries["hearth"].register(self.own)
        self._registries["hearth"].register(
            FleetCollector(self._fleet, lambda: self.stopped_workers.failed)
        )
        self._registries["vllm"].register(
            VllmCollector(
                self._fleet, self.own.histograms, self.own.finished, lambda: self._gateway_id
            )
        )

    @property
    def registry(self) -> CollectorRegistry:
        return self._registries["hearth"]

    def watch_open_streams(self, count: Callable[[], int]) -> None:
        self._num_open_streams = count

    def watch_regions(self, region_of: Callable[[str], str]) -> None:
        """Counts requests by the region of a process; "": it has none."""
        self._region_of = region_of

    def watch_loaded_models(self, count: Callable[[], int]) -> None:
        self.own.num_loaded_models = count

    def watch_preparation(self, loads: Callable[[], Mapping[str, PoolLoad]]) -> None:
        """Exports the loads of the pools of preparation processes, by the pool's name."""
        self.own.preparation = loads

    def watch_redis(self, memory: Callable[[], MemoryUse | None]) -> None:
        """Exports Redis's memory as it was last read. `memory` returns None if it is unknown."""
        self.own.redis = memory

    def watch_deletions(self, unfinished_s: Callable[[], float]) -> None:
        """Exports the age of the oldest deletion that has not finished, in seconds; 0: none."""
        self.own.unfinished_deletion_s = unfinished_s

    def watch_copied_tenants(self, counts: Callable[[], CopyCounts]) -> None:
        """Exports the tenants of other sites, which a gateway with links has."""
        self.own.copied_tenants = counts

    def watch_machine(
        self,
        tls: TlsFiles,
        server_ends_at: Callable[[], float | None],
        folders: Iterable[Path] | None = None,
    ) -> None:
        """Exports what ends, or fills up, on this machine: see MachineCollector."""
        self.registry.register(MachineCollector(tls, folders, server_ends_at))

    def watch_certificate(self, expires_at: Callable[[], float | None]) -> None:
        """Exports the end of the certificate of HTTPS, in Unix seconds; None: there is none."""
        self.own.certificate_expires_at = expires_at

    def watch_dropped_spans(self, count: Callable[[], int]) -> None:
        """Exports the number of dropped spans. Gateways that do not trace requests have no such
        metric.
        """
        self.own.num_dropped_spans = count

    def watch_fleet(self, members: Callable[[], Iterable[Member]]) -> None:
        """Exports the contents of all heartbeats, including this gateway's: every gateway exports
        the same.
        """
        self._members = members

    def count_refused(
        self, outcome: str, *, dialect: str = "", tenant: str = "", is_failed: bool = False
    ) -> None:
        """Counts a request that was rejected before it was submitted. `is_failed` is true for an
        error of the cluster.
        """
        self._load["num_refused_requests"] += 1
        self._load["num_requests"] += 1
        self._load["num_failed_requests"] += is_failed
        self.rejections[outcome] += 1
        self.own.requests.add("", dialect, outcome, self._tenants.of(tenant))

    def count_ended(
        self,
        outcome: str,
        *,
        model: str,
        dialect: str,
        tenant: str,
        is_failed: bool = False,
        is_lost: bool = False,
        worker_id: str | None = None,
    ) -> None:
        """Counts an ended request. `is_failed` is true if it ended in an error of the cluster, and
        `is_lost` if that came after its first token. `worker_id` is its last worker.
        """
        self._load["num_requests"] += 1
        self._load["num_failed_requests"] += is_failed
        self._load["num_lost_streams"] += is_lost
        if is_failed and not is_lost:  # its client got an error instead of any output
            self.rejections[outcome] += 1
        self.own.requests.add(model, dialect, outcome, self._tenants.of(tenant))
        if worker_id is not None:
            site, region = site_in(worker_id) or self._site, self._region_of(worker_id)
            if site or region:
                self.own.site_requests.add(site, region, self._tenants.of(tenant))

    def count_tokens(self, *, model: str, tenant: str, **kinds: int) -> None:
        """Adds the tokens of a request by kind: prompt, cached, output, reasoning."""
        label = self._tenants.of(tenant)
        for kind, count in kinds.items():
            self.own.tokens.add(model, kind, label, count=count)

    def count_tool_calls(self, count: int) -> None:
        """Counts complete calls."""
        if count:
            self.own.tool_calls.add("complete", count=count)

    def retain_models(self, names: Collection[str]) -> None:
        """Removes the series of other models: the number of series is bounded."""
        self.own.requests.retain("model", names)
        self.own.tokens.retain("model", names)
        for gone in [each for each in self.own.histograms if each not in names]:
            del self.own.histograms[gone]

    def count_slow_client(self) -> None:
        self.own.slow_clients.add()

    def count_dropped_message(self) -> None:
        self.own.dropped_messages.add()

    def count_stored_response(self, outcome: str) -> None:
        self.own.stored_responses.add(outcome)

    def count_report(self, report: Report) -> None:
        match report:
            case ReportResubmission(cause=cause, worker_id=worker_id):
                self.count_resubmission(cause, worker_id)
            case ReportNumericsChange():
                self.count_numerics_change()
            case ReportUnlikePrefill():
                self.count_unlike_prefill()

    def count_resubmission(self, reason: str, worker_id: str | None = None) -> None:
        """Counts a resubmission of a request that `worker_id` had, or no worker."""
        self._load["num_resubmissions"] += 1
        if worker_id is not None:
            self._moved.count(worker_id)
        self.own.resubmissions.add(reason)

    def count_numerics_change(self) -> None:
        self._load["num_numerics_changes"] += 1

    def count_unlike_prefill(self) -> None:
        self._load["num_unlike_prefills"] += 1

    def ttft_of(self, model: str) -> Histogram:
        return self._histograms_of(model).by_name[TTFT]

    def itl_of(self, model: str) -> Histogram:
        return self._histograms_of(model).by_name[ITL]

    def observe_timeline(self, timeline: Timeline) -> None:
        """Adds the durations and sizes of an ended request to the histograms of its model."""
        if timeline.model:
            observe(self._histograms_of(timeline.model), timeline)

    def load(self) -> GatewayLoad:
        """Returns the counters that the gateway's heartbeats report."""
        return GatewayLoad(
            num_open_streams=self._num_open_streams(),
            rejections=tuple(self.rejections.most_common(MAX_CODES)),
            moved_streams=self._moved.counts,
            site_requests=self._site_requests(),
            ttft_counts=self._latencies(TTFT),
            itl_counts=self._latencies(ITL),
            **self._load,
        )

    def _site_requests(self) -> tuple[SiteRequests, ...]:
        counts = self.own.site_requests.counts.most_common(MAX_SITE_REQUESTS)
        return tuple(
            SiteRequests(site, tenant, count, region) for (site, region, tenant), count in counts
        )

    def _latencies(self, name: str) -> tuple[int, ...]:
        """Returns the values of all models by bucket of LATENCY_BOUNDS_S."""
        histograms = list(self.own.histograms.values())  # on a thread: a model may be added
        return latency_counts([each.by_name[name] for each in histograms])

    def render(self, names: str = "hearth") -> bytes:
        """Returns the metrics in Prometheus's text format under "hearth" names or, for the boards
        made for vLLM, under "vllm" names. Raises InvalidRequest for other names.
        """
        if names not in NAMES:
            raise InvalidRequest(f"names: {names[:64]!r} is not hearth or vllm", param="names")
        return exposition(self._registries[names].collect())

    def _fleet(self) -> Iterable[Member]:
        return self._members()

    def _histograms_of(self, model: str) -> ModelHistograms:
        found = self.own.histograms.get(model)
        if found is None:
            found = self.own.histograms[model] = ModelHistograms(SPECS)
        return found
