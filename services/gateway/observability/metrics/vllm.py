"""The metrics under vLLM's names, so that boards and balancers made for vLLM work.

The label `engine` is a worker's id, or the gateway's for metrics of all workers together. Metrics
of features that Hearth lacks are left out, except that adapters are zero for boards that join them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import accumulate

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from services.gateway.observability.metrics.histograms import ModelHistograms, vllm_histograms
from services.gateway.observability.metrics.request_histograms import SPECS
from shared.messages import STEP_TOKENS, Heartbeat
from shared.metrics.families.member import Member
from shared.metrics.families.worker import VALUES, kv_usage

LABELS = ("model_name", "engine")
FINISHED = {"stop": "stop", "length": "length", "tool_calls": "stop", "client_gone": "abort"}
_OF = {each.name: each.of for each in VALUES}
GAUGES = (
    ("num_requests_running", "Sequences in the batch.", _OF["running_requests"]),
    ("num_requests_waiting", "Sequences that wait.", _OF["waiting_requests"]),
    ("kv_cache_usage_perc", "Share of the KV cache in use, 0 to 1.", kv_usage),
)
COUNTERS = (
    ("prefix_cache_queries", "Prompt tokens looked up.", _OF["prompt_tokens"]),
    ("prefix_cache_hits", "Those found in the cache.", _OF["cached_prompt_tokens"]),
    ("num_preemptions", "Sequences preempted.", _OF["preemptions"]),
    ("prompt_tokens", "Prompt tokens of admitted sequences.", _OF["prompt_tokens"]),
    ("generation_tokens", "Sampled tokens.", _OF["generated_tokens"]),
)


class VllmCollector(Collector):
    """Collects the metrics of live decode workers and of this gateway. `finished` returns the
    number of ended requests by model and outcome.
    """

    def __init__(
        self,
        members: Callable[[], Iterable[Member]],
        histograms: Mapping[str, ModelHistograms],
        finished: Callable[[], Mapping[tuple[str, str], float]],
        engine: Callable[[], str],
    ) -> None:
        self._members = members
        self._histograms = histograms
        self._finished = finished
        self._engine = engine

    def collect(self) -> Iterator[Metric]:
        beats = [each.heartbeat for each in self._members() if each.is_live]
        decode = [each for each in beats if each.load and each.model and "decode" in each.roles]
        yield from _of_workers(decode)
        yield _cache_config(decode)
        yield _lora_info(decode)
        yield _iteration_tokens(decode)
        yield self._success()
        yield from vllm_histograms(SPECS, self._histograms, self._engine())

    def _success(self) -> Metric:
        family = CounterMetricFamily(
            "vllm:request_success", "Ended requests.", labels=[*LABELS, "finished_reason"]
        )
        totals: dict[tuple[str, str], float] = {}
        for (model, outcome), count in self._finished().items():
            reason = FINISHED.get(outcome)
            if model and reason is not None:
                totals[model, reason] = totals.get((model, reason), 0) + count
        for (model, reason), count in totals.items():
            family.add_metric([model, self._engine(), reason], count)
        return family


def _of_workers(heartbeats: Iterable[Heartbeat]) -> Iterator[Metric]:
    for kind, rows in ((GaugeMetricFamily, GAUGES), (CounterMetricFamily, COUNTERS)):
        for name, text, value_of in rows:
            family = kind(f"vllm:{name}", text, labels=LABELS)
            for each in heartbeats:
                assert each.load is not None
                family.add_metric(_labels(each), value_of(each.load))
            yield family


def _cache_config(heartbeats: Iterable[Heartbeat]) -> Metric:
    family = GaugeMetricFamily(
        "vllm:cache_config_info",
        "1, with the size of the KV cache.",
        labels=[*LABELS, "block_size", "num_gpu_blocks"],
    )
    for each in heartbeats:
        assert each.model is not None and each.load is not None
        sizes = [str(each.model.block_size), str(each.load.num_total_blocks)]
        family.add_metric([*_labels(each), *sizes], 1)
    return family


def _lora_info(heartbeats: Iterable[Heartbeat]) -> Metric:
    family = GaugeMetricFamily(
        "vllm:lora_requests_info",
        "No adapters are served.",
        labels=[*LABELS, "max_lora", "running_lora_adapters", "waiting_lora_adapters"],
    )
    for each in heartbeats:
        family.add_metric([*_labels(each), "0", "", ""], 0)
    return family


def _iteration_tokens(heartbeats: Iterable[Heartbeat]) -> Metric:
    """Returns the histogram of the workers whose release counts tokens by step."""
    family = HistogramMetricFamily(
        "vllm:iteration_tokens_total",
        "Tokens of a step: prompt tokens computed, and tokens sampled.",
        labels=LABELS,
    )
    for each in heartbeats:
        assert each.load is not None
        counts = each.load.num_steps_by_tokens
        if len(counts) == len(STEP_TOKENS) + 1:
            names = [*(floatToGoString(bound) for bound in STEP_TOKENS), "+Inf"]
            buckets = list(zip(names, accumulate(counts), strict=True))
            num_tokens = each.load.num_computed_prompt_tokens + each.load.num_generated_tokens
            family.add_metric(_labels(each), buckets, num_tokens)
    return family


def _labels(heartbeat: Heartbeat) -> list[str]:
    assert heartbeat.model is not None
    return [heartbeat.model.name, heartbeat.process_id]
