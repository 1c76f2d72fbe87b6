from __future__ import annotations

from collections.abc import Iterator

import anthropic
import pytest

from tests.support.account import AGENTS, Account


@pytest.fixture
def agents(accounts: dict[str, Account]) -> Account:
    return accounts[AGENTS]


@pytest.fixture
def client(account: Account) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=account.url, api_key=account.token, max_retries=0) as client:
        yield client


@pytest.fixture
def agent_client(agents: Account) -> Iterator[anthropic.Anthropic]:
    """With the key as Claude Code sends $ANTHROPIC_AUTH_TOKEN."""
    with anthropic.Anthropic(
        base_url=agents.url, auth_token=agents.token, api_key=None, max_retries=0
    ) as client:
        yield client
