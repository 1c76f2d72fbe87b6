from __future__ import annotations

import dataclasses

import pytest

from tests.support.account import ACCOUNT, AGENTS, Account


@pytest.fixture
def account(accounts: dict[str, Account]) -> Account:
    return dataclasses.replace(accounts[AGENTS], id=ACCOUNT)  # its name in paths
