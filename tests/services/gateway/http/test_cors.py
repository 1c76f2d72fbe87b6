"""Pages of other origins: by option alone, and never with credentials."""

from __future__ import annotations

from collections.abc import AsyncIterator

import httpx
import msgspec
import pytest
import pytest_asyncio

from shared.config import ConfigError, GatewayConfig, check
from tests.services.gateway.conftest import Cluster

OURS, FOREIGN = "https://app.example", "https://app.example.evil"
ALLOWED, CREDENTIALS = "access-control-allow-origin", "access-control-allow-credentials"
MODELS, RERANK = "/v1/models", "/v1/rerank"


def preflight(origin: str) -> dict[str, str]:
    return {
        "origin": origin,
        "access-control-request-method": "POST",
        "access-control-request-headers": "authorization,content-type",
    }


@pytest_asyncio.fixture(params=[(OURS, "http://localhost:3000"), ("*",)], loop_scope="session")
async def client(
    request: pytest.FixtureRequest,
    cluster: Cluster,
) -> AsyncIterator[tuple[httpx.AsyncClient, bool]]:
    """Of a second gateway, and whether it allows every origin."""
    changes = {"cors_origin": request.param, "metrics_token": "of-the-scraper"}
    async with cluster.beside(**changes) as beside:
        yield beside.http, request.param == ("*",)


async def test_allowed_origins(client: tuple[httpx.AsyncClient, bool]) -> None:
    http, allows_all = client
    for origin in (OURS, FOREIGN):
        is_allowed = allows_all or origin == OURS
        answer = await http.options(RERANK, headers=preflight(origin))
        assert answer.status_code == (204 if is_allowed else 400)
        assert (answer.headers.get(ALLOWED) in (origin, "*")) == is_allowed
        if is_allowed:
            headers = answer.headers["access-control-allow-headers"].lower()
            assert {"authorization", "content-type"} <= set(headers.split(", "))
        for cookie in ({}, {"cookie": "a=b"}):
            response = await http.get(MODELS, headers={"origin": origin, **cookie})
            assert (response.headers.get(ALLOWED) in (origin, "*")) == is_allowed
            assert CREDENTIALS not in response.headers
            exposed = response.headers["access-control-expose-headers"].split(", ")
            assert {"request-id", "x-request-id"} <= set(exposed)
        refused = await http.post(RERANK, json={}, headers={"origin": origin})
        assert refused.status_code in (400, 503)  # a page can read errors, too
        assert (ALLOWED in refused.headers) == is_allowed
        assert CREDENTIALS not in answer.headers and CREDENTIALS not in refused.headers


async def test_none_by_default(cluster: Cluster) -> None:
    response = await cluster.http.get(MODELS, headers={"origin": OURS})
    assert response.status_code == 200
    answer = await cluster.http.options(RERANK, headers=preflight(OURS))
    for each in (response, answer):
        assert not [name for name in each.headers if name.startswith("access-control")]


@pytest.mark.parametrize(
    "origin",
    ["https://app.example/", "app.example", "https://*.example", "HTTPS://a", "", "null", "*"],
)
def test_bad_option(gateway_config: GatewayConfig, origin: str) -> None:
    """`*` is one without a token for the metrics."""
    with pytest.raises(ConfigError, match="cors_origin"):
        check(msgspec.structs.replace(gateway_config, cors_origin=(origin,)))
