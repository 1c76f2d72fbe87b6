"""`/v1/prefixes`: pinned system prompts, public prefixes, dry runs; session affinity."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Iterator, Sequence
from typing import Any

import httpx
import msgspec
import pytest
import pytest_asyncio

from services.gateway.dialects.prefixes import public_prefix_watcher
from services.gateway.dialects.prefixes.errors import PrefixTooLarge, PrefixTooShort
from services.gateway.dialects.prefixes.prefix_tokenizer import PrefixTokenizer, Tokens
from services.gateway.request.generation_request import scoped_affinity_key
from services.gateway.request.prompt import ChatPrompt
from services.gateway.text.model_files import ModelFiles
from services.gateway.text.process_jobs import Encoded
from shared.block_hash import PUBLIC_TENANT_ID, extend_chain, public_root, root_hash, root_key
from shared.clock import MonotonicClock
from shared.errors import PromptTooLong
from shared.messages import MatchPrefix, PrefixMatch, PrefixMatches, Request
from shared.packing import unpack_hashes, unpack_token_ids
from shared.store import RedisStore
from shared.subjects import KV_INDEX_GROUP, MATCH
from shared.tenancy import audit
from shared.tenancy.model_alias_admin import ModelAliasAdmin
from shared.tenancy.prefixes import pinned_prefix
from shared.tenancy.prefixes.pinned_prefix import MAX_PER_TENANT, PinnedPrefix
from shared.tenancy.tenant import TENANTS
from shared.tenancy.tenant_admin import TenantAdmin, store_api_key
from shared.transport.bus import NatsBus
from tests.services.gateway.conftest import API_KEY, SECRET, Cluster
from tests.services.gateway.dialects.openai.test_refusals import check_envelope
from tests.services.gateway.peer import CARD
from tests.support.servers import NatsServer
from tests.support.waiting import LIMIT_S, until

SYSTEM = "You answer the questions of the quick brown fox, who is lazy today. " * 3
PREFIXES = "/v1/prefixes"
CHAT = "/v1/chat/completions"
ROOT_KEY = root_key(SECRET)


@pytest.fixture(scope="module", autouse=True)
def frequent_polls() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(public_prefix_watcher, "POLL_INTERVAL_S", 0.02)
        yield


@pytest_asyncio.fixture(loop_scope="session")
async def store(cluster: Cluster) -> AsyncIterator[RedisStore]:
    """Redis without prefixes, before and after the test."""
    store = RedisStore(cluster.gateway._config.redis_url, MonotonicClock(), timeout_s=LIMIT_S)
    await _delete_all(cluster, store)
    yield store
    await _delete_all(cluster, store)
    await store.close()


async def _delete_all(cluster: Cluster, store: RedisStore) -> None:
    for tenant_id in ("tenant-1", "tenant-2", PUBLIC_TENANT_ID):
        for name in await pinned_prefix.entries(store, tenant_id):
            await pinned_prefix.delete(store, tenant_id, name)
    await until(lambda: not cluster.gateway.preparer.public._prefixes)


async def add_tenant(store: RedisStore, **limits: object) -> dict[str, str]:
    """Adds tenant-2 with these limits; returns the headers of its requests."""
    await store.write([("HDEL", TENANTS, "tenant-2")])
    admin, api_key = TenantAdmin(store, lambda: 1_000.0), f"key-{sorted(limits)}"
    await admin.add("tenant-2", limits, api_key)
    return {"authorization": f"Bearer {api_key}"}


@contextlib.asynccontextmanager
async def running_index(
    nats_server: NatsServer, *cached_hashes: bytes
) -> AsyncIterator[list[MatchPrefix]]:
    """Reports these blocks as cached on decode-1; yields the list of received queries."""
    received: list[MatchPrefix] = []

    def match(question: MatchPrefix) -> PrefixMatches:
        received.append(question)
        hashes = unpack_hashes(question.block_hashes)
        count = next((n for n, each in enumerate(hashes) if each not in cached_hashes), len(hashes))
        found = (PrefixMatch(worker_id="decode-1", num_blocks=count),) if count else ()
        return PrefixMatches(state="exact", matches=found)

    bus = await NatsBus.connect(nats_server.url("kv_index-1"), process_id="kv_index-1")
    try:
        await bus.serve(MATCH, MatchPrefix, match, queue=KV_INDEX_GROUP)
        await bus.flush()
        yield received
    finally:
        await bus.close()


def chat_body(question: str = "hello?", system: str = SYSTEM) -> dict[str, object]:
    messages = [{"role": "system", "content": system}, {"role": "user", "content": question}]
    return {"messages": messages, "max_tokens": 4}


async def received(cluster: Cluster, **fields: object) -> Request:
    """Sends one chat request; returns the request that the scheduler received."""
    response = await cluster.http.post(CHAT, json=chat_body() | fields)
    assert response.status_code == 200, response.text
    return cluster.scheduler.submitted[-1].request


# ── prefixes of a tenant ─────────────────────────────────────────────────────────────────────────


async def test_prefix_tokens_start_every_prompt_with_its_system(
    cluster: Cluster, store: RedisStore
) -> None:
    response = await cluster.http.put(f"{PREFIXES}/house", json={"system": SYSTEM})
    assert response.status_code == 200, response.text
    info = response.json()
    saved = await pinned_prefix.load(store, "tenant-1", "house")
    assert saved is not None
    token_ids = unpack_token_ids(saved.token_ids)
    for question in ("hello?", "A", "0 is a number", "\n"):
        request = await received(cluster, **chat_body(question))
        prompt = unpack_token_ids(request.prompt_token_ids)
        assert prompt[: len(token_ids)] == token_ids
    assert info["num_tokens"] == len(token_ids) > 3 * CARD.block_size
    assert info["pinned_tokens"] == len(token_ids) // 16 * 16
    hashes = extend_chain(root_hash("tenant-1", "r1", key=ROOT_KEY), token_ids, 16)
    assert unpack_hashes(request.block_hashes)[: len(hashes)] == hashes
    assert (info["name"], info["model"], info["is_public"]) == ("house", "tiny", False)


async def test_model_of_a_prefix_is_known_by_its_alias(cluster: Cluster, store: RedisStore) -> None:
    """Then the prefix is refused for its length."""
    aliases = ModelAliasAdmin(store, lambda: 1.0)
    await aliases.put("of-the-house", "tiny")
    cluster.gateway._models.aliases._known.clear()
    given = {"system": SYSTEM * 40, "model": "of-the-house"}
    response = await cluster.http.put(f"{PREFIXES}/house", json=given)
    await aliases.remove("of-the-house")
    check_envelope(response, 400, "context_length_exceeded", "messages")


async def test_prefix_is_listed_read_replaced_and_deleted(
    cluster: Cluster, store: RedisStore
) -> None:
    for name in ("b", "a"):
        await cluster.http.put(f"{PREFIXES}/{name}", json={"system": SYSTEM})
    messages = [{"role": "user", "content": SYSTEM}, {"role": "assistant", "content": "Yes."}]
    body = {"system": "Be kind.", "messages": messages, "ttl_s": 60}
    replaced = (await cluster.http.put(f"{PREFIXES}/a", json=body)).json()
    listed = (await cluster.http.get(PREFIXES)).json()
    first = listed["data"][0]
    assert (first["name"], first["num_tokens"]) == ("a", replaced["num_tokens"])
    assert [each["name"] for each in listed["data"]] == ["a", "b"]
    read = (await cluster.http.get(f"{PREFIXES}/a")).json()
    assert [each["role"] for each in read["messages"]] == ["system", "user", "assistant"]
    assert read["expires_at"] == read["created_at"] + 60
    deleted = await cluster.http.delete(f"{PREFIXES}/a")
    assert deleted.json() == {"object": "prefix.deleted", "name": "a", "deleted": True}
    for method in ("GET", "DELETE"):
        response = await cluster.http.request(method, f"{PREFIXES}/a")
        check_envelope(response, 404, "prefix_not_found", "name")


async def test_prefixes_are_tokenized_within_the_slots_of_their_tenant(
    cluster: Cluster, store: RedisStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Requests of other tenants are tokenized in the same process."""
    assert cluster.gateway._models.own is not None
    renderer = cluster.gateway._models.own.renderer
    encode, num_running, counts = renderer.encode, 0, list[int]()

    async def counted(*args: Any, **options: Any) -> Encoded:
        nonlocal num_running
        num_running += 1
        counts.append(num_running)
        await asyncio.sleep(0.02)
        num_running -= 1
        return await encode(*args, **options)

    monkeypatch.setattr(renderer, "encode", counted)
    puts = [cluster.http.put(f"{PREFIXES}/p{n}", json={"system": SYSTEM}) for n in range(5)]
    assert {each.status_code for each in await asyncio.gather(*puts)} == {200}
    assert max(counts) <= cluster.gateway._config.preparations_per_tenant < 5


async def test_other_tenant_cannot_read_or_delete_a_prefix(
    cluster: Cluster, store: RedisStore
) -> None:
    await cluster.http.put(f"{PREFIXES}/house", json={"system": SYSTEM})
    await store_api_key(store, "key-of-tenant-2", "tenant-2")
    other_tenant = {"authorization": "Bearer key-of-tenant-2"}
    assert (await cluster.http.get(PREFIXES, headers=other_tenant)).json()["data"] == []
    for method in ("GET", "DELETE"):
        response = await cluster.http.request(method, f"{PREFIXES}/house", headers=other_tenant)
        check_envelope(response, 404, "prefix_not_found", "name")
    assert (await cluster.http.get(f"{PREFIXES}/house")).status_code == 200


async def test_prefix_reports_workers_and_saved_tokens(
    cluster: Cluster, store: RedisStore, nats_server: NatsServer
) -> None:
    info = (await cluster.http.put(f"{PREFIXES}/house", json={"system": SYSTEM})).json()
    assert (info["state"], info["workers"], info["hits"]) == ("unknown", [], 0)
    saved = await pinned_prefix.load(store, "tenant-1", "house")
    assert saved is not None
    token_ids = unpack_token_ids(saved.token_ids)
    hashes = extend_chain(root_hash("tenant-1", "r1", key=ROOT_KEY), token_ids, 16)
    record = pinned_prefix.record_key("tenant-1", hashes[-1])
    await store.write([("HSET", record, "hits", 3, "saved_tokens", 144, "last_use", 1_000)])
    async with running_index(nats_server, *hashes) as queries:
        info = (await cluster.http.get(f"{PREFIXES}/house")).json()
        assert info["workers"] == [{"worker": "decode-1", "cached_tokens": info["pinned_tokens"]}]
        assert info["state"] == "warming"  # decode-2 does not have it
        assert (info["hits"], info["saved_tokens"], info["last_used_at"]) == (3, 144, 1_000)
        assert not queries[-1].is_counted
    await store.write([("DEL", record)])


@pytest.mark.parametrize(
    ("limits", "code"),
    [
        ({"allowed_models": ("another",)}, "model_not_allowed"),
        ({"is_zero_retention": True}, "zero_retention"),
        ({"allowed_regions": ()}, "no_region_allowed"),
    ],
)
async def test_tenant_without_permission_stores_no_prefix(
    cluster: Cluster, store: RedisStore, limits: dict[str, object], code: str
) -> None:
    headers = await add_tenant(store, **limits)
    response = await cluster.http.put(f"{PREFIXES}/house", json={"system": SYSTEM}, headers=headers)
    check_envelope(response, 403, code, "model" if code == "model_not_allowed" else None)
    assert await pinned_prefix.entries(store, "tenant-2") == {}
    if code == "zero_retention":
        await cluster.gateway.tenancy.refusal_audit.flush()
        newest = await audit.newest(store, 20, ["refusal"])  # of tests before, too
        line = next(each for each in newest if each.command == "refuse a prefix")
        assert line.who == "gateway-1"
        assert (line.outcome, json.loads(line.arguments)["tenant"]) == (code, "tenant-2")


@pytest.mark.parametrize(
    ("name", "body", "status", "code", "param"),
    [
        ("ok", {"system": SYSTEM * 40}, 400, "context_length_exceeded", "messages"),
        ("ok", {}, 400, "invalid_request", "system"),
        ("ok", {"system": SYSTEM, "model": "other"}, 404, "model_not_found", "model"),
        ("ok", {"system": SYSTEM, "ttl_s": 0}, 400, "invalid_request", "ttl_s"),
        ("ok", {"system": SYSTEM, "tools": [{"type": "function"}]}, 400, "invalid_request", None),
        ("-x", {"system": SYSTEM}, 400, "invalid_request", "name"),
        ("x" * 65, {"system": SYSTEM}, 400, "invalid_request", "name"),
        ("ok", {"messages": [{"role": "assistant", "content": "x"}]}, 400, "invalid_request", None),
    ],
)
async def test_invalid_prefixes_are_rejected(
    cluster: Cluster,
    store: RedisStore,
    name: str,
    body: dict[str, object],
    status: int,
    code: str,
    param: str | None,
) -> None:
    response = await cluster.http.put(f"{PREFIXES}/{name}", json=body)
    check_envelope(response, status, code, response.json()["error"]["param"])
    assert param in (None, response.json()["error"]["param"])
    assert await pinned_prefix.entries(store, "tenant-1") == {}


async def test_prefix_too_short_or_too_long_is_rejected(model_files: ModelFiles) -> None:
    async def tokenize(tenant_id: str, prompts: Sequence[ChatPrompt]) -> Tokens:
        texts = [[str(each["content"]) for each in prompt.messages] for prompt in prompts]
        return [*map(model_files.tokenizer.encode, texts)], ()

    reader = PrefixTokenizer(tokenize, lambda: 1 << 20)
    prefix = PinnedPrefix(
        name="n",
        tenant_id="t",
        model="tiny",
        messages=[{"role": "system", "content": SYSTEM}],
        created_at=0,
    )
    read = await reader.read(prefix, CARD)
    num_tokens = len(unpack_token_ids(read.token_ids))
    large = msgspec.structs.replace(CARD, block_size=num_tokens + 1)
    with pytest.raises(PrefixTooShort, match="less than one block"):
        await reader.read(prefix, large)
    small = PrefixTokenizer(tokenize, lambda: 100)
    with pytest.raises(PromptTooLong, match="the limit is 100"):
        await small.read(prefix, CARD)


async def test_number_of_prefixes_per_tenant_is_limited(
    cluster: Cluster, store: RedisStore
) -> None:
    """Of 120 concurrent writes as many as allowed succeed, and each can be replaced."""

    async def put(name: str) -> httpx.Response:
        while True:
            response = await cluster.http.put(f"{PREFIXES}/{name}", json={"system": SYSTEM})
            if response.status_code not in (429, 503):  # too many at once, for other reasons
                return response
            await asyncio.sleep(0.01)

    responses = await asyncio.gather(*[put(f"p{number}") for number in range(120)])
    statuses = [response.status_code for response in responses]
    saved = list(await pinned_prefix.entries(store, "tenant-1"))
    assert len(saved) == statuses.count(200) == MAX_PER_TENANT
    assert statuses.count(409) == 120 - MAX_PER_TENANT
    assert (await put(saved[0])).status_code == 200
    check_envelope(await put("more"), 409, "too_many_prefixes", None)


async def test_roles_and_contents_alone_are_stored(cluster: Cluster, store: RedisStore) -> None:
    message = {"role": "system", "content": SYSTEM}
    body = {"messages": [{**message, "name": "n" * 128}]}
    stored = (await cluster.http.put(f"{PREFIXES}/house", json=body)).json()
    assert stored["messages"] == [message]
    body = {"messages": [{**message, "name": "n" * 129}]}
    for response in (
        await cluster.http.put(f"{PREFIXES}/house", json=body),
        await cluster.http.post(CHAT, json=body),
    ):
        check_envelope(response, 400, "invalid_request", "messages[0].name")


async def test_text_that_is_not_rendered_is_rejected(model_files: ModelFiles) -> None:
    async def tokenize(tenant_id: str, prompts: Sequence[ChatPrompt]) -> Tokens:
        texts = [[str(each["content"]).strip() for each in prompt.messages] for prompt in prompts]
        return [*map(model_files.tokenizer.encode, texts)], ()

    reader = PrefixTokenizer(tokenize, lambda: 1 << 20)
    prefix = PinnedPrefix(
        name="n",
        tenant_id="t",
        model="tiny",
        messages=[{"role": "system", "content": SYSTEM + " " * 60_000}],
        created_at=0,
    )
    num_tokens = len(unpack_token_ids((await reader.read(prefix, CARD)).token_ids))
    for changes in (
        {"messages": [{"role": "system", "content": SYSTEM + " " * 70_000}]},
        {"tools": [{"type": "function", "x": "x" * 70_000}]},
        {"cache_salt": "x" * 70_000},
    ):
        with pytest.raises(PrefixTooLarge, match=f"may take {num_tokens * 16 + 65_536} bytes"):
            await reader.read(msgspec.structs.replace(prefix, **changes), CARD)  # type: ignore[arg-type]


@pytest.mark.parametrize("change", [{"is_zero_retention": True}, {"allowed_regions": ["mars"]}])
async def test_stored_text_follows_the_permissions_of_now(
    cluster: Cluster, store: RedisStore, change: dict[str, object]
) -> None:
    """Reads check them, and `hearth tenant limits` deletes what they no longer allow."""
    headers = await add_tenant(store, **{})
    cluster.gateway._driver._streams._changed_regions.clear()  # those of other tests
    await cluster.http.put(f"{PREFIXES}/house", json={"system": SYSTEM}, headers=headers)
    body = {"input": "hi"}
    stored = (await cluster.http.post("/v1/responses", json=body, headers=headers)).json()
    paths = (f"{PREFIXES}/house", f"/v1/responses/{stored['id']}")
    found = [(await cluster.http.get(path, headers=headers)).status_code for path in paths]
    assert found == [200, 200]
    data = (await store.hash_get(TENANTS))[b"tenant-2"]
    changed = {**msgspec.json.decode(data), **change}
    await store.write([("HSET", TENANTS, "tenant-2", msgspec.json.encode(changed))])
    cluster.gateway.api_keys._known.clear()
    found = [(await cluster.http.get(path, headers=headers)).status_code for path in paths]
    listed = await cluster.http.get(PREFIXES, headers=headers)
    if "allowed_regions" in change:
        assert [*found, listed.status_code] == [403, 403, 403]
    else:
        assert found == [404, 403] and listed.json()["data"] == []
    await store.write([("HSET", TENANTS, "tenant-2", data)])
    admin = TenantAdmin(store, lambda: 0.0)
    await admin.change("tenant-2", change)
    await admin.change("tenant-2", {"is_zero_retention": False, "allowed_regions": None})
    changed = cluster.gateway._driver._streams._changed_regions  # may have been read in between
    await until(lambda: all(each.error is None for each in changed.values()))
    for key in ("pinned_prefixes", "pinned_prefix:house", "responses:uses", "responses:sizes"):
        assert not await store.evaluate(
            "return redis.call('EXISTS', KEYS[1])", [f"hearth:tenant-2:{key}"], []
        )
    assert not await store.evaluate(
        "return redis.call('KEYS', ARGV[1])", [], ["hearth:tenant-2:response:*"]
    )


# ── public prefixes ──────────────────────────────────────────────────────────────────────────────


async def publish(cluster: Cluster, store: RedisStore, name: str = "house") -> list[int]:
    """As `hearth prefix publish` does; returns the token ids once the gateway has read them."""
    prefix = PinnedPrefix(
        name=name,
        tenant_id=PUBLIC_TENANT_ID,
        model="tiny",
        messages=[{"role": "system", "content": SYSTEM}],
        created_at=1_000,
    )
    await pinned_prefix.save(store, prefix, 1_000)
    public = cluster.gateway.preparer.public
    (read,) = await until(lambda: public._prefixes)
    return unpack_token_ids(read.token_ids)


async def test_tenants_share_the_blocks_of_a_public_prefix_only(
    cluster: Cluster, store: RedisStore
) -> None:
    token_ids = await publish(cluster, store)
    await store_api_key(store, "key-of-tenant-2", "tenant-2")
    first = await received(cluster)
    response = await cluster.http.post(
        CHAT, json=chat_body(), headers={"authorization": "Bearer key-of-tenant-2"}
    )
    assert response.status_code == 200
    second = cluster.scheduler.submitted[-1].request
    public = extend_chain(public_root("house", "r1", key=ROOT_KEY), token_ids, 16)
    hashes, others = unpack_hashes(first.block_hashes), unpack_hashes(second.block_hashes)
    assert first.num_public_blocks == second.num_public_blocks == len(public) >= 3
    assert hashes[: len(public)] == others[: len(public)] == public
    assert not set(hashes[len(public) :]) & set(others[len(public) :])
    assert len(hashes) == len(first.prompt_token_ids) // 64


async def test_salted_or_different_prompt_has_no_public_blocks(
    cluster: Cluster, store: RedisStore
) -> None:
    await publish(cluster, store)
    for fields in (
        {"cache_salt": "mine"},
        chat_body(system=f"Not {SYSTEM}"),
        chat_body(system=SYSTEM[:60]),
    ):
        request = await received(cluster, **fields)
        assert request.num_public_blocks == 0
        salt = str(fields.get("cache_salt", ""))
        root = root_hash("tenant-1", "r1", cache_salt=salt, key=ROOT_KEY)
        prompt = unpack_token_ids(request.prompt_token_ids)
        assert unpack_hashes(request.block_hashes) == extend_chain(root, prompt, 16)


async def test_gateway_stores_token_ids_of_a_public_prefix(
    cluster: Cluster, store: RedisStore
) -> None:
    token_ids = await publish(cluster, store)
    saved = await pinned_prefix.load(store, PUBLIC_TENANT_ID, "house")
    assert saved is not None and unpack_token_ids(saved.token_ids) == token_ids
    info = (await cluster.http.get(f"{PREFIXES}/house")).json()
    assert info["is_public"] and info["num_tokens"] == len(token_ids)
    listed = (await cluster.http.get(PREFIXES)).json()["data"]
    assert [(each["name"], each["is_public"]) for each in listed] == [("house", True)]
    check_envelope(await cluster.http.delete(f"{PREFIXES}/house"), 404, "prefix_not_found", "name")


async def test_deleted_public_prefix_is_not_shared(cluster: Cluster, store: RedisStore) -> None:
    await publish(cluster, store)
    await pinned_prefix.delete(store, PUBLIC_TENANT_ID, "house")
    public = cluster.gateway.preparer.public
    await until(lambda: not public._prefixes)
    assert await pinned_prefix.entries(store, PUBLIC_TENANT_ID) == {}  # not saved again since
    assert (await received(cluster)).num_public_blocks == 0


# ── dry runs ─────────────────────────────────────────────────────────────────────────────────────


async def test_dry_run_reports_cached_tokens_without_running(
    cluster: Cluster, store: RedisStore, nats_server: NatsServer
) -> None:
    request = await received(cluster)
    hashes, num_tokens = unpack_hashes(request.block_hashes), len(request.prompt_token_ids) // 4
    num_submitted = len(cluster.scheduler.submitted)
    async with running_index(nats_server, *hashes[:2]):
        response = await cluster.http.post(f"{PREFIXES}/dry_run", json={"request": chat_body()})
    assert response.status_code == 200, response.text
    assert response.json() == {
        "object": "prefix.dry_run",
        "request": {
            "prompt_tokens": num_tokens,
            "cached_tokens": 32,
            "public_tokens": 0,
            "index_state": "exact",
            "workers": [{"worker": "decode-1", "cached_tokens": 32}],
        },
        "other": None,
        "divergence": None,
    }
    assert len(cluster.scheduler.submitted) == num_submitted


async def test_dry_run_reports_where_two_prompts_diverge(
    cluster: Cluster, store: RedisStore
) -> None:
    body = {"request": {"prompt": "hello world, how are you"}, "other": {"prompt": "hello fox"}}
    response = await cluster.http.post(f"{PREFIXES}/dry_run", json=body)
    assert response.status_code == 200, response.text
    report = response.json()
    tokenizer = cluster.files.tokenizer
    first, second = (tokenizer.encode([each["prompt"]]) for each in body.values())
    index = next(n for n, pair in enumerate(zip(first, second, strict=False)) if len({*pair}) > 1)
    divergence = report["divergence"]
    assert (divergence["token_index"], divergence["text_before"]) == (index, "hello")
    assert divergence["request_text"] != divergence["other_text"]
    assert report["request"]["index_state"] == "exact"  # the prompt has no full block to look up
    longer = body | {"other": {"prompt": "hello world, how are you today"}}
    divergence = (await cluster.http.post(f"{PREFIXES}/dry_run", json=longer)).json()["divergence"]
    assert divergence["request_text"] is None and divergence["other_text"]
    same = body | {"other": body["request"]}
    report = (await cluster.http.post(f"{PREFIXES}/dry_run", json=same)).json()
    assert report["divergence"] is None and report["other"] == report["request"]


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "request"),
        ({"request": 3}, "request"),
        ({"request": {"messages": []}}, "messages"),
        ({"request": {"prompt": ["a", "b"]}}, "request"),
        ({"request": {"prompt": "a"}, "other": {"prompt": "a", "n": 0}}, "n"),
        ({"request": {"prompt": "a"}, "other": []}, "other"),
    ],
)
async def test_dry_run_rejects_invalid_requests(
    cluster: Cluster, body: dict[str, object], param: str
) -> None:
    response = await cluster.http.post(f"{PREFIXES}/dry_run", json=body)
    check_envelope(response, 400, "invalid_request", param)


# ── session affinity ─────────────────────────────────────────────────────────────────────────────


async def test_affinity_key_is_header_else_body_per_tenant(
    cluster: Cluster, store: RedisStore
) -> None:
    await store_api_key(store, "key-of-tenant-2", "tenant-2")
    keys = []
    for key, header, body in (
        (API_KEY, None, None),
        (API_KEY, None, "session-1"),
        (API_KEY, "session-1", "other"),
        ("key-of-tenant-2", "session-1", None),
    ):
        headers = {"authorization": f"Bearer {key}"}
        headers |= {} if header is None else {"x-session-affinity": header}
        fields = {} if body is None else {"prompt_cache_key": body}
        response = await cluster.http.post(CHAT, json=chat_body() | fields, headers=headers)
        assert response.status_code == 200
        keys.append(cluster.scheduler.submitted[-1].affinity_key)
    none, by_body, by_header, other_tenant = keys
    assert none == ""
    assert by_body == by_header == scoped_affinity_key("tenant-1", "session-1")
    assert other_tenant not in keys[:3]
