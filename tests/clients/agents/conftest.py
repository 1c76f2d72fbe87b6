from __future__ import annotations

import pytest

from tests.clients.account import AGENTS, Account


@pytest.fixture
def account(accounts: dict[str, Account]) -> Account:
    return accounts[AGENTS]
