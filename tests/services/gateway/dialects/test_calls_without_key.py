"""What a call without a key costs the event loop, and with it every tenant; how it counts."""

from __future__ import annotations

import time
from typing import Any

from tests.services.gateway.conftest import Cluster

MAX_CALL_S = 0.001
NUM_CALLS, NUM_BATCHES = 10, 10
PATHS = (
    *("/health", "/ready", "/version", "/metrics", "/openapi.json", "/docs", "/docs/openapi.json"),
    *("/", "/page/app.js"),
    *("/none", "/page/none", "/v1/none", "/client/v4/accounts/a/ai/none"),  # 404
    *("/v1/models", "/v1/cluster", "/tokenizer_info", "/v1/requests/r/timeline"),  # 401
)


async def test_call_without_a_key_costs_at_most_a_millisecond(cluster: Cluster) -> None:
    """CPU time of this thread, so that other processes do not matter; the least of some batches,
    since the shared cluster works meanwhile.
    """
    app = cluster.gateway._web_server._server.config.app
    for path in PATHS:
        batches = []
        for _ in range(NUM_BATCHES):
            began_s = time.thread_time()
            statuses = {await status_of(app, path) for _ in range(NUM_CALLS)}
            batches.append((time.thread_time() - began_s) / NUM_CALLS)
        assert statuses <= {200, 401, 404}, (path, statuses)
        assert min(batches) <= MAX_CALL_S, (path, batches)


async def status_of(app: Any, path: str) -> int:
    """The call of a client without a network."""
    sent: list[dict[str, Any]] = []

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(event: dict[str, Any]) -> None:
        sent.append(event)

    scope = {
        **{"type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": "GET"},
        **{"path": path, "raw_path": path.encode(), "query_string": b"", "root_path": ""},
        **{"headers": [(b"host", b"127.0.0.1")], "state": {}, "scheme": "http"},
        **{"client": ("127.0.0.1", 1), "server": ("127.0.0.1", 2)},
    }
    await app(scope, receive, send)
    return int(sent[0]["status"])


async def test_guesses_of_keys_count_whatever_their_method(cluster: Cluster) -> None:
    app, counts = cluster.gateway._web_server._server.config.app, cluster.gateway.metrics.rejections
    before = counts["invalid_api_key"]
    statuses = [await status_of(app, path) for path in ("/v1/models", "/v1/cluster", "/v1/none")]
    assert statuses == [401, 401, 404]
    assert counts["invalid_api_key"] - before == 1, "an operator's page may ask without its token"
