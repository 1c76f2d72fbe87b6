"""`/server_info`: for operators alone."""

from __future__ import annotations

import msgspec
import pytest

from services.gateway.text.model_files import ModelFiles
from shared.config import GatewayConfig
from tests.services.gateway.conftest import API_KEY, Cluster, running_cluster
from tests.support.servers import NatsServer

GIVEN = ("", "Basic x", f"Bearer {API_KEY}", "Bearer of-the")


@pytest.mark.parametrize("token", ["metrics_token", "operator_token"])
async def test_token_opens_it(
    nats_server: NatsServer, gateway_config: GatewayConfig, model_files: ModelFiles, token: str
) -> None:
    config = msgspec.structs.replace(gateway_config, **{token: "of-the-operator"})
    async with running_cluster(nats_server, config, model_files) as cluster:
        valid = {"authorization": "Bearer of-the-operator"}
        info = (await cluster.http.get("/server_info", headers=valid)).json()
        assert (info["process_id"], info["models"]) == ("gateway-1", ["tiny"])
        assert info["version"] == (await cluster.http.get("/version")).json()["version"]
        assert not [each for each in info.values() if each == "of-the-operator"]
        for given in GIVEN:
            response = await cluster.http.get("/server_info", headers={"authorization": given})
            assert response.status_code == 401, given


async def test_closed_without_a_token(cluster: Cluster) -> None:
    for given in GIVEN:
        response = await cluster.http.get("/server_info", headers={"authorization": given})
        assert response.status_code == 401, given
