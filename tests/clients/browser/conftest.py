from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from playwright.sync_api import Browser, sync_playwright

from tests.support.account import BROWSER, Account
from tests.support.hearth_page import VARIABLE, HearthPage, find_chromium, launch


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    chromium = find_chromium()
    if chromium is None:
        pytest.skip(f"no chromium on the PATH, and ${VARIABLE} is not set")
    with sync_playwright() as playwright:
        started = launch(playwright, chromium)
        yield started
        started.close()


@pytest.fixture
def browser_account(accounts: dict[str, Account]) -> Account:
    return accounts[BROWSER]


@pytest.fixture
def tab_options() -> dict[str, Any]:
    """Overridden by tests with another viewport."""
    return {"viewport": {"width": 1280, "height": 860}}


@pytest.fixture
def tab(
    browser: Browser, browser_account: Account, tab_options: dict[str, Any]
) -> Iterator[HearthPage]:
    """An unopened tab. After the test it has seen no error and no other origin."""
    context = browser.new_context(**tab_options)
    tab = HearthPage(context.new_page(), browser_account)
    yield tab
    context.close()
    tab.check_clean()
