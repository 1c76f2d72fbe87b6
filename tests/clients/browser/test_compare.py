"""Two settings side by side, tokens marked by probability, seeds, and a dry run."""

from __future__ import annotations

import json
import math
import re
from typing import Any

from playwright.sync_api import Request

from tests.support.hearth_page import HearthPage


def compare(tab: HearthPage) -> None:
    tab.open()
    tab.page.check("#compare")
    tab.page.fill("#max_tokens", "12")


def bodies_of(tab: HearthPage) -> list[dict[str, Any]]:
    """Of the requests for answers from now on."""
    found: list[dict[str, Any]] = []

    def take(request: Request) -> None:
        if "completions" in request.url:
            found.append(json.loads(request.post_data or ""))

    tab.page.on("request", take)
    return found


def test_two_settings_answer_side_by_side(tab: HearthPage) -> None:
    compare(tab)
    tab.page.fill("#max_tokens-b", "5")
    tab.page.fill("#system-b", "Answer briefly.")
    bodies = bodies_of(tab)
    tab.answer("What is Hearth?")
    first, second = tab.page.locator(".pair > .turn").all()
    assert (first.locator("strong").first.inner_text(), "12") == ("Answer A", "12")
    assert "max tokens 5" in second.locator("header").inner_text()
    left, right = first.bounding_box(), second.bounding_box()
    assert left["y"] == right["y"]
    assert left["x"] + left["width"] <= right["x"]
    by_length = {body["max_tokens"]: body for body in bodies}
    assert by_length[12]["seed"] == by_length[5]["seed"]
    assert [each["role"] for each in by_length[5]["messages"]] == ["system", "user"]
    assert [each["role"] for each in by_length[12]["messages"]] == ["user"]


def test_each_column_goes_on_with_its_own_answers(tab: HearthPage) -> None:
    compare(tab)
    tab.page.fill("#max_tokens-b", "5")
    tab.answer("What is Hearth?")
    shown = tab.page.locator(".pair .content").all_inner_texts()
    bodies = bodies_of(tab)
    tab.answer("What is the KV cache?")
    sent = {body["max_tokens"]: body["messages"][1]["content"] for body in bodies}
    assert [sent[12].split(), sent[5].split()] == [each.split() for each in shown]
    assert sent[12] != sent[5]


def test_second_setting_is_checked_and_marked(tab: HearthPage) -> None:
    compare(tab)
    tab.page.fill("#top_p-b", "2")
    tab.ask("What is Hearth?")
    assert tab.page.locator("#top_p-b").get_attribute("aria-invalid") == "true"
    assert "from 0 to 1" in tab.page.locator("#sampling-error").inner_text()
    assert not [url for url in tab.requests if "completions" in url]


def test_shown_seed_repeats_the_answer(tab: HearthPage) -> None:
    tab.open()
    tab.fill_extra('{"temperature": 1.5, "max_tokens": 24}')
    text = tab.answer("What is Hearth?")
    shown = tab.page.locator(".workers").inner_text()
    seed = re.search(r"seed (\d+)", shown)
    assert seed is not None, shown
    tab.page.click("#clear")
    tab.page.fill("#seed", seed[1])
    assert tab.answer("What is Hearth?") == text


def test_tokens_are_marked_by_probability(tab: HearthPage) -> None:
    tab.open()
    tab.page.check("#logprobs")
    tab.fill_extra('{"max_tokens": 60}')
    tab.answer("What is the KV cache?")
    content = tab.page.locator(".content").last
    tokens = content.locator("span")
    assert tokens.count() > 20
    titles = [each.get_attribute("title") or "" for each in tokens.all()]
    assert all(re.search(r'^".*" \d+\.\d %', title, re.DOTALL) for title in titles)
    assert "".join(tokens.all_text_contents()) == content.evaluate("(all) => all.textContent")
    assert "under 20 %" in tab.page.locator(".legend").inner_text()


def scored(text: str, probability: float, data: bytes | None = None) -> dict[str, Any]:
    """`data`: of a token that is a part of a character."""
    encoded = list(text.encode() if data is None else data)
    logprob = math.log(probability)
    return {"token": text, "logprob": logprob, "bytes": encoded, "top_logprobs": []}


def test_marks_follow_probabilities_and_characters_may_be_split(tab: HearthPage) -> None:
    face = "🙂".encode()
    tokens = [
        *(scored("sure", 0.95), scored(" likely", 0.6), scored(" hardly", 0.3)),
        *(scored(" <b>odd</b>", 0.1), scored("?", 0.99, face[:2]), scored("?", 0.99, face[2:])),
    ]
    text = "sure likely hardly <b>odd</b>🙂"
    choice = {"index": 0, "delta": {"content": text}, "logprobs": {"content": tokens}}
    body = f"data: {json.dumps({'choices': [choice]})}\n\ndata: [DONE]\n\n"
    tab.page.route(
        "**/v1/chat/completions",
        lambda route: route.fulfill(body=body, headers={"content-type": "text/event-stream"}),
    )
    tab.open()
    tab.page.check("#logprobs")
    assert tab.answer("Write.") == text
    content = tab.page.locator(".content")
    marked = {name: content.locator(f".{name}").all_inner_texts() for name in ("h1", "h2", "h3")}
    assert marked == {"h1": [" likely"], "h2": [" hardly"], "h3": [" <b>odd</b>"]}
    assert content.locator(".h3").get_attribute("title") == '" <b>odd</b>" 10.0 %'


def test_dry_run_tells_what_is_cached(tab: HearthPage) -> None:
    tab.open()
    question = "What is the key-value cache of a transformer, and why do servers share it? " * 4
    tab.page.fill("#prompt", question)
    bodies = bodies_of(tab)
    tab.page.click("#try-run")
    tab.page.locator(".dry-run").wait_for()
    assert bodies == []
    before = tab.page.locator(".dry-run p").inner_text()
    tab.answer(question)
    assert tab.page.locator(".dry-run").count() == 0
    tab.page.click("#clear")
    tab.page.fill("#prompt", question)
    tab.page.click("#try-run")
    tab.page.locator(".dry-run", has_text="on decode-").wait_for()
    after = tab.page.locator(".dry-run p").inner_text()
    cached = [int(text.partition(" ")[0]) for text in (before, after)]
    assert cached[0] < cached[1], (before, after)


def test_dry_run_without_a_message_sends_nothing(tab: HearthPage) -> None:
    tab.open()
    tab.page.click("#try-run")
    tab.page.get_by_text("Write a message first.").wait_for()
    assert not [url for url in tab.requests if "prefixes/dry_run" in url]
