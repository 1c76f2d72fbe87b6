"""What the gateway counts, in Prometheus' words."""

from __future__ import annotations

from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

_TTFT_BUCKETS = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30)
_ITL_BUCKETS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5)


class GatewayMetrics:
    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._requests = Counter(
            "hearth_gateway_requests",
            "Requests by their one ending: stop, length, or an error code.",
            ["outcome"],
            registry=self.registry,
        )
        self._tokens = Counter(
            "hearth_gateway_tokens",
            "Tokens of finished requests: prompt, cached (part of prompt), output.",
            ["kind"],
            registry=self.registry,
        )
        self._resubmissions = Counter(
            "hearth_gateway_resubmissions",
            "Times a request was submitted again after its scheduler or worker was lost.",
            registry=self.registry,
        )
        self.observe_ttft = self._histogram("ttft", "Submit to first token.", _TTFT_BUCKETS)
        self.observe_itl = self._histogram("itl", "Between two token entries.", _ITL_BUCKETS)

    def watch_open_streams(self, count: Callable[[], int]) -> None:
        gauge = Gauge("hearth_gateway_open_streams", "Requests open now.", registry=self.registry)
        gauge.set_function(count)

    def count_request(self, outcome: str) -> None:
        self._requests.labels(outcome).inc()

    def count_tokens(self, *, prompt: int, cached: int, output: int) -> None:
        self._tokens.labels("prompt").inc(prompt)
        self._tokens.labels("cached").inc(cached)
        self._tokens.labels("output").inc(output)

    def count_resubmissions(self, number: int) -> None:
        self._resubmissions.inc(number)

    def render(self) -> bytes:
        return generate_latest(self.registry)

    def _histogram(
        self, name: str, text: str, buckets: tuple[float, ...]
    ) -> Callable[[float], None]:
        histogram = Histogram(
            f"hearth_gateway_{name}_seconds", text, buckets=buckets, registry=self.registry
        )
        return histogram.observe
