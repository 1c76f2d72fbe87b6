"""Keys that come with a link, and from another tab; the model that is chosen at first."""

from __future__ import annotations

import json
from typing import Any
from urllib.parse import urlencode

from playwright.sync_api import Route

from tests.support.hearth_page import HearthPage


def test_link_brings_keys_and_leaves_the_address(tab: HearthPage) -> None:
    account = tab.account
    given = {"key": account.token, "operator": account.operator_token, "model": "hearth-demo"}
    tab.open(f"#{urlencode(given)}", has_keys=False)
    tab.wait_until("document.querySelector('#model').options.length > 0")
    assert tab.page.url == f"{account.url}/"
    assert tab.page.evaluate("history.length") == 2  # with about:blank
    assert not tab.page.locator("#keys").is_visible()
    assert "Hearth" in tab.answer("What is Hearth?")
    tab.page.click("nav >> text=Cluster")
    tab.page.locator(".tile").first.wait_for()
    assert not [url for url in tab.requests if account.token in url.partition("#")[0]]


def test_link_replaces_the_keys_of_an_open_page(tab: HearthPage) -> None:
    tab.open()
    tab.page.evaluate("location.hash = '#key=other'")
    tab.page.locator("#keys").get_by_text("This API key is not valid").wait_for()
    assert tab.page.evaluate("sessionStorage.getItem('hearth.api_key')") == "other"
    assert tab.page.evaluate("sessionStorage.getItem('hearth.operator_token')") is None
    assert tab.page.url == f"{tab.account.url}/"
    tab.problems.clear()  # the browser logs the 401


def test_timeline_in_a_new_tab_asks_for_nothing(tab: HearthPage) -> None:
    tab.open()
    tab.answer("What is Hearth?")
    href = tab.page.locator(".workers a").get_attribute("href")
    other = tab.page.context.new_page()
    other.goto(f"{tab.account.url}/{href}")
    other.locator(".waterfall").wait_for()
    assert not other.locator("#keys").is_visible()
    assert other.evaluate("Object.keys(localStorage)") == []


def test_timeline_needs_one_key(tab: HearthPage) -> None:
    tab.open("#request", has_keys=False)
    tab.enter_keys("", tab.account.operator_token)
    tab.page.locator("#keys").wait_for(state="hidden")
    tab.page.reload()
    tab.page.get_by_text("No request has ended yet").or_(tab.page.locator(".requests")).wait_for()
    assert not tab.page.locator("#keys").is_visible()


def test_first_model_that_can_chat_is_chosen(tab: HearthPage) -> None:
    names = ("base", "chat", "other")
    listed = json.dumps({"data": [{"id": name} for name in names]})
    rejected = json.dumps({"error": {"message": "this model has no chat template"}})

    def tokenize(route: Route) -> None:
        body: dict[str, Any] = json.loads(route.request.post_data or "")
        if body["model"] == "base":
            route.fulfill(status=400, body=rejected)
        else:
            route.fulfill(status=200, body="{}")

    tab.page.route("**/v1/models", lambda route: route.fulfill(body=listed))
    tab.page.route("**/tokenize", tokenize)
    tab.open()
    tab.wait_until("document.querySelector('#model').value === 'chat'")
    given = urlencode({"key": tab.account.token, "model": "other"})
    tab.page.evaluate(f"location.hash = '#{given}'")
    tab.wait_until("document.querySelector('#model').value === 'other'")
    assert tab.page.get_by_role("button", name="Why is the sky blue?").is_visible()
    tab.problems.clear()  # the browser logs each 400
