"""The gateway's Prometheus metrics."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter as CountsByLabels
from collections.abc import Callable, Collection, Iterable, Iterator
from itertools import accumulate
from math import inf

from prometheus_client import CollectorRegistry, Counter, Gauge, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from services.gateway.role_metrics import role_demands
from shared.messages import GatewayLoad, Heartbeat, WorkerLoad

_TTFT_BUCKETS = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30)
_ITL_BUCKETS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5)


class _FleetCounts(Collector):
    def __init__(self, heartbeats: Callable[[], Iterable[Heartbeat]]) -> None:
        self._heartbeats = heartbeats

    def collect(self) -> Iterator[Metric]:
        heartbeats = tuple(self._heartbeats())
        yield from _counts(heartbeats)
        yield from _indices(heartbeats)
        yield from role_demands(heartbeats)


def _counts(heartbeats: Iterable[Heartbeat]) -> Iterator[Metric]:
    frames = CounterMetricFamily(
        "hearth_worker_kv_frames",
        "KV frames that a worker accepted or rejected, by outcome.",
        labels=["worker", "outcome"],
    )
    saved = CounterMetricFamily(
        "hearth_worker_kv_saved_bytes",
        "Bytes that a worker did not push because KV was sent compressed.",
        labels=["worker"],
    )
    failed = CounterMetricFamily(
        "hearth_worker_failed_steps",
        "Operations of a worker's device that raised: step or zeroing.",
        labels=["worker", "operation"],
    )
    grammars = CounterMetricFamily(
        "hearth_worker_grammars",
        "Of a decode worker's grammars: late masks, failed choices, and abandoned threads.",
        labels=["worker", "outcome"],
    )
    experts = GaugeMetricFamily(
        "hearth_worker_expert_imbalance",
        "Tokens of the busiest expert over the mean, in the worst layer, of the last minutes.",
        labels=["worker"],
    )
    mismatches = CounterMetricFamily(
        "hearth_impostor_messages",
        "Messages that a process rejected because the stated sender had not sent them.",
        labels=["process"],
    )
    for each in heartbeats:
        mismatches.add_metric([each.process_id], each.num_impostors)
        if each.load is not None and "decode" in each.roles:
            for outcome, count in _frames(each.load).items():
                frames.add_metric([each.process_id, outcome], count)
            for outcome, count in _grammars(each.load).items():
                grammars.add_metric([each.process_id, outcome], count)
        if each.load is not None and "prefill" in each.roles:
            saved.add_metric([each.process_id], each.load.saved_kv_bytes)
        if each.load is not None:
            failed.add_metric([each.process_id, "step"], each.load.num_failed_steps)
            failed.add_metric([each.process_id, "zeroing"], each.load.num_failed_zeroings)
            if each.load.expert_imbalance:
                experts.add_metric([each.process_id], each.load.expert_imbalance)
    yield from (frames, saved, failed, grammars, experts, mismatches)


def _indices(heartbeats: Iterable[Heartbeat]) -> Iterator[Metric]:
    """An index is exact if its state of every worker matches the events of that worker."""
    exact = GaugeMetricFamily("hearth_kv_index_exact", "1: exact; 0: degraded.", labels=["process"])
    blocks = GaugeMetricFamily("hearth_kv_index_blocks", "Known blocks.", labels=["process"])
    resyncs = CounterMetricFamily(
        "hearth_kv_index_resyncs", "Requests for a worker's full state.", labels=["process"]
    )
    for each in heartbeats:
        if each.index is not None:
            exact.add_metric([each.process_id], each.index.state == "exact")
            blocks.add_metric([each.process_id], each.index.num_blocks)
            resyncs.add_metric([each.process_id], each.index.num_resyncs)
    yield from (exact, blocks, resyncs)


def _frames(load: WorkerLoad) -> dict[str, int]:
    return {
        "taken": load.num_kv_frames,
        "corrupt": load.num_corrupt_kv_frames,
        "unknown": load.num_unknown_kv_frames,
        "refused": load.num_refused_kv_frames,
        "broken_off": load.num_bad_kv_peers,
    }


def _grammars(load: WorkerLoad) -> dict[str, int]:
    return {
        "late_mask": load.num_late_masks,
        "failed": load.num_failed_grammars,
        "abandoned_thread": load.num_abandoned_grammar_threads,
    }


class _ModelRequests(Collector):
    """Of a model that left the catalogue nothing remains: the number of names is bounded."""

    def __init__(self) -> None:
        self._counts: CountsByLabels[tuple[str, str]] = CountsByLabels()

    def inc(self, model: str, outcome: str) -> None:
        self._counts[model, outcome] += 1

    def retain(self, names: Collection[str]) -> None:
        kept = {key: count for key, count in self._counts.items() if key[0] in names}
        self._counts = CountsByLabels(kept)

    def collect(self) -> Iterator[Metric]:
        requests = CounterMetricFamily(
            "hearth_gateway_model_requests",
            "Ended requests that were submitted, by model and outcome.",
            labels=["model", "outcome"],
        )
        for labels, count in self._counts.items():
            requests.add_metric(labels, count)
        yield requests


class _Durations(Collector):
    """A histogram that each token updates: prometheus_client's histogram takes two locks per value,
    which a process with one counting thread does not need.
    """

    def __init__(self, name: str, text: str, bounds: tuple[float, ...]) -> None:
        self._name = name
        self._text = text
        self._bounds = (*bounds, inf)
        self._counts = [0] * len(self._bounds)
        self._sum_s = 0.0

    def observe(self, duration_s: float) -> None:
        self._counts[bisect_left(self._bounds, duration_s)] += 1
        self._sum_s += duration_s

    def collect(self) -> Iterator[HistogramMetricFamily]:
        bounds = map(floatToGoString, self._bounds)
        buckets = list(zip(bounds, accumulate(self._counts), strict=True))
        yield HistogramMetricFamily(self._name, self._text, buckets, self._sum_s)


class _DroppedSpans(Collector):
    def __init__(self, count: Callable[[], int]) -> None:
        self._count = count

    def collect(self) -> Iterator[Metric]:
        text = "Spans of traces that the collector did not take."
        yield CounterMetricFamily("hearth_spans_dropped", text, value=self._count())


class GatewayMetrics:
    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._num_unlike_prefills = 0
        self._num_numerics_changes = 0
        self._requests = Counter(
            "hearth_gateway_requests",
            "Ended requests by outcome: stop, length, or an error code.",
            ["outcome"],
            registry=self.registry,
        )
        self._model_requests = _ModelRequests()
        self.registry.register(self._model_requests)
        tokens = Counter(
            "hearth_gateway_tokens",
            "Tokens of finished requests: prompt, cached (part of prompt), output.",
            ["kind"],
            registry=self.registry,
        )
        self._prompt_tokens = tokens.labels("prompt")
        self._cached_tokens = tokens.labels("cached")
        self._output_tokens = tokens.labels("output")
        self._resubmissions = Counter(
            "hearth_gateway_resubmissions",
            "Times a request was resubmitted after its scheduler or worker was lost.",
            registry=self.registry,
        )
        self._slow_clients = Counter(
            "hearth_gateway_slow_clients",
            "Connections closed because the client did not read its response.",
            registry=self.registry,
        )
        self._dropped_messages = Counter(
            "hearth_gateway_dropped_messages",
            "Requests over NATS without a valid reply subject: nobody can be answered.",
            registry=self.registry,
        )
        self._numerics_changes = Counter(
            "hearth_gateway_numerics_changed",
            "Times an output was continued by a worker with other numerics than before.",
            registry=self.registry,
        )
        self._unlike_prefills = Counter(
            "hearth_gateway_unlike_prefills",
            "Prompts that decode computed because it may not use the KV of live prefill workers.",
            registry=self.registry,
        )
        self.observe_ttft = self._durations("ttft", "Submit to first token.", _TTFT_BUCKETS)
        self.observe_itl = self._durations("itl", "Between two token entries.", _ITL_BUCKETS)

    def watch_open_streams(self, count: Callable[[], int]) -> None:
        gauge = Gauge("hearth_gateway_open_streams", "Requests open now.", registry=self.registry)
        gauge.set_function(count)

    def watch_dropped_spans(self, count: Callable[[], int]) -> None:
        self.registry.register(_DroppedSpans(count))

    def watch_loaded_models(self, count: Callable[[], int]) -> None:
        text = "Models whose tokenizer and chat template are loaded."
        Gauge("hearth_gateway_loaded_models", text, registry=self.registry).set_function(count)

    def watch_fleet(self, heartbeats: Callable[[], Iterable[Heartbeat]]) -> None:
        """Exports the counts of other processes, which have no metrics endpoint."""
        self.registry.register(_FleetCounts(heartbeats))

    def count_request(self, outcome: str, model: str = "") -> None:
        """`model`: of a request that was submitted."""
        self._requests.labels(outcome).inc()
        if model:
            self._model_requests.inc(model, outcome)

    def retain_models(self, names: Collection[str]) -> None:
        """Forgets the counts of other models."""
        self._model_requests.retain(names)

    def count_tokens(self, *, prompt: int, cached: int, output: int) -> None:
        self._prompt_tokens.inc(prompt)
        self._cached_tokens.inc(cached)
        self._output_tokens.inc(output)

    def count_resubmission(self) -> None:
        self._resubmissions.inc()

    def count_slow_client(self) -> None:
        self._slow_clients.inc()

    def count_dropped_message(self) -> None:
        self._dropped_messages.inc()

    def count_numerics_change(self) -> None:
        self._num_numerics_changes += 1
        self._numerics_changes.inc()

    def count_unlike_prefill(self) -> None:
        self._num_unlike_prefills += 1
        self._unlike_prefills.inc()

    def load(self) -> GatewayLoad:
        """What the gateway's heartbeats report."""
        return GatewayLoad(
            num_unlike_prefills=self._num_unlike_prefills,
            num_numerics_changes=self._num_numerics_changes,
        )

    def render(self) -> bytes:
        return generate_latest(self.registry)

    def _durations(
        self, name: str, text: str, bounds: tuple[float, ...]
    ) -> Callable[[float], None]:
        durations = _Durations(f"hearth_gateway_{name}_seconds", text, bounds)
        self.registry.register(durations)
        return durations.observe
