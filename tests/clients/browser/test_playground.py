"""The playground, against a cluster with the demo model."""

from __future__ import annotations

import base64
import json
import re

import pytest
from playwright.sync_api import Browser

from tests.support.account import EXPIRED, EYES, Account
from tests.support.hearth_page import HearthPage

DOT = "R0lGODlhAQABAAAAACwAAAAAAQABAAACAkQBADs="  # a picture of one pixel
# Drops it on the composer.
DROP = """(data) => {
  const bytes = Uint8Array.from(atob(data), (each) => each.charCodeAt());
  const dataTransfer = new DataTransfer();
  dataTransfer.items.add(new File([bytes], "dot.gif", { type: "image/gif" }));
  document.querySelector("#composer").dispatchEvent(new DragEvent("drop", { dataTransfer }));
}"""
TOOL_CHOICE = '{"tool_choice": "required", "temperature": 0}'


def test_answer_streams_with_its_figures(tab: HearthPage) -> None:
    tab.open()
    with tab.page.expect_request("**/v1/chat/completions") as sent:
        text = tab.answer("What is Hearth?")
    assert "Hearth is an open-source server" in text
    assert json.loads(sent.value.post_data or "")["stream"] is True
    assert sent.value.headers["authorization"] == f"Bearer {tab.account.token}"
    figures = tab.page.locator(".turn.assistant .figures").inner_text()
    assert re.search(r"First token\s+[\d.]+ (ms|s)", figures), figures
    assert re.search(r"Cached\s+\d+ of \d+", figures), figures
    workers = tab.page.locator(".workers").inner_text()
    assert re.search(r"decode decode-\d", workers), workers
    assert tab.page.locator(".workers a").get_attribute("href").startswith("#request/")


def test_dropped_picture_goes_with_the_question(tab: HearthPage) -> None:
    tab.open()
    tab.page.evaluate(DROP, DOT)
    tab.page.locator(".composer img").wait_for()
    with tab.page.expect_request("**/v1/chat/completions") as sent:
        tab.ask("What is it?")
    image, text = json.loads(sent.value.post_data or "")["messages"][0]["content"]
    assert image["image_url"]["url"].startswith("data:image/gif;base64,R0lGOD")
    assert text == {"type": "text", "text": "What is it?"}
    tab.page.get_by_text("this model takes no images").wait_for()
    assert tab.page.input_value("#prompt") == "What is it?"
    tab.page.click(".composer .picture")  # it came back with its question
    assert tab.page.locator(".composer img").count() == 0
    tab.problems.clear()  # the browser logs the 400


def test_model_that_takes_images_offers_a_picture(
    browser: Browser, tab: HearthPage, accounts: dict[str, Account]
) -> None:
    tab.open()
    tab.wait_until("document.querySelector('#model').options.length > 0")
    assert tab.page.locator("#picture").is_hidden()
    context = browser.new_context()
    seeing = HearthPage(context.new_page(), accounts[EYES])
    seeing.open()
    with seeing.page.expect_file_chooser() as chooser:
        seeing.page.click("#picture")
    dot = base64.b64decode(DOT)
    chooser.value.set_files({"name": "dot.gif", "mimeType": "image/gif", "buffer": dot})
    seeing.page.locator(".composer img").wait_for()
    with seeing.page.expect_request("**/v1/chat/completions") as sent:
        seeing.answer("What is it?")
    image, _ = json.loads(sent.value.post_data or "")["messages"][0]["content"]
    assert image["image_url"]["url"] == f"data:image/gif;base64,{DOT}"
    context.close()
    seeing.check_clean()


def test_finished_sentences_are_spoken(tab: HearthPage) -> None:
    tab.open()
    text = tab.answer("What is Hearth?")
    assert tab.page.locator("#turns").get_attribute("aria-live") == "off"
    assert tab.page.locator("#spoken").inner_text().strip() in text


def test_stop_ends_the_answer_and_frees_the_worker(tab: HearthPage) -> None:
    tab.open()
    tab.fill_extra('{"ignore_eos": true, "max_tokens": 8000}')
    tab.ask("Count.")
    tab.wait_until("document.querySelector('.assistant .content').textContent.length")
    tab.page.click("#stop-answer")
    tab.page.get_by_text("stopped", exact=True).wait_for()
    tab.page.click("nav >> text=Cluster")
    tab.page.locator(".tile").first.wait_for()
    tab.wait_until(
        "[...document.querySelectorAll('.tile')].every((tile) =>"
        " /\\b0 running/.test(tile.innerText))"
    )


def test_turn_is_edited_and_run_again(tab: HearthPage) -> None:
    tab.open()
    tab.answer("What is Hearth?")
    tab.answer("What is the KV cache?")
    tab.page.get_by_role("button", name="Edit").first.click()
    assert tab.page.locator(".turn").count() == 0
    assert tab.page.input_value("#prompt") == "What is Hearth?"
    assert "Hearth" in tab.answer("What is Hearth?")
    assert tab.page.locator(".turn").count() == 2


def test_tool_call_is_shown_and_takes_a_result(tab: HearthPage) -> None:
    tab.open()
    tab.page.click("summary:text-is('Tools')")
    tab.page.click("#tools-example")
    tab.fill_extra(TOOL_CHOICE)
    tab.answer("What is the weather in Oslo?")
    call = tab.page.locator(".call").first
    assert "get_weather" in call.inner_text()
    assert json.loads(call.locator("pre").inner_text())["city"] in ("Lisbon", "Oslo")
    tab.fill_extra("")
    tab.page.fill("input[aria-label='Result of get_weather'] >> nth=0", "sunny")
    with tab.page.expect_request("**/v1/chat/completions") as sent:
        tab.page.get_by_role("button", name="Send results").click()
    messages = json.loads(sent.value.post_data or "")["messages"]
    assert [each["role"] for each in messages][:3] == ["user", "assistant", "tool"]
    assert messages[2]["content"] == "sunny"
    tab.wait_for_end()


def test_answer_in_a_schema_has_a_badge(tab: HearthPage) -> None:
    tab.open()
    tab.page.click("summary:text-is('JSON schema of the answer')")
    tab.page.click("#schema-example")
    json.loads(tab.answer("Rate the KV cache."))
    assert tab.page.locator(".badge.good").inner_text() == "valid JSON"


@pytest.mark.parametrize(
    ("box", "text", "place"),
    [
        ("tools", '[{"type": "function",\n  oops}]', "Line 2, column 3"),
        ("schema", '{"type": ', "Line 1, column 10"),
        ("extra", "[1]", "JSON object"),
        ("temperature", "warm", "a number from 0 to 2"),
        ("top_k", "1.5", "a whole number"),
    ],
)
def test_bad_setting_is_marked_and_nothing_is_sent(
    tab: HearthPage, box: str, text: str, place: str
) -> None:
    tab.open()
    tab.page.evaluate(f"document.querySelector('#{box}').closest('details').open = true")
    tab.page.fill(f"#{box}", text)
    tab.ask("What is Hearth?")
    field = tab.page.locator(f"#{box}")
    assert field.get_attribute("aria-invalid") == "true"
    assert field.evaluate("(element) => element === document.activeElement")
    error = "sampling" if box in ("temperature", "top_k") else box
    assert place in tab.page.locator(f"#{error}-error").inner_text()
    assert not [url for url in tab.requests if "completions" in url]
    assert tab.page.input_value("#prompt") == "What is Hearth?"


def test_wrong_key_asks_for_another_and_keys_stay_in_the_tab(tab: HearthPage) -> None:
    tab.open(has_keys=False)
    with tab.page.expect_response("**/v1/models") as response:
        tab.enter_keys("wrong", "")
    assert response.value.status == 401
    dialog = tab.page.locator("#keys")
    dialog.get_by_text("This API key is not valid").wait_for()
    assert tab.page.evaluate("Object.keys(sessionStorage)") == []
    tab.enter_keys(tab.account.token, "wrong")
    dialog.get_by_text("This operator token is not valid").wait_for()
    tab.problems.clear()  # the browser logs each 401
    tab.enter_keys(tab.account.token, "")
    dialog.wait_for(state="hidden")
    tab.page.locator("#prompt:focus").wait_for()
    assert tab.page.evaluate("Object.keys(localStorage)") == []
    assert tab.page.evaluate("document.cookie") == ""
    assert tab.page.evaluate("Object.keys(sessionStorage)") == ["hearth.api_key"]
    assert not [url for url in tab.requests if "wrong" in url]


def test_expired_key_asks_for_another_and_the_conversation_goes_on(
    tab: HearthPage, accounts: dict[str, Account]
) -> None:
    tab.open()
    tab.answer("What is Hearth?")
    expired = json.dumps(accounts[EXPIRED].token)
    tab.page.evaluate(f"sessionStorage.setItem('hearth.api_key', {expired})")
    tab.ask("What is the KV cache?")
    tab.page.locator("#keys").get_by_text("This API key is not valid").wait_for()
    assert tab.page.locator(".turn.assistant").count() == 1
    tab.enter_keys(tab.account.token, "")
    tab.page.click("#send")
    tab.page.locator(".workers a").nth(1).wait_for()
    tab.problems.clear()  # the browser logs each 401


def test_parameters_of_the_address_send_nothing(tab: HearthPage) -> None:
    tab.open()
    tab.page.goto(f"{tab.account.url}/?q=hello&prompt=hello#play/hello")
    tab.wait_until("document.querySelector('#model').options.length > 0")
    assert tab.page.input_value("#prompt") == ""
    assert not [url for url in tab.requests if "completions" in url]


def test_copied_program_has_no_key(tab: HearthPage) -> None:
    tab.page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    tab.open()
    tab.page.fill("#prompt", "It's a test")
    programs = {
        "curl": "curl -N",
        "Python": "from openai import",
        "JavaScript": 'from "openai"',
    }
    for name, expected in programs.items():
        tab.page.get_by_role("button", name=f"Copy as {name}").click()
        tab.wait_until("document.querySelector('#copied').textContent")
        tab.page.evaluate("document.querySelector('#copied').textContent = ''")
        program = tab.page.evaluate("navigator.clipboard.readText()")
        assert expected in program
        assert tab.account.token not in program
        assert "HEARTH_API_KEY" in program


def serve(tab: HearthPage, status: int, body: str, **headers: str) -> None:
    """Answers chat completions in the gateway's place."""
    tab.page.route(
        "**/v1/chat/completions",
        lambda route: route.fulfill(status=status, body=body, headers=headers),
    )


def test_thinking_is_folded(tab: HearthPage) -> None:
    deltas = ({"reasoning_content": "Let me <b>think</b>."}, {"content": "Done."})
    chunks = [{"choices": [{"index": 0, "delta": delta}]} for delta in deltas]
    body = "".join(f"data: {json.dumps(each)}\n\n" for each in chunks) + "data: [DONE]\n\n"
    serve(tab, 200, body, **{"content-type": "text/event-stream"})
    tab.open()
    assert tab.answer("Think.") == "Done."
    thinking = tab.page.locator(".thinking")
    assert thinking.get_attribute("open") is None
    assert not thinking.locator(".plain").is_visible()
    thinking.locator("summary").click()
    assert thinking.locator(".plain").inner_text() == "Let me <b>think</b>."


def test_rejected_request_counts_down(tab: HearthPage) -> None:
    error = {"error": {"message": "Too many requests.", "code": "rate_limited"}}
    serve(tab, 429, json.dumps(error), **{"retry-after": "7"})
    tab.open()
    tab.ask("What is Hearth?")
    tab.page.get_by_text("Too many requests. Try again in 7 s.").wait_for()
    tab.page.get_by_text("Try again in 6 s.").wait_for()
    assert tab.page.locator(".turn.assistant").count() == 0
    tab.problems.clear()  # the browser logs the 429
