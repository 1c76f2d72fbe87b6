"""Any JSON through every route and every subject: no process ends, and no answer is a 5xx.

The long run, with real workers, is `tests/fuzz/test_any_json_live.py`.
"""

from __future__ import annotations

import asyncio
from collections import Counter, defaultdict
from typing import Any

import pytest
import structlog.testing

from tests.services.gateway.any_json import (
    HARD,
    AnyRequest,
    http_requests,
    nats_requests,
    nats_status,
    statuses_of,
)
from tests.services.gateway.conftest import Cluster
from tests.services.gateway.nats_api.conftest import connected, has_joined
from tests.support.servers import NatsServer
from tests.support.waiting import until

SEED = 1
ENDLESS = "/v1/cluster/events"


@pytest.mark.parametrize(
    ("count", "num_hard"), [(2, 2), pytest.param(16, len(HARD), marks=pytest.mark.long)]
)
async def test_any_json_ends_no_process_and_fails_no_server(
    cluster: Cluster, nats_server: NatsServer, count: int, num_hard: int
) -> None:
    """`count`: of the requests for each route and subject; `num_hard`: for each of its fields."""
    document = (await cluster.http.get("/openapi.json")).json()
    found: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, each: found.append(each))
    pool = cluster.gateway._models.pools.requests
    num_lost = pool.num_lost
    seen: dict[str, Counter[int]] = defaultdict(Counter)
    failed: list[tuple[AnyRequest, int]] = []
    with structlog.testing.capture_logs() as logs:
        requests = http_requests(
            document,
            _routes(cluster),
            **{"model": "tiny", "tenant": "tenant-1", "count": count, "seed": SEED},
            num_hard=num_hard,
        )
        async with connected(nats_server, "client-1") as (_, raw):
            await until(lambda: has_joined(cluster.gateway))
            for each in (
                *requests,
                *nats_requests("tiny", count=count, seed=SEED, num_hard=num_hard),
            ):
                if each.method == "nats":
                    status = await nats_status(raw, "client-1", each)
                else:
                    headers = {"content-type": "application/json"}
                    response = await cluster.http.request(
                        each.method, each.path, content=each.body, headers=headers
                    )
                    status = response.status_code
                seen[each.place][status] += 1
                if status >= 500:
                    failed.append((each, status))
    print(statuses_of(seen))
    assert not failed, failed
    assert not found, found
    assert not [each for each in logs if each["log_level"] in ("error", "critical")]
    assert pool.num_lost == num_lost


def _routes(cluster: Cluster) -> list[tuple[str, str]]:
    """All of the application, with paths as the OpenAPI document has them."""
    app: Any = cluster.gateway._web_server._server.config.app
    return sorted(
        (method.lower(), route.path_format)
        for route in app.routes
        for method in route.methods
        if method.lower() in ("get", "post", "put", "delete") and route.path != ENDLESS
    )
