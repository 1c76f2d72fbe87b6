"""Models under their aliases over OpenAI's API."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest_asyncio

from shared.clock import MonotonicClock
from shared.store import RedisStore
from shared.tenancy.model_alias_admin import ModelAliasAdmin
from shared.tenancy.tenant_admin import store_api_key
from tests.services.gateway.conftest import ANSWER, Cluster
from tests.services.gateway.dialects.openai.test_refusals import check_envelope
from tests.support.waiting import LIMIT_S

OWN, FOREIGN, ELSEWHERE = "@cf/acme/own", "@cf/acme/foreign", "@cf/acme/elsewhere"


@pytest_asyncio.fixture(loop_scope="session")
async def aliased(cluster: Cluster) -> AsyncIterator[Cluster]:
    """OWN is an alias of tenant 1, whose key the cluster's client has, and FOREIGN of tenant 2."""
    config = cluster.gateway._config
    store = RedisStore(config.redis_url, MonotonicClock(), timeout_s=LIMIT_S)
    admin = ModelAliasAdmin(store, lambda: 1.0)
    await store_api_key(store, "key-of-tenant-2", "tenant-2")
    await admin.put(OWN, config.served_name, "tenant-1")
    await admin.put(FOREIGN, config.served_name, "tenant-2")
    await admin.put(ELSEWHERE, "model-of-another-gateway", "tenant-1")
    cluster.gateway._models.aliases._known.clear()
    yield cluster
    await admin.remove(OWN, "tenant-1")
    await admin.remove(ELSEWHERE, "tenant-1")
    await admin.remove(FOREIGN, "tenant-2")
    await store.close()
    cluster.gateway._models.aliases._known.clear()


async def test_alias_of_the_tenant_names_the_model(aliased: Cluster) -> None:
    body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 64}
    own = await aliased.http.post("/v1/chat/completions", json={**body, "model": OWN})
    foreign = await aliased.http.post("/v1/chat/completions", json={**body, "model": FOREIGN})
    assert own.json()["model"] == OWN
    assert own.json()["choices"][0]["message"]["content"] == ANSWER
    check_envelope(foreign, 404, "model_not_found", "model")


async def test_models_have_an_entry_for_each_name(aliased: Cluster) -> None:
    native, own = (await aliased.http.get("/v1/models")).json()["data"]
    assert (native["id"], own["id"]) == ("tiny", OWN)
    assert own == {**native, "id": OWN}
    assert (await aliased.http.get(f"/v1/models/{OWN}")).json() == own
    for name in (FOREIGN, ELSEWHERE):
        response = await aliased.http.get(f"/v1/models/{name}")
        check_envelope(response, 404, "model_not_found", "model")
