"""What the next request repeats of a conversation in which answers fail."""

from __future__ import annotations

import json
from typing import Any

from playwright.sync_api import Route

from tests.support.hearth_page import HearthPage

COMPLETIONS = "**/v1/chat/completions"
OVERLOADED = json.dumps({"error": {"message": "The gateway is full.", "code": "overloaded"}})


def fail_requests(tab: HearthPage, *, times: int, also: str = "") -> None:
    """Answers the next requests with 503 in the gateway's place, only those with `also` in their
    bodies.
    """

    def fail(route: Route) -> None:
        if also in (route.request.post_data or ""):
            route.fulfill(status=503, body=OVERLOADED)
        else:
            route.continue_()

    tab.page.route(COMPLETIONS, fail, times=times)


def send(tab: HearthPage) -> list[dict[str, Any]]:
    """Sends what is in the composer. Returns the messages of the request."""
    with tab.page.expect_request(COMPLETIONS) as sent:
        tab.page.press("#prompt", "Enter")
    return json.loads(sent.value.post_data or "")["messages"]


def test_failed_question_returns_to_the_composer(tab: HearthPage) -> None:
    tab.open()
    fail_requests(tab, times=1)
    tab.ask("What is Hearth?")
    tab.page.get_by_text("The gateway is full.").wait_for()
    assert tab.page.locator(".turn").count() == 0
    assert tab.page.input_value("#prompt") == "What is Hearth?"
    assert send(tab) == [{"role": "user", "content": "What is Hearth?"}]
    tab.wait_for_end()
    tab.problems.clear()  # the browser logs the 503


def test_column_whose_answer_failed_has_no_two_questions_in_a_row(tab: HearthPage) -> None:
    tab.open()
    tab.page.check("#compare")
    tab.page.fill("#temperature-b", "0.5")
    fail_requests(tab, times=2, also='"temperature":0.5')
    tab.answer("What is Hearth?")
    assert tab.page.locator(".turn.user").count() == 1
    tab.page.fill("#prompt", "What is the KV cache?")
    bodies: list[dict[str, Any]] = []
    tab.page.on(
        "request", lambda each: bodies.append(json.loads(each.post_data)) if each.post_data else 0
    )
    tab.page.press("#prompt", "Enter")
    tab.page.locator(".pair").nth(1).wait_for()
    tab.wait_for_end()
    roles = {each.get("temperature"): [one["role"] for one in each["messages"]] for each in bodies}
    assert roles == {None: ["user", "assistant", "user"], 0.5: ["user"]}
    tab.problems.clear()  # the browser logs the 503
