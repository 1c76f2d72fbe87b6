"""What a call without a key costs the event loop, and with it every tenant; how it counts."""

from __future__ import annotations

import re
import time
from typing import Any

from tests.services.gateway.conftest import Cluster

MAX_CALL_S = 0.001
NUM_CALLS, NUM_BATCHES = 10, 10
BODY = b'{"model":"m","input":"' + b"a" * 1000 + b'"}'
UNKNOWN = ("/none", "/page/none", "/v1/none", "/client/v4/accounts/a/ai/none")
STATUSES = {200, 204, 400, 401, 403, 404, 405, 413, 415}


def calls(app: Any) -> list[tuple[str, str]]:
    """A method and a path for each route of the application, and of unknown paths."""
    routes = {
        (method, re.sub(r"{[^}]*}", "a", route.path_format))
        for route in app.routes
        for method in route.methods
    }
    return sorted(routes | {(method, path) for method in ("GET", "POST") for path in UNKNOWN})


async def test_call_without_a_key_costs_at_most_a_millisecond(cluster: Cluster) -> None:
    """CPU time of this thread, so that other processes do not matter; the least of some batches,
    since the shared cluster works meanwhile.
    """
    app = cluster.gateway._web_server._server.config.app
    for method, path in calls(app):
        batches: list[float] = []
        while not batches or (min(batches) > MAX_CALL_S and len(batches) < NUM_BATCHES):
            began_s = time.thread_time()
            statuses = {await status_of(app, path, method) for _ in range(NUM_CALLS)}
            batches.append((time.thread_time() - began_s) / NUM_CALLS)
        assert statuses <= STATUSES, (method, path, statuses)
        assert min(batches) <= MAX_CALL_S, (method, path, batches)


async def status_of(app: Any, path: str, method: str = "GET") -> int:
    """The call of a client without a network; one that is no GET has a body of 1 KiB."""
    sent: list[dict[str, Any]] = []
    body = b"" if method == "GET" else BODY

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": body, "more_body": False}

    async def send(event: dict[str, Any]) -> None:
        sent.append(event)

    scope = {
        **{"type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": method},
        **{"path": path, "raw_path": path.encode(), "query_string": b"", "root_path": ""},
        "headers": [
            *[(b"host", b"127.0.0.1"), (b"content-type", b"application/json")],
            (b"content-length", str(len(body)).encode()),
        ],
        **{"state": {}, "scheme": "http"},
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
