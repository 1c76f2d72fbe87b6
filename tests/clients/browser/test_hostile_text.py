"""What a model, a worker or a request writes is shown as text, whatever it says."""

from __future__ import annotations

import json

import pytest

from tests.support.hearth_page import HearthPage

CORPUS = (
    "<img src=x onerror=alert(1)>",
    "</script><script>alert(1)</script>",
    "<a href='javascript:alert(1)'>x</a> [x](javascript:alert(1))",
    "<svg/onload=alert(1)><iframe src=//evil.example>",
    "![x](https://evil.example/x.png) <link rel=stylesheet href=//evil.example>",
    "\u202eright to left\u202c \u200bzero\u200dwidth\ufeff",
    "`__init__` and **bold <b>text</b>** in snake_case_name",
    "```html\n<script>alert(1)</script>\n```",
)
ELEMENTS = "img, script, iframe, svg, a[href^=javascript], link, object, style"


def choose(tab: HearthPage, text: str) -> None:
    """Makes the model answer with `text`."""
    extra = {"guided_choice": [text], "max_tokens": 4000, "temperature": 0}
    tab.fill_extra(json.dumps(extra))


def test_hostile_answers_stay_text(tab: HearthPage) -> None:
    tab.open()
    dialogs: list[str] = []
    tab.page.on("dialog", lambda dialog: (dialogs.append(dialog.message), dialog.dismiss()))
    for text in CORPUS:
        choose(tab, text)
        tab.answer("Write.")
        shown = tab.page.locator(".turn.assistant .content").last
        assert shown.locator(ELEMENTS).count() == 0, text
        plain = shown.evaluate("(element) => element.textContent")
        for mark in ("```html\n", "\n```", "`", "**"):
            text, plain = text.replace(mark, ""), plain.replace(mark, "")
        assert plain == text
    assert dialogs == []


def test_code_keeps_its_underscores(tab: HearthPage) -> None:
    tab.open()
    choose(tab, "Use `__init__`, `**kwargs` and snake_case_name, **bold**.")
    tab.answer("Write.")
    content = tab.page.locator(".content").last
    assert content.locator("code").all_inner_texts() == ["__init__", "**kwargs"]
    assert content.locator("strong").all_inner_texts() == ["bold"]
    assert "snake_case_name" in content.inner_text()


NAMES = ("<img src=x onerror=alert(1)>", "__proto__", "\u202egw", "a" * 200, "constructor")


def _served_cluster() -> str:
    worker = {"state": "ready", "num_running": 1, "num_waiting": 0, "num_free_blocks": 1}
    hostile = NAMES[0]
    processes = {
        name: worker | {"role": "decode", "region": hostile, "model": hostile} for name in NAMES
    }
    events = [{"number": 1, "at": 0, "kind": name, "process_id": hostile} for name in NAMES]
    model = {"name": hostile, "revision": hostile, "state": "failed", "failure": hostile}
    model |= {"host_id": hostile, "device": hostile}
    rejected = {"code": hostile, "gateway_id": hostile, "count": 1, "at": 0}
    links = [{"site": hostile, "region": hostile, "is_cut": True, "models": [hostile]}]
    lists = {"figures": None, "rejected": [rejected], "hosts": [], "models": [model], "demands": []}
    lists["links"] = links
    snapshot = {"number": 1, "gateway_id": hostile, "processes": processes, "events": events}
    snapshot |= {"samples": [], "lists": lists}
    half = 'event: delta\ndata: {"number": 2, "changed": {"x'
    return f"event: snapshot\ndata: {json.dumps(snapshot)}\n\n{half}"


def test_hostile_names_and_half_an_event_in_the_cluster(tab: HearthPage) -> None:
    """Such names cannot get into a real cluster: they are served to the page in its place."""
    tab.page.route(
        "**/v1/cluster/events",
        lambda route: route.fulfill(
            body=_served_cluster(), headers={"content-type": "text/event-stream"}
        ),
    )
    tab.open("#cluster")
    tab.page.locator(".tile").nth(len(NAMES) - 1).wait_for()
    assert set(tab.page.locator(".tile h3").all_text_contents()) == set(NAMES)
    assert tab.page.locator("#cluster").locator("img, script, iframe").count() == 0
    assert tab.page.evaluate("document.documentElement.scrollWidth <= innerWidth")


@pytest.mark.parametrize("lines", [1, 400])
def test_long_answer_stays_within_the_page(tab: HearthPage, lines: int) -> None:
    text = "\n".join(["x" * (100_000 // lines)] * lines)
    chunk = {"choices": [{"index": 0, "delta": {"content": text}, "finish_reason": "stop"}]}
    tab.page.route(
        "**/v1/chat/completions",
        lambda route: route.fulfill(
            body=f"data: {json.dumps(chunk)}\n\ndata: [DONE]\n\n",
            headers={"content-type": "text/event-stream"},
        ),
    )
    tab.open()
    tab.answer("Write.")
    shown = tab.page.locator(".content").last.evaluate("(element) => element.textContent.length")
    assert shown == len(text)
    assert tab.page.evaluate("document.documentElement.scrollWidth <= innerWidth")
