from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.support.account import (
    ACCOUNT,
    EYES,
    LIMITED,
    MODEL,
    OTHER,
    RESTRICTED,
    Account,
    read_accounts,
)


@pytest.fixture(scope="session")
def accounts() -> dict[str, Account]:
    return read_accounts()


@pytest.fixture
def account(accounts: dict[str, Account]) -> Account:
    return accounts[ACCOUNT]


@pytest.fixture
def seeing_account(accounts: dict[str, Account]) -> Account:
    return accounts[EYES]


@pytest.fixture
def other_account(accounts: dict[str, Account]) -> Account:
    return accounts[OTHER]


@pytest.fixture
def limited_account(accounts: dict[str, Account]) -> Account:
    """The first request of a run uses up its limit."""
    return accounts[LIMITED]


@pytest.fixture
def restricted_account(accounts: dict[str, Account]) -> Account:
    return accounts[RESTRICTED]


class Reference:
    """The native API over plain HTTP: what each client's answer is compared with."""

    def __init__(self, http: httpx.Client) -> None:
        self._http = http

    def chat(self, messages: list[dict[str, Any]], **options: Any) -> dict[str, Any]:
        return self._post("/v1/chat/completions", messages=messages, **options)

    def chat_text(self, messages: list[dict[str, Any]], **options: Any) -> str:
        return self.chat(messages, **options)["choices"][0]["message"]["content"]

    def completion_text(self, prompt: str, **options: Any) -> str:
        answer = self._post("/v1/completions", prompt=prompt, **options)
        return answer["choices"][0]["text"]

    def embeddings(self, texts: list[str], **options: Any) -> list[list[float]]:
        answer = self._post("/v1/embeddings", input=texts, **options)
        return [each["embedding"] for each in answer["data"]]

    def _post(self, path: str, **body: Any) -> dict[str, Any]:
        response = self._http.post(path, json={"model": MODEL, **body})
        assert response.status_code == 200, response.text
        return response.json()


@pytest.fixture
def reference(account: Account) -> Iterator[Reference]:
    with httpx.Client(base_url=account.url, headers=account.headers, timeout=60) as http:
        yield Reference(http)
