"""Access to the metrics, which are sums over all tenants."""

from __future__ import annotations

import msgspec
import pytest

from services.gateway.text.model_files import ModelFiles
from shared.config import GatewayConfig
from tests.services.gateway.conftest import API_KEY, running_cluster
from tests.support.servers import NatsServer


async def test_metrics_require_token(
    nats_server: NatsServer, gateway_config: GatewayConfig, model_files: ModelFiles
) -> None:
    config = msgspec.structs.replace(gateway_config, metrics_token="of-the-scraper")
    async with running_cluster(nats_server, config, model_files) as cluster:
        valid = {"authorization": "Bearer of-the-scraper"}
        response = await cluster.http.get("/metrics", headers=valid)
        assert response.status_code == 200
        assert "hearth_tokens" in response.text
        for given in (f"Bearer {API_KEY}", "Bearer of-the", "", "Basic x"):
            response = await cluster.http.get("/metrics", headers={"authorization": given})
            assert response.status_code == 401, given
            assert response.json()["error"]["code"] == "invalid_api_key"
            assert "hearth_tokens" not in response.text


@pytest.mark.parametrize("given", ["", "Bearer anything"])
async def test_metrics_are_open_without_configured_token(
    nats_server: NatsServer, gateway_config: GatewayConfig, model_files: ModelFiles, given: str
) -> None:
    async with running_cluster(nats_server, gateway_config, model_files) as cluster:
        response = await cluster.http.get("/metrics", headers={"authorization": given})
        assert response.status_code == 200
        for pool in ("requests", "prompts", "grammars"):
            assert f'hearth_preparation_processes_lost_total{{pool="{pool}"}} 0' in response.text
