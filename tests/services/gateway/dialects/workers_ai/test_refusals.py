"""Every rejection: its number in Cloudflare's envelope, and the same cause in both dialects."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import httpx
import pytest

from services.gateway.request.unsent_output import UnsentOutput
from shared.errors import DependencyUnavailable
from shared.messages import Failure, Finish, Served
from shared.store import StoreUnavailable
from tests.services.gateway.conftest import Cluster
from tests.services.gateway.dialects.openai.test_refusals import check_envelope
from tests.services.gateway.dialects.workers_ai.conftest import ALIASES
from tests.services.gateway.dialects.workers_ai.test_run_http import BODY, ROOT, RUN
from tests.services.gateway.tenancy.test_limits_http import Acme, acme
from tests.support.grids import in_one_test

__all__ = ["acme"]

CHAT = "/v1/chat/completions"


def check_rejected(response: httpx.Response, status: int, number: int, part: str = "") -> None:
    assert response.status_code == status, response.text
    assert response.headers["content-type"].startswith("application/json")
    assert response.headers["x-request-id"]
    body = response.json()
    assert list(body) == ["result", "success", "errors", "messages"]
    assert (body["result"], body["success"], body["messages"]) == (None, False, [])
    ((entry),) = body["errors"]
    assert list(entry) == ["code", "message"]
    assert entry["code"] == number, entry
    assert part in entry["message"]


@in_one_test(
    ("fields", "field"),
    [
        ({"prompt": "x"}, "prompt"),
        ({"temperature": 5.1}, "temperature"),
        ({"tools": [{"name": "f"}]}, "tools"),
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {}}},
            "response_format.json_schema",
        ),
        ({"guided_json": []}, "guided_json"),
        ({"input": "x"}, "messages and input"),
        ({"instructions": "x"}, "instructions is for an input"),
        ({"messages": None, "input": [{"type": "function_call_output"}]}, "input[0].call_id"),
        ({"query": "q"}, "query"),
        ({"contexts": [{"text": "c"}]}, "contexts"),
        ({"requests": [{}]}, "requests"),
        ({"request_id": "x"}, "request_id"),
        ({"messages": [{"role": "assistant", "content": "x"}]}, "messages"),  # by the template
        ({"messages": None, "text": ["x"] * 101}, "text"),
        ({"messages": None, "text": ["x", ""]}, "text[1]"),
    ],
)
async def test_bad_field_is_named(cluster: Cluster, fields: dict[str, Any], field: str) -> None:
    response = await cluster.http.post(RUN, json={**BODY, **fields})
    check_rejected(response, 400, 5004, field)
    assert cluster.scheduler.submits.empty()


async def test_bodies_that_say_nothing(cluster: Cluster) -> None:
    check_rejected(
        await cluster.http.post(RUN, json={}), 400, 5004, "messages, input, prompt, text and query"
    )
    check_rejected(await cluster.http.post(RUN), 400, 3003, "no body")
    check_rejected(await cluster.http.post(RUN, json={**BODY, "lora": "x"}), 405, 5005, "LoRA")


@in_one_test(
    ("name", "status", "number"),
    [
        ("@cf/meta/unknown", 400, 5007),
        ("huge", 400, 5007),
        ("%252F", 400, 5007),
        ("", 404, 3042),
        ("/", 404, 3042),
        ("%2F%2F", 404, 3042),
        ("@cf%2F%2Fx", 404, 3042),
        ("%2E%2E", 404, 3042),
        ("a%2F%2E%2E%2Ftiny", 404, 3042),
        ("a%20b", 404, 3042),
        ("%00", 404, 3042),
        ("%ff", 400, 5007),
        ("a" * 10_240, 404, 3042),
    ],
)
async def test_bad_model_id(cluster: Cluster, name: str, status: int, number: int) -> None:
    for path in (f"{ROOT}/run/{name}", f"/accounts/tenant-1/ai/run/{name}"):
        check_rejected(await cluster.http.post(path, json=BODY), status, number)


async def test_alias_of_a_model_that_is_served_elsewhere(cluster: Cluster, alias: str) -> None:
    other = next(name for name, model in ALIASES.items() if model != "tiny")
    response = await cluster.http.post(f"{ROOT}/run/{other}", json=BODY)
    check_rejected(response, 400, 5007, f"the model '{other}' does not exist")


async def test_run_without_a_model(cluster: Cluster) -> None:
    check_rejected(await cluster.http.post(f"{ROOT}/run", json=BODY), 404, 3042, "missing")


@pytest.mark.parametrize("account", ["tenant-2", "TENANT-1", "tenant-1%20", "%2e"])
async def test_account_of_another(cluster: Cluster, account: str) -> None:
    """Also for requests that are bad otherwise."""
    root = f"/client/v4/accounts/{account}/ai"
    check_rejected(await cluster.http.post(f"{root}/run/%2F%2F", content=b"{"), 403, 10000)
    for path in ("models/search", "models/schema", "tasks/search", "authors/search"):
        check_rejected(await cluster.http.get(f"{root}/{path}"), 403, 10000)
    response = await cluster.http.get(f"{root}/v1/models")
    check_envelope(response, 403, "foreign_account", None)
    assert cluster.scheduler.submits.empty()


async def test_unknown_routes_and_methods(cluster: Cluster) -> None:
    for path in ("/finetunes", "/finetunes/public", "/finetunes/x/finetune-assets", "/tomarkdown"):
        check_rejected(await cluster.http.get(f"{ROOT}{path}"), 404, 7000)
        check_rejected(await cluster.http.post(f"{ROOT}{path}", json={}), 404, 7000)
    for path in ("/client/v4", "/client/v4/user/tokens/verify", "/accounts/tenant-1/ai"):
        check_rejected(await cluster.http.get(path), 404, 7000)
    for path in (f"{ROOT}/v1/nothing", "/v1/nothing", "/nothing"):
        check_envelope(await cluster.http.get(path), 404, "not_found", None)
    wrong = await cluster.http.get(RUN)
    check_rejected(wrong, 405, 7001)
    assert "POST" in wrong.headers["allow"]
    check_rejected(await cluster.http.post(f"{ROOT}/models/search"), 405, 7001)


async def test_bad_queries(cluster: Cluster) -> None:
    path = f"{ROOT}/models/search"
    for name, value in (("page", "0"), ("per_page", "x"), ("format", "openrouter")):
        response = await cluster.http.get(path, params={name: value})
        check_rejected(response, 400, 5004, name)
    path = f"{ROOT}/models/schema"
    check_rejected(await cluster.http.get(path), 400, 5004, "model")
    check_rejected(await cluster.http.get(path, params={"model": "huge"}), 400, 5007, "huge")
    check_rejected(await cluster.http.get(path, params={"model": "a//b"}), 404, 3042)


# ── the same cause over both dialects ────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class Case:
    """`number` and `status` of Workers AI; `code` and `openai_status` of OpenAI."""

    number: int
    status: int
    code: str
    openai_status: int
    param: str | None = None


async def check_same_cause(
    http: httpx.AsyncClient, case: Case, body: Any = BODY, **options: Any
) -> tuple[httpx.Response, httpx.Response]:
    openai = await http.post(CHAT, json=body, **options)
    check_envelope(openai, case.openai_status, case.code, case.param)
    cause, _, _ = openai.json()["error"]["message"].partition("; retry in")  # the time goes on
    native = await http.post(RUN.replace("tenant-1", tenant_of(http)), json=body, **options)
    check_rejected(native, case.status, case.number, cause)
    assert native.headers.get("retry-after") == openai.headers.get("retry-after")
    return openai, native


def tenant_of(http: httpx.AsyncClient) -> str:
    return http.headers.get("x-test-tenant", "tenant-1")


async def test_authentication(cluster: Cluster) -> None:
    async with httpx.AsyncClient(base_url=cluster.gateway.http_address) as keyless:
        check_rejected(await keyless.get(f"{ROOT}/models/search"), 401, 10000)


async def test_too_large(cluster: Cluster) -> None:
    long = {"messages": [{"role": "user", "content": "x y " * 400}]}
    case = Case(3006, 413, "context_length_exceeded", 400, "messages")
    await check_same_cause(cluster.http, case, long)


async def test_redis_away(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """For a key and for an alias that this gateway has not seen."""
    store = cluster.gateway.tenancy.stores.fast

    async def unavailable(*_: Any) -> Any:
        raise StoreUnavailable("Redis does not answer")

    cluster.gateway._models.aliases._known.clear()
    with monkeypatch.context() as patch:
        patch.setattr(store, "evaluate", unavailable)
        response = await cluster.http.post(f"{ROOT}/run/@cf/a/b", json=BODY)
        check_rejected(response, 503, 3043)
        async with httpx.AsyncClient(base_url=cluster.gateway.http_address) as other:
            case = Case(3043, 503, DependencyUnavailable.code, 503)
            await check_same_cause(other, case, headers={"authorization": "Bearer another"})


async def test_failure_in_mid_stream_is_an_event(cluster: Cluster) -> None:
    failure = Failure(code="internal_error", message="the device is gone")
    served = Served(num_cached_tokens=0, prefill_worker_id=None)
    decode = cluster.decodes[0]
    decode.finish = Finish(reason="failed", served=served, failure=failure)
    decode.answer = decode.answer[:6]
    await check_same_cause(cluster.http, Case(3043, 500, "internal_error", 500))
    async with cluster.http.stream("POST", RUN, json={**BODY, "stream": True}) as response:
        lines = [line async for line in response.aiter_lines() if line]
    assert "response" in lines[0]
    assert lines[-1] == (
        'data: {"result":null,"success":false,'
        '"errors":[{"code":3043,"message":"the device is gone"}],"messages":[]}'
    )


async def test_response_that_takes_too_much_memory(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cluster.gateway.submission, "_unsent", UnsentOutput(1 << 20, 10))
    await check_same_cause(cluster.http, Case(3040, 429, "overloaded", 429))


async def test_permissions_of_a_tenant(acme: Acme) -> None:
    acme.http.headers["x-test-tenant"] = "acme"
    await acme.configure(allowed_models=["other"])
    search = await acme.http.get("/accounts/acme/ai/models/search")
    assert search.json()["result"] == []
    schema = await acme.http.get("/accounts/acme/ai/models/schema", params={"model": "tiny"})
    check_rejected(schema, 403, 5018)
    await acme.configure(concurrency=0)
    await check_same_cause(acme.http, Case(3023, 403, "limit_is_zero", 403))
