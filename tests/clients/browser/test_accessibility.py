"""Widths, keyboard, reduced motion, and axe's rules in both colour schemes."""

from __future__ import annotations

from typing import Any

import pytest
from axe_playwright_python.sync_playwright import Axe

from tests.support.hearth_page import HearthPage

VIEWS = ("#play", "#cluster", "#request")


class TestPhone:
    @pytest.fixture
    def tab_options(self) -> dict[str, Any]:
        return {"viewport": {"width": 320, "height": 640}, "has_touch": True}

    def test_no_sideways_scroll_and_large_targets(self, tab: HearthPage) -> None:
        tab.open()
        tab.answer("What is Hearth?")
        for view in VIEWS:
            tab.page.click(f"nav a[href='{view}']")
            if view == "#cluster":
                tab.page.locator(".tile").first.wait_for()
            assert tab.page.evaluate("document.documentElement.scrollWidth") <= 320, view
            small = tab.page.evaluate(
                "[...document.querySelectorAll('button, nav a, input, select')]"
                ".filter((each) => each.offsetParent && each.offsetHeight < 44)"
                ".map((each) => each.id || each.textContent)"
            )
            assert small == [], view


class TestReducedMotion:
    @pytest.fixture
    def tab_options(self) -> dict[str, Any]:
        return {"reduced_motion": "reduce"}

    def test_nothing_moves(self, tab: HearthPage) -> None:
        tab.open("#cluster")
        tab.page.locator(".tile").first.wait_for()
        assert tab.page.evaluate("document.getAnimations().length") == 0


class TestColors:
    @pytest.fixture(params=["light", "dark"])
    def tab_options(self, request: pytest.FixtureRequest) -> dict[str, Any]:
        return {"color_scheme": request.param}

    def test_axe_finds_nothing(self, tab: HearthPage) -> None:
        tab.open()
        tab.answer("What is Hearth?")
        for view in VIEWS:
            tab.page.click(f"nav a[href='{view}']")
            if view == "#cluster":
                tab.page.locator(".tile").first.wait_for()
            found = Axe().run(tab.page).response["violations"]
            report = {each["id"]: [node["html"] for node in each["nodes"]] for each in found}
            assert report == {}, view

    def test_axe_finds_nothing_in_the_reference(self, tab: HearthPage) -> None:
        page = tab.page
        page.set_viewport_size({"width": 320, "height": 640})
        tab.open("docs", has_keys=False)
        assert page.evaluate("document.documentElement.scrollWidth") <= 320
        found = Axe().run(page).response["violations"]
        assert {each["id"]: [node["html"] for node in each["nodes"]] for each in found} == {}


def test_keyboard_alone_asks_stops_and_changes_views(tab: HearthPage) -> None:
    tab.open(has_keys=False)
    keyboard = tab.page.keyboard
    assert tab.page.evaluate("document.activeElement.id") == "api-key"
    keyboard.type(tab.account.token)
    keyboard.press("Tab")
    keyboard.type(tab.account.operator_token)
    keyboard.press("Enter")
    tab.wait_until("document.querySelector('#model').options.length > 0")
    tab.page.locator("#prompt:focus").wait_for()
    tab.page.locator(".skip").focus()
    reached = set()
    for _ in range(40):
        keyboard.press("Tab")
        reached.add(tab.page.evaluate("document.activeElement.id"))
        if tab.page.evaluate("document.activeElement.id") == "prompt":
            break
        outline = "getComputedStyle(document.activeElement).outlineStyle"
        assert tab.page.evaluate(outline) == "solid"
    assert {"model", "system", "temperature", "prompt"} <= reached
    keyboard.type("What is Hearth?")
    keyboard.press("Enter")
    tab.page.locator(".workers a").wait_for()
    tab.page.locator("nav a[href='#cluster']").focus()
    keyboard.press("Enter")
    tab.page.locator(".tile").first.wait_for()
