"""Any JSON through every route and every subject of a real cluster: no process ends, and no answer
is a 5xx.
"""

from __future__ import annotations

import asyncio
from collections import Counter, defaultdict
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import httpx
import nats
import pytest

from tests.services.gateway.any_json import (
    AnyRequest,
    http_requests,
    nats_requests,
    nats_status,
    statuses_of,
)
from tests.support.cluster.hearth_up import Cluster, run_cluster

COUNT, SEED = 1000, 7
CONCURRENCY = 8


def commands_below(pid: int) -> dict[int, str]:
    """Of all processes below this one, by their pids."""
    tasks = Path(f"/proc/{pid}/task").glob("*/children")
    children = {int(each) for path in tasks for each in path.read_text().split()}
    found = {each: Path(f"/proc/{each}/cmdline").read_text() for each in children}
    return found | {pid: each for child in children for pid, each in commands_below(child).items()}


@pytest.mark.long
def test_any_json_ends_no_process_and_fails_no_server(tmp_path: Path) -> None:
    with run_cluster(tmp_path) as cluster:
        check_cluster(cluster)


def check_cluster(cluster: Cluster) -> None:
    before = commands_below(cluster.process.pid)
    seen, failed = asyncio.run(send_all(cluster))
    print(statuses_of(seen), sum(each.total() for each in seen.values()))
    assert not failed, failed
    after = commands_below(cluster.process.pid)
    assert not [each for pid, each in before.items() if pid not in after]


async def send_all(
    cluster: Cluster,
) -> tuple[dict[str, Counter[int]], list[tuple[AnyRequest, int]]]:
    """The statuses of each place, and the requests that failed with their statuses."""
    seen: dict[str, Counter[int]] = defaultdict(Counter)
    failed: list[tuple[AnyRequest, int]] = []
    client = next(each for each in cluster.state.credentials if each.role == "client")
    connection = await nats.connect(
        client.nats_url(cluster.state.nats_host, cluster.state.nats_port),
        inbox_prefix=f"_INBOX.{client.process_id}".encode(),
    )
    headers = {**cluster.client.headers, "content-type": "application/json"}
    async with httpx.AsyncClient(base_url=cluster.url, headers=headers, timeout=120) as http:
        document = (await http.get("/openapi.json")).json()
        requests = all_requests(document, cluster.model)

        async def send() -> None:
            for each in requests:
                if each.method == "nats":
                    status = await nats_status(connection, client.process_id, each)
                else:
                    answer = await http.request(each.method, each.path, content=each.body)
                    status = answer.status_code
                seen[each.place][status] += 1
                if status >= 500:
                    failed.append((each, status))

        await asyncio.gather(*(send() for _ in range(CONCURRENCY)))
    await connection.close()
    return seen, failed


def all_requests(document: dict[str, Any], model: str) -> Iterator[AnyRequest]:
    routes = [(method, path) for path, methods in document["paths"].items() for method in methods]
    over_http = http_requests(
        document, routes, model=model, tenant="default", count=COUNT, seed=SEED
    )
    return chain(over_http, nats_requests(model, count=COUNT, seed=SEED))
