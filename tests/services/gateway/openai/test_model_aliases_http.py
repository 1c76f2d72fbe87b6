"""Models under their aliases over OpenAI's API."""

from __future__ import annotations

from shared.clock import MonotonicClock
from shared.store import RedisStore
from shared.tenancy.model_alias_admin import ModelAliasAdmin
from shared.tenancy.tenant_admin import store_api_key
from tests.services.gateway.conftest import ANSWER, Cluster
from tests.services.gateway.openai.test_refusals import check_envelope

OWN, FOREIGN = "@cf/acme/own", "@cf/acme/foreign"


async def test_alias_of_the_tenant_names_the_model(cluster: Cluster) -> None:
    config = cluster.gateway._config
    store = RedisStore(config.redis_url, MonotonicClock(), timeout_s=2.0)
    admin = ModelAliasAdmin(store, lambda: 1.0)
    await store_api_key(store, "key-of-tenant-2", "tenant-2")
    await admin.put(OWN, config.served_name, "tenant-1")
    await admin.put(FOREIGN, config.served_name, "tenant-2")
    cluster.gateway.model_aliases._known.clear()
    body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 64}
    try:
        own = await cluster.http.post("/v1/chat/completions", json={**body, "model": OWN})
        foreign = await cluster.http.post("/v1/chat/completions", json={**body, "model": FOREIGN})
    finally:
        await admin.remove(OWN, "tenant-1")
        await admin.remove(FOREIGN, "tenant-2")
        await store.close()
    assert own.json()["model"] == OWN
    assert own.json()["choices"][0]["message"]["content"] == ANSWER
    check_envelope(foreign, 404, "model_not_found", "model")
