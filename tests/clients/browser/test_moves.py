"""What the page shows of an answer whose worker dies: while it streams, and afterwards."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import pytest

from tests.support.account import Account
from tests.support.hearth_page import HearthPage
from tests.support.waiting import wait_until

LONG = '{"ignore_eos": true, "temperature": 0, "max_tokens": 3000}'


def ask_long(tab: HearthPage) -> None:
    tab.fill_extra(LONG)
    tab.ask("What is Hearth?")
    tab.wait_until("document.querySelector('.assistant .content').textContent.length > 200")


def stop(tab: HearthPage) -> None:
    """Stops the answer. A request has a timeline once the gateway has seen that its client left."""
    tab.page.click("#stop-answer")
    address = tab.page.locator(".workers a").get_attribute("href") or ""
    wait_until(lambda: has_timeline(tab.account, address.removeprefix("#request/")))


def has_timeline(account: Account, request_id: str) -> bool:
    request = Request(
        f"{account.url}/v1/requests/{request_id}/timeline",
        headers={"Authorization": f"Bearer {account.token}"},
    )
    try:
        urlopen(request).close()
    except HTTPError as error:
        assert error.code == 404, error
        return False
    return True


def pid_of(account: Account, worker: str) -> int:
    """Returns the pid of a worker that may have been restarted, a sibling of decode-1."""
    parent = parent_of(account.pids["decode-1"])
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if worker in (folder / "cmdline").read_text() and parent_of(folder.name) == parent:
                return int(folder.name)
    raise LookupError(worker)


def parent_of(pid: int | str) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1]


@pytest.fixture
def frozen(tab: HearthPage) -> Any:
    """Freezes workers until the end of the test."""
    pids = []

    def freeze(worker: str) -> None:
        pids.append(pid_of(tab.account, worker))
        os.kill(pids[-1], signal.SIGSTOP)

    yield freeze
    for pid in pids:
        os.kill(pid, signal.SIGCONT)


def test_answer_shows_its_move_while_it_streams_and_its_timeline_after(
    tab: HearthPage, frozen: Any
) -> None:
    tab.open()
    ask_long(tab)
    worker = tab.serving_worker()
    other = {"decode-1": "decode-2", "decode-2": "decode-1"}[worker]
    frozen(worker)
    badge = tab.page.locator(".turn.assistant .badge.moved")
    badge.get_by_text(re.compile(r"paused · 0\.\d s")).wait_for()
    badge.get_by_text(re.compile(rf"moved to {other} · [\d.]+ s")).wait_for()
    stop(tab)  # it streams still
    line = tab.page.locator(".survived").inner_text()
    assert re.fullmatch(rf"This answer survived the loss of {worker}; pause [\d.]+ s", line)
    tab.page.locator(".workers a").click()
    heading = tab.page.locator(".fate h2").first
    heading.wait_for()
    assert heading.inner_text() == line
    waits = tab.page.locator(".fate p").inner_text()
    assert f"to see that {worker} was lost" in waits
    tab.page.get_by_role("button", name="Try 1").click()
    decode = tab.page.locator(
        ".waterfall tr:visible", has=tab.page.get_by_text("decode", exact=True)
    )
    assert "tokens" in decode.inner_text()
    assert "steps" not in decode.inner_text()


def test_stopped_answer_has_a_link_and_no_loose_ends(tab: HearthPage) -> None:
    tab.open()
    ask_long(tab)
    stop(tab)
    tab.page.get_by_text("stopped", exact=True).wait_for()
    footer = tab.page.locator(".turn.assistant footer")
    assert "Cached" not in footer.inner_text()
    assert re.fullmatch(r"seed \d+ · timeline", footer.locator(".workers").inner_text())
    footer.locator("a").click()
    tab.page.get_by_text("Its client ended this request").wait_for()


def test_tool_call_has_no_speed(tab: HearthPage) -> None:
    tab.open()
    tab.page.click("summary:text-is('Tools')")
    tab.page.click("#tools-example")
    tab.fill_extra('{"tool_choice": "required", "temperature": 0}')
    tab.answer("What is the weather in Oslo?")
    figures = tab.page.locator(".turn.assistant .figures").inner_text()
    assert "First token" in figures
    assert "Tokens/s" not in figures


def test_last_requests_are_listed_and_lead_to_their_timelines(tab: HearthPage) -> None:
    tab.open()
    with tab.page.expect_response("**/v1/chat/completions") as answered:
        tab.answer("What is Hearth?")
    request_id = answered.value.headers["x-request-id"]
    tab.page.click("nav >> text=Timeline")
    row = tab.page.locator(".requests tr", has_text=request_id)
    row.wait_for()
    assert re.search(r"\d+ → \d+", row.inner_text())
    assert "default" in row.inner_text()  # the tenant, for the operator alone
    row.locator("a").click()
    tab.page.locator(".waterfall").wait_for()
    assert tab.page.locator(".axis span").count() >= 3
    tab.page.fill("#request-id", f"chatcmpl-{request_id}")
    tab.page.click("#find-request button")
    tab.wait_until("location.hash.includes('chatcmpl')")
    tab.page.locator(".waterfall").wait_for()
    tab.page.click("#all-requests")
    row.wait_for()
    tab.enter_keys(tab.account.token, "")
    tab.page.get_by_text("The last requests of this gateway").wait_for()
    row.wait_for()
    assert "default" not in row.inner_text()


def timeline_of_two_moves() -> dict[str, Any]:
    def phase(name: str, start_s: float, duration_s: float) -> dict[str, Any]:
        return {"name": name, "process_id": "p", "start_s": start_s, "duration_s": duration_s}

    def move(left: str, to: str, pause_s: float) -> dict[str, Any]:
        return {"from_workers": [left], "cause": "worker_lost", "worker": to, "pause_s": pause_s}

    first = [phase("first_token", 0, 1), phase("decode", 1, 1), phase("recovery", 2, 1)]
    second = [phase("prefill", 3, 0.2), phase("decode", 3.2, 1), phase("recovery", 4.2, 0.1)]
    third = [phase("queue", 4.3, 2.7), phase("prefill", 7, 0.1), phase("decode", 7.1, 1)]
    return {
        "request_id": "r-1", "tenant_id": "t", "gateway_id": "g", "model": "m", "outcome": "stop",
        "started_at": 0.0, "duration_s": 8.1,
        "tries": [
            {"number": 1, "worker_id": "decode-2", "outcome": "worker_lost", "phases": first},
            {"number": 2, "worker_id": "decode-1", "outcome": "worker_lost", "phases": second,
             "move": move("decode-2", "decode-1", 1.2)},
            {"number": 3, "worker_id": "decode-3", "outcome": "finished", "phases": third,
             "move": move("decode-1", "decode-3", 2.9)},
        ],
    }  # fmt: skip


def test_headline_names_what_each_pause_waited_for(tab: HearthPage) -> None:
    body = json.dumps(timeline_of_two_moves())
    tab.page.route("**/v1/requests/r-1/timeline", lambda route: route.fulfill(body=body))
    tab.open("#request/r-1")
    tab.page.locator(".waterfall").wait_for()
    assert tab.page.locator(".fate > *").all_inner_texts() == [
        "This answer survived the loss of decode-2 and decode-1; pause 1.2 s and 2.9 s",
        "To decode-1 in 1.2 s: 1.00 s to see that decode-2 was lost and 200.0 ms for the"
        " prompt's KV.",
        "To decode-3 in 2.9 s: 2.70 s for room on a worker.",
    ]
    assert tab.page.locator(".axis span").all_inner_texts() == ["0", "2 s", "4 s", "6 s", "8 s"]
