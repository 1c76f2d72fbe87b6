"""`/server_info`: for operators alone."""

from __future__ import annotations

import pytest

from tests.services.gateway.conftest import API_KEY, Cluster

GIVEN = ("", "Basic x", f"Bearer {API_KEY}", "Bearer of-the")


@pytest.mark.parametrize("token", ["metrics_token", "operator_token"])
async def test_token_opens_it(cluster: Cluster, token: str) -> None:
    async with cluster.beside(**{token: "of-the-operator"}) as beside:
        valid = {"authorization": "Bearer of-the-operator"}
        info = (await beside.http.get("/server_info", headers=valid)).json()
        assert (info["process_id"], info["models"]) == ("gateway-2", ["tiny"])
        assert info["version"] == (await beside.http.get("/version")).json()["version"]
        assert not [each for each in info.values() if each == "of-the-operator"]
        for given in GIVEN:
            response = await beside.http.get("/server_info", headers={"authorization": given})
            assert response.status_code == 401, given


async def test_closed_without_a_token(cluster: Cluster) -> None:
    for given in GIVEN:
        response = await cluster.http.get("/server_info", headers={"authorization": given})
        assert response.status_code == 401, given
