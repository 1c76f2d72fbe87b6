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


def test_lost_answer_stays_in_sight_and_its_question_returns(tab: HearthPage) -> None:
    chunk = {"choices": [{"index": 0, "delta": {"content": "Half an"}}]}
    headers = {"content-type": "text/event-stream"}
    body = f'data: {json.dumps(chunk)}\n\ndata: {{"choices": [{{"delta"'
    tab.page.route(
        COMPLETIONS, lambda route: route.fulfill(status=200, body=body, headers=headers), times=1
    )
    tab.open()
    assert tab.answer("What is Hearth?") == "Half an"
    tab.page.get_by_text("The gateway was lost; send again.").wait_for()
    tab.page.locator(".badge", has_text="failed").wait_for()
    assert tab.page.input_value("#prompt") == "What is Hearth?"
    assert send(tab) == [{"role": "user", "content": "What is Hearth?"}]
    tab.wait_for_end()
    tab.page.route(COMPLETIONS, lambda route: route.abort(), times=1)
    tab.ask("What is the KV cache?")
    tab.page.get_by_text("The gateway was lost; send again.").wait_for()
    assert tab.page.input_value("#prompt") == "What is the KV cache?"
    tab.problems.clear()  # the browser logs the aborted request


def test_conversation_and_settings_survive_a_reload(tab: HearthPage) -> None:
    tab.open()
    text = tab.answer("What is Hearth?")
    tab.page.fill("#temperature", "0.5")
    tab.page.check("#compare")
    tab.page.fill("#prompt", "What is")
    figures = tab.page.locator(".turn.assistant footer").inner_text()
    tab.page.reload()
    tab.wait_until("document.querySelector('#questions').children.length > 0")
    assert tab.page.locator(".turn.assistant .content").inner_text() == text
    assert tab.page.locator(".turn.assistant footer").inner_text() == figures
    assert tab.page.input_value("#temperature") == "0.5"
    assert tab.page.locator("#second").is_visible()
    assert tab.page.input_value("#prompt") == "What is"
    tab.page.uncheck("#compare")
    tab.page.fill("#prompt", "What is the KV cache?")
    assert [each["content"] for each in send(tab)] == [
        "What is Hearth?",
        text,
        "What is the KV cache?",
    ]
    tab.wait_for_end()


def test_long_conversation_is_stored_in_part(tab: HearthPage) -> None:
    tab.open()
    texts = [character * 200_000 for character in "abc"]
    turns = "Promise.all([import('/page/turns.js'), {texts}]).then(([turns, texts]) => {{ {do} }})"
    do = "for (const text of texts) turns.addUser(text, () => {}); turns.save();"
    tab.page.evaluate(turns.format(texts=json.dumps(texts), do=do))
    tab.page.reload()
    tab.page.locator(".turn.user").nth(1).wait_for()
    assert tab.page.locator(".turn.user").count() == 2
    assert "a" * 20 not in tab.page.locator("#turns").inner_text()


def test_new_conversation_is_undone_and_an_answer_is_tried_again(tab: HearthPage) -> None:
    tab.open()
    text = tab.answer("What is Hearth?")
    tab.page.click("#clear")
    assert tab.page.locator(".turn").count() == 0
    tab.page.get_by_role("button", name="Undo").click()
    assert tab.page.locator(".turn").count() == 2
    with tab.page.expect_request(COMPLETIONS) as sent:
        tab.page.get_by_role("button", name="Retry").click()
    assert json.loads(sent.value.post_data or "")["messages"] == [
        {"role": "user", "content": "What is Hearth?"}
    ]
    tab.wait_for_end()
    assert tab.page.locator(".turn").count() == 2
    assert tab.page.locator(".turn.assistant .content").inner_text() == text


def test_escape_stops_an_answer(tab: HearthPage) -> None:
    tab.open()
    tab.fill_extra('{"ignore_eos": true, "max_tokens": 8000}')
    tab.ask("Count.")
    tab.wait_until("document.querySelector('.assistant .content').textContent.length")
    tab.page.keyboard.press("Escape")
    tab.page.get_by_text("stopped", exact=True).wait_for()
    assert tab.page.locator("#stop-answer").is_hidden()


def test_rejected_setting_is_marked(tab: HearthPage) -> None:
    tab.open()
    tab.page.evaluate("document.querySelector('#schema').closest('details').open = true")
    tab.page.fill("#schema", '{"type": "nothing"}')
    tab.ask("What is Hearth?")
    tab.wait_until("document.querySelector('#schema').getAttribute('aria-invalid') === 'true'")
    assert tab.page.locator("#schema-error").inner_text()
    tab.page.locator("#schema:focus").wait_for()
    assert tab.page.input_value("#prompt") == "What is Hearth?"
    tab.page.locator("#play-status a", has_text="timeline").wait_for()
    tab.problems.clear()  # the browser logs the 400


def test_question_to_begin_with_is_answered(tab: HearthPage) -> None:
    tab.open()
    question = tab.page.get_by_role("button", name="What happens when a decode worker dies?")
    question.click()
    tab.page.locator(".workers a").wait_for()
    assert "the client sees a pause" in tab.page.locator(".turn.assistant .content").inner_text()
    assert question.is_hidden()
