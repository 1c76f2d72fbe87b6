"""Gauges for an autoscaler: what waits, and how many workers each role of a model asks for."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from prometheus_client.core import GaugeMetricFamily, Metric

from shared.messages import Heartbeat
from shared.metrics.role_demands import total_demands

LABELS = ("model", "role")


def role_demands(heartbeats: Iterable[Heartbeat]) -> Iterator[Metric]:
    """Yields at most two series for each of MAX_MODELS models."""
    requests = _gauge("queued_requests", "Requests that wait in schedulers for this role.")
    tokens = _gauge("queued_tokens", "Prompt tokens of those requests.")
    work = _gauge("queued_work_seconds", "Seconds of one worker that those prompts take.")
    workers = _gauge("workers", "Live workers that have this role.")
    wanted = _gauge("wanted_workers", "Workers that the measured work of this role asks for.")
    for each in total_demands(heartbeats):
        labels = [each.model, each.role]
        requests.add_metric(labels, each.num_queued_requests)
        tokens.add_metric(labels, each.num_queued_tokens)
        work.add_metric(labels, each.work_s)
        workers.add_metric(labels, each.num_workers)
        wanted.add_metric(labels, each.num_wanted_workers)
    yield from (requests, tokens, work, workers, wanted)


def _gauge(name: str, text: str) -> GaugeMetricFamily:
    return GaugeMetricFamily(f"hearth_{name}", text, labels=LABELS)
