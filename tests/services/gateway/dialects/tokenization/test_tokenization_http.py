"""`/tokenize`, `/detokenize` and `/version` of a running gateway."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import pytest

from services.gateway.dialects import endpoint_handlers
from services.gateway.dialects.tokenization import tokenization
from services.gateway.dialects.tokenization.tokenization import MAX_BODY_BYTES, Tokenization
from services.gateway.request import prepared_bodies
from services.gateway.request.preparation_slots import PreparationSlots
from services.gateway.text.decoding.token_table import TokenTable
from services.gateway.text.model_files import ModelFiles
from shared.errors import PayloadTooLarge
from shared.tenancy.model_alias_admin import ModelAliasAdmin
from shared.tenancy.tenant import TenantRecord
from tests.services.gateway.conftest import Cluster
from tests.services.gateway.dialects.openai.test_refusals import check_envelope
from tests.services.gateway.tenancy.test_limits_http import Acme, acme

__all__ = ["acme"]

TEXT = "hello world, 東京 😀"
MESSAGES = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": TEXT}]
BODIES: list[tuple[str, dict[str, Any]]] = [
    ("/tokenize", {"prompt": TEXT, "return_token_strs": True}),
    ("/tokenize", {"prompt": "", "model": "tiny"}),
    ("/v1/tokenize", {"messages": MESSAGES}),
    ("/v1/tokenize", {"messages": MESSAGES, "add_generation_prompt": False}),
    ("/detokenize", {"tokens": [1, 50, 2]}),
    ("/v1/detokenize", {"tokens": [5], "model": "tiny"}),
    ("/detokenize", {"tokens": [5], "model": ""}),
]
INVALID: list[tuple[str, bytes, int, str, str | None]] = [
    ("/tokenize", b'{"prompt": "\xff"}', 400, "invalid_request", "prompt"),
    ("/tokenize", b'{"prompt": "a", "messages": [{"role": "user", "content": "a"}]}', 400,
     "invalid_request", "messages"),
    ("/tokenize", b'{"messages": [{"role": "assistant", "content": "a"}]}', 400,
     "invalid_request", "messages"),
    ("/tokenize", b'{"messages": [{"role": "user", "content": "a"}], "tools": [{"name": "f"}]}',
     400, "invalid_request", "tools"),
    ("/tokenize", b'{"prompt": "a", "model": "other"}', 404, "model_not_found", "model"),
    ("/detokenize", b'{"tokens": [1], "model": "other"}', 404, "model_not_found", "model"),
    ("/tokenize", b'{"prompt": "a", "model": 5}', 400, "invalid_request", "model"),
    ("/detokenize", b'{"tokens": [400]}', 400, "invalid_request", "tokens"),
    ("/detokenize", b'{"tokens": [9223372036854775808]}', 400, "invalid_request", "tokens[0]"),
    ("/tokenize", b"{", 400, "invalid_request", None),
    ("/tokenize", b"", 400, "invalid_request", None),
]  # fmt: skip


async def post(http: httpx.AsyncClient, path: str, data: bytes) -> httpx.Response:
    return await http.post(path, content=data, headers={"content-type": "application/json"})


async def test_prompt_and_tokens_have_vllms_shapes(
    cluster: Cluster, model_files: ModelFiles
) -> None:
    tokens = model_files.tokenizer.encode([TEXT])
    for path in ("/tokenize", "/v1/tokenize"):
        response = await cluster.http.post(path, json={"prompt": TEXT})
        assert response.headers["content-type"] == "application/json"
        assert response.headers["x-request-id"]
        assert response.json() == {
            "count": len(tokens),
            "max_model_len": 512,
            "tokens": tokens,
            "token_strs": None,
        }
    for path in ("/detokenize", "/v1/detokenize"):
        response = await cluster.http.post(path, json={"tokens": tokens})
        assert response.status_code == 200 and response.json() == {"prompt": TEXT}


async def test_messages_have_the_tokens_of_a_chat(
    cluster: Cluster, model_files: ModelFiles
) -> None:
    body = {"messages": MESSAGES, "return_token_strs": True}
    response = (await cluster.http.post("/tokenize", json=body)).json()
    chat = await cluster.http.post("/v1/chat/completions", json={"messages": MESSAGES})
    assert response["count"] == chat.json()["usage"]["prompt_tokens"]
    shown = (await cluster.http.post("/detokenize", json={"tokens": response["tokens"]})).json()
    assert shown["prompt"].endswith(f"{TEXT}<|im_end|>\n<|im_start|>assistant\n")
    closed = await cluster.http.post("/tokenize", json={**body, "add_generation_prompt": False})
    assert closed.json()["count"] < response["count"]
    # special tokens in a message are ordinary text
    forged = [{"role": "user", "content": "<|im_end|>"}]
    response = (await cluster.http.post("/tokenize", json={"messages": forged})).json()
    im_end = model_files.tokenizer.tokenizer.token_to_id("<|im_end|>")
    assert response["tokens"].count(im_end) == 1


@pytest.mark.parametrize(("path", "body"), BODIES)
async def test_large_body_has_the_same_response(
    cluster: Cluster, path: str, body: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    small = await cluster.http.post(path, json=body)
    monkeypatch.setattr(tokenization, "MAX_INLINE_BYTES", 1)
    monkeypatch.setattr(prepared_bodies, "MAX_INLINE_BYTES", 1)
    monkeypatch.setattr(endpoint_handlers, "PART_BYTES", 7)
    large = await cluster.http.post(path, json=body)
    assert (small.status_code, small.content) == (200, large.content)


async def test_halves_of_characters_are_replaced_small_and_large(
    cluster: Cluster, model_files: ModelFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens = model_files.tokenizer.encode(["a\ufffd \ufffd"])
    for _ in range(2):
        halves = await post(cluster.http, "/tokenize", rb'{"prompt": "a\ud83d \ude00"}')
        assert halves.json()["tokens"] == tokens
        monkeypatch.setattr(tokenization, "MAX_INLINE_BYTES", 1)
        monkeypatch.setattr(prepared_bodies, "MAX_INLINE_BYTES", 1)


@pytest.mark.parametrize(("path", "data", "status", "code", "param"), INVALID)
async def test_invalid_body_is_rejected_small_and_large(
    cluster: Cluster,
    path: str,
    data: bytes,
    status: int,
    code: str,
    param: str | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    small = await post(cluster.http, path, data)
    check_envelope(small, status, code, param)
    monkeypatch.setattr(tokenization, "MAX_INLINE_BYTES", -1)
    large = await post(cluster.http, path, data)
    assert (large.status_code, large.content) == (status, small.content)


async def test_large_body_takes_no_time_of_the_event_loop(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing that grows with the body runs in the gateway's process."""

    def fail(*_: Any, **__: Any) -> None:
        raise AssertionError("in the gateway's process")

    for name in ("decode", "spelled"):
        monkeypatch.setattr(TokenTable, name, fail)
    for name in ("TOKENIZE_FIELDS", "DETOKENIZE_FIELDS"):
        monkeypatch.setattr(tokenization, name, None)
    text = "hello world " * 1000
    tokenized = await cluster.http.post("/tokenize", json={"prompt": text})
    assert tokenized.status_code == 200, tokenized.text
    tokens = tokenized.json()["tokens"] * 4
    detokenized = await cluster.http.post("/detokenize", json={"tokens": tokens})
    assert detokenized.json() == {"prompt": text * 4}
    messages = [{"role": "user", "content": text}]
    assert (await cluster.http.post("/tokenize", json={"messages": messages})).status_code == 200


async def test_body_above_a_mib_is_rejected(cluster: Cluster) -> None:
    gateway = cluster.gateway
    converter = Tokenization(gateway.preparer, gateway._models.names)
    tenant = TenantRecord(tenant_id="acme")
    body = json.dumps({"prompt": ""}).encode()
    exact = body + b" " * (MAX_BODY_BYTES - len(body))
    assert b'"count":0' in await converter.tokenize(tenant, exact)
    for convert in (converter.tokenize, converter.detokenize):
        with pytest.raises(PayloadTooLarge, match="larger than 1048576 bytes"):
            await convert(tenant, exact + b" ")


async def test_aliases_of_the_tenant_name_the_model(acme: Acme) -> None:
    await acme.configure(allowed_models=("tiny",))
    aliases = ModelAliasAdmin(acme.store, lambda: 1.0)
    await aliases.put("@cf/fast", "tiny", "acme")
    await aliases.put("@cf/other", "other")
    body = {"prompt": "a " * 5000, "model": "@cf/fast"}
    assert (await acme.http.post("/tokenize", json=body)).status_code == 200
    for name in ("@cf/other", "@cf/none"):
        response = await acme.http.post("/tokenize", json={**body, "model": name})
        check_envelope(response, 404, "model_not_found", "model")


@pytest.mark.parametrize(
    ("body", "is_small"),
    [({"prompt": "a"}, True), ({"messages": MESSAGES}, False), ({"prompt": "a " * 5000}, False)],
)
async def test_body_takes_a_preparation_slot(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch, body: Any, is_small: bool
) -> None:
    taken: list[bool] = []
    slot, small = PreparationSlots.slot, cluster.gateway.preparer._small

    def counting(self: PreparationSlots, tenant_id: str) -> Any:
        taken.append(self is small)
        return slot(self, tenant_id)

    monkeypatch.setattr(PreparationSlots, "slot", counting)
    assert (await cluster.http.post("/tokenize", json=body)).status_code == 200
    assert taken == [is_small]
    monkeypatch.setattr(cluster.gateway.capacity, "_max_requests", 0)
    check_envelope(await cluster.http.post("/tokenize", json=body), 429, "overloaded", None)


async def test_running_requests_are_answered_together(cluster: Cluster) -> None:
    bodies = [{"prompt": "a " * 5000}, {"prompt": "b"}, {"messages": MESSAGES}] * 4
    responses = await asyncio.gather(*(cluster.http.post("/tokenize", json=b) for b in bodies))
    assert {each.status_code for each in responses} == {200}
    assert len({each.content for each in responses}) == 3


async def test_version_needs_no_key(cluster: Cluster) -> None:
    async with httpx.AsyncClient(base_url=cluster.gateway.http_address) as http:
        response = await http.get("/version")
        assert response.status_code == 200 and list(response.json()) == ["version"]
        schema = (await http.get("/openapi.json")).json()
        assert response.json()["version"] == schema["info"]["version"]
        assert (await http.post("/version")).status_code == 405


async def test_bodies_are_described(cluster: Cluster) -> None:
    paths = (await cluster.http.get("/openapi.json")).json()["paths"]
    for path, name in (("/tokenize", "TokenizeRequest"), ("/v1/detokenize", "DetokenizeRequest")):
        body = paths[path]["post"]["requestBody"]["content"]["application/json"]["schema"]
        assert name in json.dumps(body)


async def test_a_request_is_charged_and_no_tokens_are(acme: Acme) -> None:
    await acme.configure(
        requests_per_min=60, input_tokens_per_min=10, concurrency=1, allowed_models=("tiny",)
    )
    bodies = [*BODIES, ("/tokenize", {"prompt": "a " * 5000})]
    for number, (path, body) in enumerate(bodies, 1):
        response = await acme.http.post(path, json=body)
        assert response.status_code == 200, response.text
        assert int(response.headers["x-ratelimit-remaining-requests"]) == 60 - number
        assert int(response.headers["x-ratelimit-remaining-tokens"]) == 10
    await acme.configure(allowed_models=("other",))
    response = await acme.http.post("/tokenize", json={"prompt": "a " * 5000})
    check_envelope(response, 403, "model_not_allowed", "model")


@pytest.mark.parametrize("path", ["/tokenizer_info", "/v1/tokenizer_info?model=tiny"])
async def test_tokenizer_info(cluster: Cluster, path: str) -> None:
    """What lm-eval needs to prepare prompts with `/tokenize` alone."""
    info = (await cluster.http.get(path)).json()
    assert (info["eos_token"], info["bos_token"], info["pad_token"]) == ("<|im_end|>", None, None)
    assert (info["model"], info["model_max_length"]) == ("tiny", 512)
    assert "<|im_start|>" in info["chat_template"]


async def test_tokenizer_info_of_an_unknown_model(cluster: Cluster) -> None:
    response = await cluster.http.get("/tokenizer_info", params={"model": "huge"})
    check_envelope(response, 404, "model_not_found", "model")
    response = await cluster.http.get("/tokenizer_info", headers={"authorization": ""})
    check_envelope(response, 401, "invalid_api_key", None)
