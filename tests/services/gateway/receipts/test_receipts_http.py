"""Receipts of a gateway over HTTP and NATS: who gets which, and what they say."""

from __future__ import annotations

import asyncio
import json
from functools import partial
from typing import Any

import httpx
import msgspec
import pytest

from services.gateway.dialects.receipts.issued import NOT_FOUND, TenantReceipts
from shared.messages import Finish, KvPush, Served
from shared.packing import pack_token_ids
from shared.receipts.jws import JwkSet, jwk_of, parsed_jws
from shared.receipts.receipt import (
    AnswerReceipt,
    IssuedReceipt,
    decoded_bytes,
    payload_hash,
    receipt_of,
)
from shared.receipts.salted import ReceiptSalt
from shared.store import RedisStore
from shared.tenancy.tenant_admin import TenantAdmin
from shared.tenancy.tenant_copy import SITE_KEYS, SigningKey
from tests.services.gateway.conftest import Cluster, SharedCluster, http_client
from tests.services.gateway.observability.telemetry.test_resumed_timeline import killed_after
from tests.support.waiting import until

CHAT = "/v1/chat/completions"
BODY: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}], "seed": 5}
MESSAGES = {"model": "tiny", "max_tokens": 400, **BODY}
RUN = "/client/v4/accounts/tenant-1/ai/run/tiny"
RESPONSES = {"input": "hi", "store": False}


async def read(http: httpx.AsyncClient, request_id: str) -> tuple[AnswerReceipt, ReceiptSalt]:
    """Checks the signature with the published key."""
    response = await http.get(f"/v1/requests/{request_id}/receipt")
    assert response.status_code == 200, response.text
    assert response.headers["cache-control"] == "no-store"
    issued = msgspec.json.decode(response.content, type=IssuedReceipt)
    jws = parsed_jws(issued.receipt)
    keys = msgspec.json.decode((await http.get("/v1/receipts/keys")).content, type=JwkSet).keys
    assert jws.kid == keys[0].kid
    assert jws.is_signed_by(keys[0].public)
    assert issued.hash == payload_hash(jws.payload)
    salt = ReceiptSalt(decoded_bytes(issued.salt))
    found = receipt_of(jws.payload)
    assert found.salt == salt.commitment
    assert found.payload == jws.payload
    return found, salt


def comment_of(text: str) -> str:
    (line,) = [each for each in text.splitlines() if each.startswith(": receipt ")]
    return line.removeprefix(": receipt ")


@pytest.mark.parametrize(
    ("path", "body", "endpoint"),
    [
        (CHAT, BODY, "chat"),
        ("/v1/completions", {"prompt": "hi"}, "completions"),
        ("/v1/messages", MESSAGES, "messages"),
        ("/v1/responses", RESPONSES, "responses"),
        (RUN, BODY, "workers_ai"),
        ("/v1/embeddings", {"input": "hi"}, "embeddings"),
        ("/v1/rerank", {"query": "hi", "documents": ["a", "b"]}, "rerank"),
    ],
)
async def test_each_dialect_has_receipts(
    cluster: Cluster, path: str, body: dict[str, Any], endpoint: str
) -> None:
    response = await cluster.http.post(path, json=body)
    assert response.status_code == 200, response.text
    found, _ = await read(cluster.http, response.headers["x-request-id"])
    assert payload_hash(found.payload) == response.headers["x-hearth-receipt"]
    assert (found.endpoint, found.tenant, found.retention) == (endpoint, "tenant-1", "standard")
    assert found.gateway.id == "gateway-1"
    first = found.received_at if found.first_token_at is None else found.first_token_at
    assert found.received_at <= first <= found.finished_at
    assert all(each.tries[0].decode.id.startswith("decode-") for each in found.prompts)
    if endpoint in ("embeddings", "rerank"):
        return
    wanted = {"x-hearth-receipt": "on"}
    streamed = await cluster.http.post(path, json={**body, "stream": True}, headers=wanted)
    url = f"/v1/requests/{streamed.headers['x-request-id']}/receipt"
    assert streamed.headers["x-hearth-receipt-url"] == url
    again, _ = await read(cluster.http, streamed.headers["x-request-id"])
    assert comment_of(streamed.text) == payload_hash(again.payload)
    assert "x-hearth-receipt" not in streamed.headers
    assert streamed.text.index(": receipt ") > streamed.text.index("hello")


async def test_hashes_are_those_of_the_tokens(cluster: Cluster) -> None:
    prompt, answer = [5, 6, 7], cluster.answer
    body = {"prompt": prompt, "seed": -1, "temperature": 0.5, "max_tokens": 400}
    response = await cluster.http.post("/v1/completions", json=body)
    found, salt = await read(cluster.http, response.json()["id"])  # by the id of the response
    (one,) = found.prompts
    assert one.prompt == salt.prompt(0, pack_token_ids(prompt))
    assert one.num_prompt_tokens == 3
    assert one.sampling.seed == str(2**64 - 1)
    assert (one.sampling.temperature, one.sampling.max_tokens) == (0.5, 400)
    (choice,) = one.choices
    assert choice.num_tokens == len(answer)
    assert choice.tokens == salt.output(0, 0, pack_token_ids(answer))
    assert found.model.weights == cluster.decodes[0].card.revision
    assert "the quick" not in found.payload.decode()


async def test_answer_ends_with_its_stop_string(cluster: Cluster) -> None:
    """However many tokens the worker had sent by then."""
    body = {**BODY, "stop": " quick"}
    response = await cluster.http.post(CHAT, json=body)
    found, salt = await read(cluster.http, response.headers["x-request-id"])
    (choice,) = found.prompts[0].choices
    assert 0 < choice.num_tokens < len(cluster.answer)
    assert choice.num_tokens == response.json()["usage"]["completion_tokens"]
    kept = cluster.answer[: choice.num_tokens]
    assert choice.tokens == salt.output(0, 0, pack_token_ids(kept))
    plain = await read(cluster.http, (await cluster.http.post(CHAT, json=BODY)).json()["id"])
    assert plain[0].prompts[0].sampling.constraints != found.prompts[0].sampling.constraints


async def test_prompts_of_a_list_have_consecutive_seeds(cluster: Cluster) -> None:
    response = await cluster.http.post("/v1/completions", json={"prompt": ["a", "b"], "n": 2})
    found, _ = await read(cluster.http, response.headers["x-request-id"])
    seeds = [int(each.sampling.seed) for each in found.prompts]
    assert seeds[1] == (seeds[0] + 1) % 2**64
    assert [len(each.choices) for each in found.prompts] == [2, 2]


async def test_replay_has_the_hashes_of_the_receipt(cluster: Cluster) -> None:
    body = {key: value for key, value in BODY.items() if key != "seed"}
    first = await cluster.http.post(CHAT, json=body)
    found, salt = await read(cluster.http, first.headers["x-request-id"])
    seed = found.prompts[0].sampling.seed
    headers = {"x-hearth-replay": f"seed={seed}; salt={salt.text}"}
    again = await cluster.http.post(CHAT, json=body, headers=headers)
    replayed, same = await read(cluster.http, again.headers["x-request-id"])
    assert same.salt == salt.salt
    one, other = found.prompts[0], replayed.prompts[0]
    assert (one.prompt, one.choices, one.sampling) == (other.prompt, other.choices, other.sampling)


@pytest.mark.parametrize(
    "headers",
    [
        {"x-hearth-receipt": "maybe"},
        {"x-hearth-replay": "seed=1"},
        {"x-hearth-replay": f"seed={2**64}; salt={'A' * 22}"},
        {"x-hearth-replay": f"seed=1; salt={'A' * 21}B"},
    ],
)
async def test_wrong_options_are_rejected(cluster: Cluster, headers: dict[str, str]) -> None:
    response = await cluster.http.post(CHAT, json=BODY, headers=headers)
    assert response.status_code == 400
    assert response.json()["error"]["param"] in headers


async def test_recovered_answer_names_every_worker(cluster: Cluster) -> None:
    first = cluster.decodes[0]
    first.hold_at = 5
    running = asyncio.create_task(cluster.http.post(CHAT, json=BODY))
    await killed_after(first, 5)
    response = await running
    found, salt = await read(cluster.http, response.headers["x-request-id"])
    (one,) = found.prompts
    assert [each.decode.id for each in one.tries] == ["decode-1", "decode-2"]
    assert [each.outcome for each in one.tries] == ["worker_lost", "finished"]
    assert sum(each.num_tokens for each in one.tries) == len(cluster.answer)
    assert one.choices[0].tokens == salt.output(0, 0, pack_token_ids(cluster.answer))


async def test_only_the_tenant_reads_its_receipts(
    cluster: Cluster, shared_cluster: SharedCluster
) -> None:
    await TenantAdmin(shared_cluster.store, lambda: 0.0).add("other", {}, "key-of-other")
    response = await cluster.http.post(CHAT, json=BODY)
    path = f"/v1/requests/{response.headers['x-request-id']}/receipt"
    async with http_client(cluster.gateway, "key-of-other") as other:
        assert (await other.get(path)).status_code == 404
    async with http_client(cluster.gateway, "no-key") as nobody:
        assert (await nobody.get(path)).status_code == 401
    assert (await cluster.http.get(path)).status_code == 200
    off = await cluster.http.post(CHAT, json=BODY, headers={"x-hearth-receipt": "off"})
    assert "x-hearth-receipt" not in off.headers
    unknown = await cluster.http.get(f"/v1/requests/{off.headers['x-request-id']}/receipt")
    assert unknown.status_code == 404
    assert unknown.json()["error"]["message"] == NOT_FOUND


async def test_zero_retention_has_a_receipt_if_it_asks(
    cluster: Cluster, shared_cluster: SharedCluster
) -> None:
    admin = TenantAdmin(shared_cluster.store, lambda: 0.0)
    await admin.add("silent", {"is_zero_retention": True}, "key-of-silent")
    async with http_client(cluster.gateway, "key-of-silent") as http:
        silent = await http.post(CHAT, json=BODY)
        assert silent.status_code == 200
        assert "x-hearth-receipt" not in silent.headers
        asked = await http.post(CHAT, json=BODY, headers={"x-hearth-receipt": "on"})
        found, _ = await read(http, asked.headers["x-request-id"])
        assert found.retention == "zero"
        path = f"/v1/requests/{asked.headers['x-request-id']}/receipt"
        assert (await http.get(path)).status_code == 404, "it is read once"
    receipts = cluster.gateway.receipts
    assert receipts._zero.num_bytes == 0


async def test_rejected_requests_have_no_receipt(cluster: Cluster) -> None:
    response = await cluster.http.post(CHAT, json={**BODY, "max_tokens": -1})
    assert response.status_code == 400
    assert "x-hearth-receipt" not in response.headers
    request_id = response.headers["x-request-id"]
    assert (await cluster.http.get(f"/v1/requests/{request_id}/receipt")).status_code == 404


async def test_kv_hops_of_failed_prefills_are_named(cluster: Cluster) -> None:
    served = Served(
        num_cached_tokens=0,
        prefill_worker_id="prefill-2",
        num_pushed_tokens=48,
        partial_pushes=(KvPush("prefill-1", 16),),
    )
    for each in cluster.decodes:
        each.finish = Finish(reason="stop", served=served)
    response = await cluster.http.post(CHAT, json=BODY)
    found, _ = await read(cluster.http, response.headers["x-request-id"])
    (attempt,) = found.prompts[0].tries
    assert attempt.prefill is not None
    assert attempt.prefill.id == "prefill-2"
    hops = [(each.source.id, each.num_tokens) for each in attempt.kv_hops]
    assert hops == [("prefill-1", 16), ("prefill-2", 32)]


async def is_found(http: httpx.AsyncClient, name: str) -> bool:
    return (await http.get(f"/v1/requests/{name}/receipt")).status_code == 200


async def test_each_gateway_of_the_site_finds_a_receipt(cluster: Cluster) -> None:
    response = await cluster.http.post(CHAT, json=BODY)
    names = (response.headers["x-request-id"], response.json()["id"])
    async with cluster.beside() as beside:
        await until(partial(is_found, beside.http, names[0]))  # it has heard of the other one
        for name in names:
            found, _ = await read(beside.http, name)
            assert payload_hash(found.payload) == response.headers["x-hearth-receipt"]
            assert found.gateway.id == cluster.gateway._config.process_id
        assert (await beside.http.get("/v1/requests/unknown/receipt")).status_code == 404


async def test_keys_have_those_of_linked_sites(
    cluster: Cluster, shared_cluster: SharedCluster
) -> None:
    """Without an API key: a verifier may have none."""
    store: RedisStore = shared_cluster.store
    peer = SigningKey.of_secret("of b").public
    gateway = cluster.gateway
    receipts = TenantReceipts(gateway.receipts, gateway.site_receipts, store, gateway._clock)
    await store.write([("HSET", SITE_KEYS, "b", peer, "bad", b"short")])
    try:
        own, linked = (await receipts.keys()).keys
    finally:
        await store.write([("DEL", SITE_KEYS)])
    assert linked == jwk_of(peer, "b")
    async with httpx.AsyncClient(base_url=gateway.http_address) as nobody:
        response = await nobody.get("/v1/receipts/keys")
    assert response.headers["content-type"] == "application/json"  # as it is documented
    shown = json.loads(response.content)["keys"]
    assert shown[0]["kid"] == own.kid
    assert shown[0]["kty"] == "OKP"
