"""One gateway serves the models of the catalogue, over real Redis and NATS."""

from __future__ import annotations

import asyncio
import json
import time
from collections import Counter
from functools import partial
from itertools import count

import msgspec
import pytest

from services.client.hearth_nats import ApiError, HearthClient
from services.gateway.tenancy.usage_counter import day_of
from services.gateway.text.model_files import ModelFiles
from shared import subjects
from shared.block_hash import PUBLIC_TENANT_ID
from shared.messages import DeviceMemory, Heartbeat, HostedModel, HostLoad, Request
from shared.packing import unpack_token_ids
from shared.tenancy.model_alias_admin import ModelAliasAdmin
from shared.tenancy.prefixes import pinned_prefix
from shared.tenancy.prefixes.pinned_prefix import PinnedPrefix
from shared.tenancy.tenant_admin import TenantAdmin
from shared.transport.bus import NatsBus
from tests.services.gateway.dialects.openai.test_refusals import check_envelope
from tests.services.gateway.models.conftest import (
    BRACKETS,
    ENGLISH,
    GERMAN,
    Fleet,
    card_of,
)
from tests.services.gateway.samples import sample_sum
from tests.support.waiting import LIMIT_S, until

pytestmark = pytest.mark.asyncio(loop_scope="module")
NO_HOST_S = 5.0


async def submitted(fleet: Fleet) -> Request:
    async with asyncio.timeout(LIMIT_S):
        return (await fleet.scheduler.submits.get()).request


def of_host(model: HostedModel, *, number: int = 1) -> Heartbeat:
    device = DeviceMemory(device="cpu", budget_bytes=1, used_bytes=1)
    return Heartbeat(
        process_id="host-1",
        epoch=1,
        sequence_number=number,
        roles=("host",),
        state="ready",
        interval_s=5.0,
        host=HostLoad(devices=(device,), models=(model,)),
    )


@pytest.fixture(autouse=True)
def forget(fleet: Fleet) -> None:
    fleet.scheduler.forget()


@pytest.mark.parametrize(("model", "text"), [("en", ENGLISH), ("de", GERMAN)])
async def test_each_model_has_its_tokenizer_and_template(
    fleet: Fleet, model: str, text: str
) -> None:
    response = await fleet.chat(model, max_tokens=60)
    assert response.json()["choices"][0]["message"]["content"] == text
    assert response.json()["model"] == model
    request = await submitted(fleet)
    assert (request.model, request.revision) == (model, f"digest-{model}")
    files = ModelFiles(fleet.dirs[model])
    assert files.chat_template is not None
    parts = files.chat_template.compiled().render([{"role": "user", "content": "hello"}])
    assert unpack_token_ids(request.prompt_token_ids) == files.tokenizer.encode(parts)
    assert ("[user: hello]" in "".join(parts)) == (files.chat_template.source == BRACKETS)


@pytest.mark.parametrize("place", ["first", "between", "last"])
async def test_large_body_is_of_the_model_that_it_names(fleet: Fleet, place: str) -> None:
    messages = {"messages": [{"role": "user", "content": "hello"}], "unknown": ["x" * 100_000]}
    rest = {"max_tokens": 60, "logit_bias": {"1": 0}}
    parts: list[dict[str, object]] = [messages, rest]
    parts.insert(("first", "between", "last").index(place), {"model": "de"})
    body = {name: value for part in parts for name, value in part.items()}
    response = await fleet.post("/v1/chat/completions", body)
    assert response.json()["choices"][0]["message"]["content"] == GERMAN
    assert (await submitted(fleet)).model == "de"


async def test_large_body_that_names_two_models_is_refused(fleet: Fleet) -> None:
    twice = b'{"model":"en","user":"%b","prompt":"a","stop":[],"model":"de","logit_bias":{}}'
    response = await fleet.http.post(
        "/v1/completions", content=twice % (b"x" * 300_000), headers=fleet.headers("acme")
    )
    check_envelope(response, 400, "invalid_request", "model")


async def test_models_have_other_tokens_and_caches(fleet: Fleet) -> None:
    requests = []
    for model in ("en", "de"):
        body = {"model": model, "prompt": [7] * 40, "max_tokens": 1}
        assert (await fleet.post("/v1/completions", body)).status_code == 200
        requests.append(await submitted(fleet))
    assert requests[0].prompt_token_ids == requests[1].prompt_token_ids
    assert requests[0].cache_root != requests[1].cache_root
    assert requests[0].block_hashes and requests[0].block_hashes != requests[1].block_hashes
    tokens = [
        (await fleet.post("/tokenize", {"model": model, "prompt": GERMAN})).json()["tokens"]
        for model in ("en", "de")
    ]
    assert len(tokens[1]) < len(tokens[0])
    for model, token_ids in zip(("en", "de"), tokens, strict=True):
        body = {"model": model, "tokens": token_ids}
        assert (await fleet.post("/detokenize", body)).json() == {"prompt": GERMAN}


async def test_large_bodies_use_the_tokenizer_of_their_model(fleet: Fleet) -> None:
    """In the preparation processes, which both models share."""
    for model in ("de", "en", "de"):
        text = f"{GERMAN}, " * 8000
        body = {"model": model, "messages": [{"role": "user", "content": text}]}
        large = await fleet.post("/tokenize", body)
        files = ModelFiles(fleet.dirs[model])
        assert files.chat_template is not None
        parts = files.chat_template.compiled().render(body["messages"])  # type: ignore[arg-type]
        assert large.json()["tokens"] == files.tokenizer.encode(parts)
        refused = await fleet.post("/v1/chat/completions", body)
        assert "maximum context length is 512 tokens" in refused.json()["error"]["message"]
    absent = await fleet.post("/v1/chat/completions", {**body, "model": "absent"})
    check_envelope(absent, 404, "model_not_found", "model")
    unnamed = await fleet.post("/v1/chat/completions", {"messages": body["messages"]})
    check_envelope(unnamed, 400, "invalid_request", "model")
    run = await fleet.post("/client/v4/accounts/acme/ai/run/de", {"messages": body["messages"]})
    assert "maximum context length is 512 tokens" in run.json()["errors"][0]["message"]


async def test_grammars_are_checked_with_the_vocabulary_of_their_model(fleet: Fleet) -> None:
    for model in ("en", "de", "en"):
        response = await fleet.chat(model, guided_regex="[a-z ,]+", max_tokens=4)
        assert response.status_code == 200, response.text
        assert (await submitted(fleet)).sampling.grammar is not None
    assert len(fleet.gateway._models.checks._pool.process_ids) == 1  # whatever the number of models
    assert len(fleet.gateway._models.pools.requests.process_ids) <= 2


async def test_lists_show_what_the_tenant_may_use(fleet: Fleet) -> None:
    aliases = ModelAliasAdmin(fleet.store, lambda: 1.0)
    await aliases.put("@cf/acme/fast", "de")
    await aliases.put("absent-alias", "absent")
    fleet.gateway._models.aliases._known.clear()
    named = {"acme": ["de", "@cf/acme/fast", "en"], "limited": ["en"], "other": ["en"]}
    for tenant, names in named.items():
        listed = (await fleet.get("/v1/models", tenant)).json()["data"]
        assert [each["id"] for each in listed] == names
        path = f"/client/v4/accounts/{tenant}/ai/models/search"
        found = (await fleet.get(path, tenant)).json()["result"]
        assert [each["name"] for each in found] == names
    entry = (await fleet.get("/v1/models/@cf/acme/fast")).json()
    assert (entry["revision"], entry["max_context"]) == ("digest-de", 512)
    assert (await fleet.chat("@cf/acme/fast", max_tokens=3)).json()["model"] == "@cf/acme/fast"
    assert (await submitted(fleet)).model == "de"


async def test_model_of_other_tenants_is_answered_as_an_unknown_one(fleet: Fleet) -> None:
    for tenant, code in (("other", "model_not_found"), ("limited", "model_not_allowed")):
        status = 404 if code == "model_not_found" else 403
        for response in (
            await fleet.chat("de", tenant),
            await fleet.get("/v1/models/de", tenant),
            await fleet.post("/tokenize", {"model": "de", "prompt": "a"}, tenant),
            await fleet.post("/v1/embeddings", {"model": "de", "input": "a"}, tenant),
        ):
            check_envelope(response, status, code, "model")
    hidden, unknown = await fleet.chat("de", "other"), await fleet.chat("xy", "other")
    assert hidden.text.replace("'de'", "'xy'") == unknown.text
    put = {"model": "de", "system": "x" * 200}
    response = await fleet.http.put("/v1/prefixes/p", json=put, headers=fleet.headers("other"))
    check_envelope(response, 404, "model_not_found", "model")
    assert not fleet.scheduler.submitted


async def test_body_has_to_name_a_model(fleet: Fleet) -> None:
    for path, body in (
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]}),
        ("/v1/completions", {"prompt": "a"}),
        ("/tokenize", {"prompt": "a"}),
    ):
        check_envelope(await fleet.post(path, body), 400, "invalid_request", "model")


async def test_dry_run_compares_prompts_of_one_model(fleet: Fleet) -> None:
    def prompt(model: str, text: str) -> dict[str, object]:
        return {"model": model, "prompt": text}

    path = "/v1/prefixes/dry_run"
    body = {"request": prompt("de", "hallo Welt"), "other": prompt("de", "hallo Fuchs")}
    found = (await fleet.post(path, body)).json()["divergence"]
    tokenizer = ModelFiles(fleet.dirs["de"]).tokenizer
    pair = [tokenizer.encode([text]) for text in ("hallo Welt", "hallo Fuchs")]
    same = [first == second for first, second in zip(*pair, strict=False)]
    assert found["token_index"] == same.index(False)
    body["other"] = prompt("en", "hallo Fuchs")
    check_envelope(await fleet.post(path, body), 400, "invalid_request", "other.model")


async def test_prefixes_are_of_a_model_and_hidden_with_it(fleet: Fleet) -> None:
    system, counts = f"{GERMAN}. " * 6, {}
    for model in ("en", "de"):
        body = {"model": model, "system": system}
        path, headers = f"/v1/prefixes/of-{model}", fleet.headers("acme")
        stored = await fleet.http.put(path, json=body, headers=headers)
        assert (stored.status_code, stored.json()["model"]) == (200, model), stored.text
        counts[model] = stored.json()["num_tokens"]
    assert counts["de"] < counts["en"]  # in the tokens of its own tokenizer
    prefix = PinnedPrefix(
        name="shown",
        tenant_id=PUBLIC_TENANT_ID,
        model="de",
        messages=[{"role": "system", "content": system}],
        created_at=0,
    )
    await pinned_prefix.save(fleet.store, prefix, 0.0)
    listed = {
        tenant: {each["name"] for each in (await fleet.get("/v1/prefixes", tenant)).json()["data"]}
        for tenant in ("acme", "other")
    }
    assert listed == {"acme": {"of-en", "of-de", "shown"}, "other": set()}
    assert (await fleet.get("/v1/prefixes/shown")).status_code == 200
    hidden = await fleet.get("/v1/prefixes/shown", "other")
    check_envelope(hidden, 404, "prefix_not_found", "name")
    saved: PinnedPrefix | None = None
    async with asyncio.timeout(LIMIT_S):
        while saved is None or not saved.token_ids:  # by the poll of the gateway
            await asyncio.sleep(0.05)
            saved = await pinned_prefix.load(fleet.store, PUBLIC_TENANT_ID, "shown")
    tokens = unpack_token_ids(saved.token_ids)
    assert f"[system: {system.strip()}" in ModelFiles(fleet.dirs["de"]).tokens.decode(tokens)


async def test_usage_is_counted_by_model(fleet: Fleet) -> None:
    tenants = TenantAdmin(fleet.store, time.time)
    today = time.time()
    days = [day_of(today), day_of(today + 86_400)]  # of a test at midnight

    async def requests() -> Counter[str]:
        """By model, as an operator reads them."""
        assert await fleet.gateway._usage.flush()
        counts: Counter[str] = Counter()
        for each in await tenants.usage(["acme"], days):
            counts[each.model] += each.requests
        return counts

    before = await requests()
    for model in ("en", "de", "de"):
        assert (await fleet.chat(model, max_tokens=2)).status_code == 200

    async def is_counted() -> bool:
        return await requests() - before == {"en": 1, "de": 2}

    await until(is_counted)


async def test_stream_ends_on_its_revision_while_the_name_moves_and_leaves(fleet: Fleet) -> None:
    """Promotion, then removal: new requests follow at once, the running one is not touched."""
    await fleet.add("m", str(fleet.dirs["en"]), "old")
    old = await fleet.worker("decode-3", card_of("m", "old"), ENGLISH, fleet.dirs["en"])
    old.hold_at = 3
    body = {"model": "m", "messages": [{"role": "user", "content": "a"}], "stream": True}
    async with fleet.http.stream(
        "POST", "/v1/chat/completions", json=body, headers=fleet.headers("acme")
    ) as response:
        lines = response.aiter_lines()
        assert (await submitted(fleet)).revision == "old"
        await fleet.add("m", str(fleet.dirs["de"]), "new")
        new = await fleet.worker("decode-4", card_of("m", "new"), GERMAN, fleet.dirs["de"])
        await fleet.admin.promote("m", "r2")
        await fleet.follow()
        for _ in range(3):
            reply = await fleet.chat("m", max_tokens=60)
            assert reply.json()["choices"][0]["message"]["content"] == GERMAN
            assert (await submitted(fleet)).revision == "new"
        ended = partial(sample_sum, fleet.gateway, "hearth_requests_total", model="m")
        assert ended(outcome="stop") == 3
        await fleet.admin.remove("m")
        await until(lambda: "m" not in fleet.gateway._models.served.names)  # by its poll
        check_envelope(await fleet.chat("m"), 404, "model_not_found", "model")
        assert ended() == 0
        old.released.set()
        chunks = [json.loads(each[6:]) async for each in lines if each.startswith("data: {")]
    texts = [each["choices"][0]["delta"].get("content", "") for each in chunks if each["choices"]]
    assert "".join(filter(None, texts)) == ENGLISH
    assert chunks[-1]["choices"][0]["finish_reason"] == "stop"
    for each in (old, new):
        fleet.scheduler.workers.remove(each)


async def test_cold_model_is_prepared_with_the_card_of_a_host(fleet: Fleet) -> None:
    await fleet.admin.add("cold", str(fleet.dirs["de"]))
    await fleet.follow()
    response = await fleet.chat("cold")
    check_envelope(response, 503, "no_capacity", None)
    assert "no host has loaded the model 'cold' yet" in response.text
    assert response.headers["retry-after"] == f"{NO_HOST_S:.0f}"
    await fleet.admin.record_digest("cold", "r1", "digest-cold")
    card = card_of("cold", "digest-cold")
    hosted = HostedModel(name="cold", revision="r1", state="standby", device="cpu", card=card)
    bus = await NatsBus.connect(fleet.nats.url("host-1"), process_id="host-1")

    async def live() -> None:
        for number in count(1):
            heartbeat = of_host(hosted, number=number)
            await bus.publish(subjects.heartbeat(("host",), "host-1"), heartbeat)
            await asyncio.sleep(0.1)

    living = asyncio.create_task(live())
    await until(lambda: fleet.gateway._models.live.card_of("cold", "digest-cold"))
    await fleet.follow()
    fleet.scheduler.is_holding = True  # as it does while the model is woken
    running = asyncio.create_task(fleet.chat("cold", max_tokens=60))
    await until(lambda: fleet.scheduler.submitted)
    async with asyncio.timeout(LIMIT_S):
        while (await fleet.chat("cold")).status_code != 503:  # the peer places by live workers
            await asyncio.sleep(0.01)
    running.cancel()
    living.cancel()
    fleet.scheduler.is_holding = False
    request = (fleet.scheduler.submitted[0]).request
    assert (request.model, request.revision) == ("cold", "digest-cold")
    listed = (await fleet.get("/v1/models")).json()["data"]
    assert "cold" in [each["id"] for each in listed]
    await bus.close()


async def test_clients_are_told_why_no_host_can_serve_a_model(fleet: Fleet) -> None:
    """Over HTTP and NATS, without the paths that operators see."""
    await fleet.add("broken", str(fleet.dirs["de"]), "digest-broken")
    bus = await NatsBus.connect(fleet.nats.url("host-1"), process_id="host-1")
    client = await HearthClient.connect(fleet.nats.url("client-1"))
    failed = HostedModel(
        name="broken",
        revision="digest-broken",
        state="failed",
        device="cpu",
        failure=f"source '{fleet.dirs['de']}' has another digest",
        public_failure="its source has changed",
    )
    subject = subjects.heartbeat(("host",), "host-1")
    try:
        await bus.publish(subject, of_host(failed, number=10_000))
        reasons = fleet.gateway._models.live.failure_of
        await until(lambda: reasons("broken", {"digest-broken"}))
        message = "the model 'broken' cannot be served: its source has changed"
        response = await fleet.chat("broken")
        check_envelope(response, 503, "no_capacity", None)
        assert response.json()["error"]["message"] == message
        assert int(response.headers["retry-after"]) > 0
        body = {"model": "broken", "messages": [{"role": "user", "content": "hello"}]}
        with pytest.raises(ApiError) as raised:
            await client.request("chat", body)
        assert (raised.value.status, raised.value.message) == (503, message)
        starting = msgspec.structs.replace(failed, state="starting")  # it may serve soon
        await bus.publish(subject, of_host(starting, number=10_001))
        await until(lambda: not reasons("broken", {"digest-broken"}))
        assert (
            "no worker and no host has the model 'broken' now" in (await fleet.chat("broken")).text
        )
    finally:
        await client.close()
        await bus.close()


async def test_source_that_is_not_here_is_no_capacity(fleet: Fleet) -> None:
    await fleet.add("away", "acme/not-in-the-cache", "digest-en")
    worker = await fleet.worker("decode-5", card_of("away", "digest-en"), ENGLISH, fleet.dirs["en"])
    response = await fleet.chat("away")
    check_envelope(response, 503, "no_capacity", None)
    assert "the files of this model cannot be read" in response.text
    assert "acme/" not in response.text
    assert 1 <= int(response.headers["retry-after"]) <= 5
    assert (await fleet.chat("en", max_tokens=3)).status_code == 200
    fleet.scheduler.workers.remove(worker)
