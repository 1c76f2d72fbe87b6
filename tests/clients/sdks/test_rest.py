"""The calls of Cloudflare's REST documentation, sent with httpx: only the host is another."""

from __future__ import annotations

import json

import httpx
import pytest

from tests.clients.conftest import Reference
from tests.clients.sdks.events import frames_of, text_of
from tests.support.account import ALIAS, MODEL, OWN_ALIAS, Account

MESSAGES = [
    {"role": "system", "content": "You are a friendly assistant."},
    {"role": "user", "content": "Where does the phrase Hello, World come from?"},
]
PROMPT = "Tell me about PEP 8."
DEFAULT_MAX_TOKENS = 256
GREEDY = {"temperature": 0}


def run(account: Account, model: str = ALIAS, **inputs: object) -> httpx.Response:
    return httpx.post(
        f"{account.v4}/accounts/{account.id}/ai/run/{model}",
        headers={"Authorization": f"Bearer {account.token}"},
        json=inputs,
        timeout=60,
    )


def test_documented_call_answers_in_the_envelope(account: Account) -> None:
    response = run(account, messages=MESSAGES)
    body = response.json()
    assert response.status_code == 200, body
    assert body.keys() == {"result", "success", "errors", "messages"}
    assert (body["success"], body["errors"], body["messages"]) == (True, [], [])
    usage = body["result"]["usage"]
    assert type(body["result"]["response"]) is str
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    assert 0 < usage["completion_tokens"] <= DEFAULT_MAX_TOKENS


def test_documented_curl_sends_json_as_a_form(account: Account) -> None:
    content = json.dumps({"prompt": PROMPT, "max_tokens": 4})
    headers = {**account.headers, "Content-Type": "application/x-www-form-urlencoded"}
    response = httpx.post(f"{account.ai}/run/{ALIAS}", headers=headers, content=content)
    assert response.status_code == 200, response.text


@pytest.mark.parametrize("model", [ALIAS, OWN_ALIAS, MODEL, ALIAS.replace("/", "%2F")])
def test_every_spelling_of_the_model_gives_the_native_text(
    account: Account, reference: Reference, model: str
) -> None:
    expected = reference.chat_text(MESSAGES, max_tokens=32, **GREEDY)
    result = run(account, model, messages=MESSAGES, max_tokens=32, **GREEDY).json()["result"]
    assert result["response"] == expected


def test_default_of_max_tokens(account: Account, reference: Reference) -> None:
    expected = reference.chat(MESSAGES, max_tokens=DEFAULT_MAX_TOKENS, **GREEDY)
    result = run(account, messages=MESSAGES, **GREEDY).json()["result"]
    assert result["response"] == expected["choices"][0]["message"]["content"]
    assert result["usage"]["completion_tokens"] == expected["usage"]["completion_tokens"]


def test_seed_gives_the_native_text(account: Account, reference: Reference) -> None:
    options = {"temperature": 0.8, "top_p": 0.9, "top_k": 40, "seed": 7, "max_tokens": 48}
    expected = reference.chat_text(MESSAGES, **options)
    assert run(account, messages=MESSAGES, **options).json()["result"]["response"] == expected


def test_prompt_is_a_user_message_and_raw_skips_the_template(
    account: Account, reference: Reference
) -> None:
    options = {"max_tokens": 24, **GREEDY}
    as_message = reference.chat_text([{"role": "user", "content": PROMPT}], **options)
    as_text = reference.completion_text(PROMPT, **options)
    assert as_message != as_text
    assert run(account, prompt=PROMPT, **options).json()["result"]["response"] == as_message
    raw = run(account, prompt=PROMPT, raw=True, **options).json()["result"]
    assert raw["response"] == as_text


@pytest.mark.parametrize("inputs", [{"messages": MESSAGES}, {"prompt": PROMPT}])
def test_streamed_text_equals_the_full_one(account: Account, inputs: dict[str, object]) -> None:
    options = {**inputs, "max_tokens": 48, **GREEDY}
    full = run(account, **options).json()["result"]
    response = run(account, stream=True, **options)
    assert response.headers["content-type"].startswith("text/event-stream")
    frames = frames_of(response.text.split("\n"))
    assert text_of(frames) == full["response"]
    assert len(frames) > 2
    usage = frames[-1]["usage"]
    for name in ("prompt_tokens", "completion_tokens", "total_tokens"):
        assert usage[name] == full["usage"][name]


def test_padding_hides_the_lengths_of_tokens(account: Account) -> None:
    response = run(account, messages=MESSAGES, max_tokens=48, stream=True, **GREEDY)
    *texts, _ = frames_of(response.text.split("\n"))
    paddings = {each["p"] for each in texts if each["response"]}
    assert all(type(each) is str for each in paddings) and len(paddings) > 1


@pytest.mark.parametrize("text", ["a text", ["a text", "another text"]])
def test_embeddings(account: Account, reference: Reference, text: str | list[str]) -> None:
    texts = [text] if isinstance(text, str) else text
    result = run(account, text=text).json()["result"]
    expected = reference.embeddings(texts, pooling="mean")
    assert result["shape"] == [len(texts), len(expected[0])]
    assert result["pooling"] == "mean"
    assert [pytest.approx(each, abs=1e-6) for each in result["data"]] == expected


def test_openai_part_has_openais_envelope(account: Account) -> None:
    body = {"model": "@cf/no/such", "messages": MESSAGES}
    url = f"{account.ai}/v1/chat/completions"
    error = httpx.post(url, headers=account.headers, json=body).json()["error"]
    assert error["code"] == "model_not_found"


@pytest.mark.parametrize(
    ("model", "inputs", "status", "code"),
    [
        ("@cf/no/such", {"messages": MESSAGES}, 400, 5007),
        (ALIAS, {}, 400, 5004),
        (ALIAS, {"messages": MESSAGES, "prompt": PROMPT}, 400, 5004),
        (ALIAS, {"messages": MESSAGES, "temperature": 5.1}, 400, 5004),
        (ALIAS, {"messages": "hello"}, 400, 5004),
        (ALIAS, {"text": ["a"] * 101}, 400, 5004),
        (ALIAS, {"messages": MESSAGES, "lora": "mine"}, 405, 5005),
        (ALIAS, {"prompt": "x" * 5_000_000}, 413, 3006),
        ("@cf%2F%2Fno", {"messages": MESSAGES}, 404, 3042),
        ("@cf/" + "x" * 10_000, {"messages": MESSAGES}, 404, 3042),
    ],
)
def test_refused_request(
    account: Account, model: str, inputs: dict[str, object], status: int, code: int
) -> None:
    check_refusal(run(account, model, **inputs), status, code)


def test_refused_bodies(account: Account) -> None:
    for content, code in ((b"", 3003), (b"{", 5004), (b"[]", 5004)):
        response = httpx.post(f"{account.ai}/run/{ALIAS}", headers=account.headers, content=content)
        check_refusal(response, 400, code)


def test_account_must_be_the_tokens(account: Account, other_account: Account) -> None:
    stranger = Account(account.url, other_account.id, account.token)
    check_refusal(run(stranger, messages=MESSAGES), 403, 10000)
    check_refusal(run(other_account, OWN_ALIAS, messages=MESSAGES), 400, 5007)
    assert run(other_account, messages=MESSAGES, max_tokens=4).status_code == 200


@pytest.mark.parametrize("headers", [{}, {"Authorization": "Bearer of nothing"}])
def test_token_is_needed(account: Account, headers: dict[str, str]) -> None:
    response = httpx.post(f"{account.ai}/run/{ALIAS}", headers=headers, json={"prompt": PROMPT})
    check_refusal(response, 401, 10000)


@pytest.mark.parametrize("path", ["finetunes", "tomarkdown", "no/such/route"])
def test_missing_route(account: Account, path: str) -> None:
    check_refusal(httpx.get(f"{account.ai}/{path}", headers=account.headers), 404, 7000)


def test_same_paths_without_the_client_root(account: Account) -> None:
    url = f"{account.url}/accounts/{account.id}/ai/run/{ALIAS}"
    body = {"messages": MESSAGES, "max_tokens": 4}
    assert httpx.post(url, headers=account.headers, json=body).status_code == 200


def check_refusal(response: httpx.Response, status: int, code: int) -> None:
    body = response.json()
    assert response.status_code == status, body
    assert [each["code"] for each in body["errors"]] == [code], body
    assert all(each["message"] for each in body["errors"])
    assert (body["result"], body["success"], body["messages"]) == (None, False, [])
