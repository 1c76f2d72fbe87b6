"""Access to the metrics, which are sums over all tenants."""

from __future__ import annotations

import pytest

from tests.services.gateway.conftest import API_KEY, Cluster


async def test_metrics_require_token(cluster: Cluster) -> None:
    async with cluster.beside(metrics_token="of-the-scraper") as beside:
        valid = {"authorization": "Bearer of-the-scraper"}
        response = await beside.http.get("/metrics", headers=valid)
        assert response.status_code == 200
        assert "hearth_tokens" in response.text
        for given in (f"Bearer {API_KEY}", "Bearer of-the", "", "Basic x"):
            response = await beside.http.get("/metrics", headers={"authorization": given})
            assert response.status_code == 401, given
            assert response.json()["error"]["code"] == "invalid_api_key"
            assert "hearth_tokens" not in response.text


@pytest.mark.parametrize("given", ["", "Bearer anything"])
async def test_metrics_are_open_without_configured_token(cluster: Cluster, given: str) -> None:
    response = await cluster.http.get("/metrics", headers={"authorization": given})
    assert response.status_code == 200
    for pool in ("requests", "prompts", "grammars"):
        assert f'hearth_preparation_processes_lost_total{{pool="{pool}"}} ' in response.text
