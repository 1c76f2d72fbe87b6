"""Cloudflare's Python SDK, which sends the slashes of a model's name as %2F."""

from __future__ import annotations

from collections.abc import Iterator

import cloudflare
import pytest

from tests.clients.conftest import Reference
from tests.clients.sdks.events import frames_of, text_of
from tests.support.account import ALIAS, MODEL, OWN_ALIAS, Account

MESSAGES = [{"role": "user", "content": "Where does the phrase Hello, World come from?"}]
PROMPT = "Tell me about PEP 8."
OPTIONS = {"temperature": 0.8, "seed": 7, "max_tokens": 32}


def client_of(account: Account) -> cloudflare.Cloudflare:
    return cloudflare.Cloudflare(base_url=account.v4, api_token=account.token, max_retries=0)


@pytest.fixture
def client(account: Account) -> Iterator[cloudflare.Cloudflare]:
    with client_of(account) as client:
        yield client


def test_messages(client: cloudflare.Cloudflare, account: Account, reference: Reference) -> None:
    result = client.ai.run(ALIAS, account_id=account.id, messages=MESSAGES, **OPTIONS)
    assert result["response"] == reference.chat_text(MESSAGES, **OPTIONS)
    assert 0 < result["usage"]["completion_tokens"] <= 32


def test_prompt(client: cloudflare.Cloudflare, account: Account, reference: Reference) -> None:
    result = client.ai.run(ALIAS, account_id=account.id, prompt=PROMPT, raw=True, **OPTIONS)
    assert result["response"] == reference.completion_text(PROMPT, **OPTIONS)


def test_embeddings(client: cloudflare.Cloudflare, account: Account, reference: Reference) -> None:
    texts = ["a text", "another text"]
    result = client.ai.run(ALIAS, account_id=account.id, text=texts)
    expected = reference.embeddings(texts, pooling="mean")
    assert [pytest.approx(each, abs=1e-6) for each in result["data"]] == expected
    assert result["shape"] == [2, len(expected[0])]


@pytest.mark.parametrize("inputs", [{"messages": MESSAGES}, {"prompt": PROMPT}])
def test_raw_stream(
    client: cloudflare.Cloudflare, account: Account, inputs: dict[str, object]
) -> None:
    options = {"account_id": account.id, **inputs, **OPTIONS}
    full = client.ai.run(ALIAS, **options)
    with client.ai.with_streaming_response.run(ALIAS, stream=True, **options) as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        assert text_of(frames_of(response.iter_lines())) == full["response"]


async def test_async_client(account: Account, reference: Reference) -> None:
    async with cloudflare.AsyncCloudflare(
        base_url=account.v4, api_token=account.token, max_retries=0
    ) as client:
        result = await client.ai.run(ALIAS, account_id=account.id, messages=MESSAGES, **OPTIONS)
    assert result["response"] == reference.chat_text(MESSAGES, **OPTIONS)


# ── models ───────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("per_page", [1, 50])
def test_models_are_listed_page_by_page(
    client: cloudflare.Cloudflare, account: Account, per_page: int
) -> None:
    """The SDK requests the next page until one is empty."""
    rows = list(client.ai.models.list(account_id=account.id, per_page=per_page))
    assert sorted(each["name"] for each in rows) == sorted([MODEL, ALIAS, OWN_ALIAS])
    row = next(each for each in rows if each["name"] == ALIAS)
    assert row["task"]["name"] == "Text Generation"
    values = {each["property_id"]: each["value"] for each in row["properties"]}
    assert values["context_window"] == "4096"


def test_models_are_searched(client: cloudflare.Cloudflare, account: Account) -> None:
    models = client.ai.models
    found = [each["name"] for each in models.list(account_id=account.id, search="llama-4")]
    assert found == [ALIAS]
    assert list(models.list(account_id=account.id, search="no such model")) == []


def test_schema_of_a_model(client: cloudflare.Cloudflare, account: Account) -> None:
    schema = client.ai.models.schema.get(account_id=account.id, model=ALIAS)
    assert schema.input.type is not None and schema.output.type is not None


def test_tasks_and_authors(client: cloudflare.Cloudflare, account: Account) -> None:
    names = [each["name"] for each in client.ai.tasks.list(account_id=account.id)]
    assert "Text Generation" in names
    assert list(client.ai.authors.list(account_id=account.id))


# ── errors ───────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("model", "inputs", "error", "code"),
    [
        ("@cf/no/such", {"prompt": PROMPT}, cloudflare.BadRequestError, 5007),
        (ALIAS, {"prompt": PROMPT, "temperature": 5.1}, cloudflare.BadRequestError, 5004),
        (ALIAS, {"messages": []}, cloudflare.BadRequestError, 5004),
        (ALIAS, {"prompt": PROMPT, "lora": "mine"}, cloudflare.APIStatusError, 5005),
        (ALIAS, {"prompt": "x" * 5_000_000}, cloudflare.APIStatusError, 3006),
        ("@cf//no", {"prompt": PROMPT}, cloudflare.NotFoundError, 3042),
    ],
)
def test_refused_request(
    client: cloudflare.Cloudflare,
    account: Account,
    model: str,
    inputs: dict[str, object],
    error: type[cloudflare.APIStatusError],
    code: int,
) -> None:
    with pytest.raises(error) as refusal:
        client.ai.run(model, account_id=account.id, **inputs)
    assert codes_of(refusal.value) == [code]


def test_wrong_token(client: cloudflare.Cloudflare, account: Account) -> None:
    with pytest.raises(cloudflare.AuthenticationError) as refusal:
        client.with_options(api_token="wrong").ai.run(ALIAS, account_id=account.id, prompt=PROMPT)
    assert codes_of(refusal.value) == [10000]


def test_account_of_another(
    client: cloudflare.Cloudflare, other_account: Account, restricted_account: Account
) -> None:
    with pytest.raises(cloudflare.PermissionDeniedError) as refusal:
        client.ai.run(ALIAS, account_id=other_account.id, prompt=PROMPT)
    assert codes_of(refusal.value) == [10000]
    with (
        client_of(restricted_account) as restricted,
        pytest.raises(cloudflare.PermissionDeniedError) as refusal,
    ):
        restricted.ai.run(ALIAS, account_id=restricted_account.id, prompt=PROMPT)
    assert codes_of(refusal.value) == [5018]


def test_rate_limit(limited_account: Account) -> None:
    options = {"account_id": limited_account.id, "prompt": PROMPT, "max_tokens": 2}
    with client_of(limited_account) as client:
        with pytest.raises(cloudflare.RateLimitError) as refusal:
            for _ in range(2):
                client.ai.run(ALIAS, **options)
        assert codes_of(refusal.value) == [3036]
        assert 0 < int(refusal.value.response.headers["retry-after"]) <= 60


def test_missing_resources(client: cloudflare.Cloudflare, account: Account) -> None:
    for call in (client.ai.finetunes.list, client.ai.to_markdown.supported):
        with pytest.raises(cloudflare.NotFoundError) as refusal:
            call(account_id=account.id)
        assert codes_of(refusal.value) == [7000]


def codes_of(error: cloudflare.APIStatusError) -> list[int]:
    assert all(each.message for each in error.errors)
    return [each.code for each in error.errors]
