"""Searches of models over HTTP."""

from __future__ import annotations

from typing import Any

from tests.services.gateway.conftest import Cluster
from tests.services.gateway.dialects.workers_ai.test_run_http import ROOT


async def found(cluster: Cluster, path: str, **params: Any) -> Any:
    response = await cluster.http.get(f"{ROOT}{path}", params=params)
    assert response.status_code == 200, response.text
    assert response.headers["x-request-id"]
    body = response.json()
    assert body["success"] is True
    return body


async def test_searches(cluster: Cluster, alias: str) -> None:
    body = await found(cluster, "/models/search", hide_experimental="true")
    assert [row["name"] for row in body["result"]] == ["tiny", alias]
    assert body["result_info"] == {"count": 2, "page": 1, "per_page": 50, "total_count": 2}
    body = await found(cluster, "/models/search", page=2)  # as the SDK does, until it is empty
    assert body["result"] == []
    body = await found(cluster, "/tasks/search")
    assert [row["name"] for row in body["result"]] == ["Text Generation"]
    body = await found(cluster, "/authors/search")
    assert [row["name"] for row in body["result"]] == ["hearth", "meta"]
    for name in ("tiny", alias):
        result = (await found(cluster, "/models/schema", model=name))["result"]
        assert set(result) == {"input", "output"}
    without = await cluster.http.get("/accounts/tenant-1/ai/models/search")
    assert len(without.json()["result"]) == 2
    head = await cluster.http.head(f"{ROOT}/models/search")
    assert (head.status_code, head.content) == (200, b"")
