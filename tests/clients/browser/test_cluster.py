"""The cluster's view while workers freeze and die, and a request's timeline."""

from __future__ import annotations

import json
import os
import signal
from typing import Any

from tests.support.account import EXPIRED
from tests.support.hearth_page import HearthPage


def tile(tab: HearthPage, worker: str) -> Any:
    return tab.page.locator(".tile", has=tab.page.get_by_role("heading", name=worker, exact=True))


def wait_for_state(tab: HearthPage, worker: str, text: str, timeout_ms: float = 20_000) -> None:
    found = tile(tab, worker).locator(".state", has_text=text)
    found.wait_for(timeout=timeout_ms)


def test_workers_are_tiles_and_rows(tab: HearthPage) -> None:
    tab.open("#cluster")
    for worker in ("prefill-1", "decode-1", "decode-2"):
        wait_for_state(tab, worker, "ready")
    tab.page.click("#as-table summary")
    rows = tab.page.locator("#table-body th[scope=row]")
    rows.first.wait_for()
    names = set(rows.all_inner_texts())
    assert {"gateway-1", "scheduler-1", "kv_index-1", "decode-1"} <= names
    assert "index exact" in tab.page.locator("#flow").inner_text()


def test_cluster_without_operator_token_says_so(tab: HearthPage) -> None:
    tab.open(has_keys=False)
    tab.enter_keys(tab.account.token, "")
    tab.page.click("nav >> text=Cluster")
    tab.page.get_by_text("enter the operator token").wait_for()
    tab.enter_keys(tab.account.token, "wrong")
    tab.page.locator("#keys").get_by_text("This operator token is not valid").wait_for()
    tab.problems.clear()  # the browser logs each 401


def test_frozen_worker_is_shown_and_comes_back(tab: HearthPage) -> None:
    tab.open("#cluster")
    wait_for_state(tab, "decode-1", "ready")
    pid = tab.account.pids["decode-1"]
    os.kill(pid, signal.SIGSTOP)
    try:
        wait_for_state(tab, "decode-1", "silent")
        event = tab.page.locator("#events li", has_text="decode-1").first
        assert "silent" in event.inner_text()
    finally:
        os.kill(pid, signal.SIGCONT)
    wait_for_state(tab, "decode-1", "ready")


def test_killed_worker_is_shown(tab: HearthPage) -> None:
    tab.open("#cluster")
    wait_for_state(tab, "decode-2", "ready")
    os.kill(tab.account.pids["decode-2"], signal.SIGKILL)
    tab.page.locator("#events li", has_text="decode-2").locator(".bad").first.wait_for()


def test_page_comes_back_after_a_restart_of_the_gateway(tab: HearthPage) -> None:
    tab.open("#cluster")
    wait_for_state(tab, "decode-1", "ready")
    os.kill(tab.account.pids["gateway-1"], signal.SIGKILL)
    tab.page.get_by_text("The gateway does not answer; trying again").wait_for()
    assert tab.page.locator(".stale").count() == 1
    tab.page.locator("#cluster-body:not(.stale)").wait_for(timeout=60_000)
    wait_for_state(tab, "decode-1", "ready", 60_000)
    tab.page.click("nav >> text=Playground")
    tab.wait_until("document.querySelector('#model').options.length > 0")
    assert "Hearth" in tab.answer("What is Hearth?")
    tab.problems.clear()  # the browser logs each refused connection


def test_tenants_are_listed_with_their_use(tab: HearthPage) -> None:
    tab.open()
    tab.answer("What is Hearth?")
    tab.page.click("nav >> text=Cluster")
    tab.page.click("#tenants summary")
    row = tab.page.locator("#tenants-body tr", has_text="default")
    row.wait_for()
    assert tab.page.locator("#tenants-body tr", has_text=EXPIRED).locator(".bar").count() == 1
    assert "of 60 requests/min" in tab.page.locator("#tenants-body").inner_text()
    tab.wait_until(
        "[...document.querySelectorAll('#tenants-body tr')].some((row) =>"
        " ![row.cells[1], row.cells[4]].some((cell) => cell.textContent === '0'))"
    )


def phase(name: str, start_s: float, duration_s: float, **more: Any) -> dict[str, Any]:
    process = "gateway-1" if name in ("validate", "submit") else "decode-1"
    return {
        "name": name,
        "process_id": process,
        "start_s": start_s,
        "duration_s": duration_s,
    } | more


def served_timeline() -> dict[str, Any]:
    first = [phase("queue", 0.02, 0.03), phase("prefill", 0.05, 0.1, num_tokens=900)]
    second = [phase("kv_push", 0.3, 0.2, num_bytes=2_800_000), phase("decode", 0.5, 0.5)]
    return {
        "request_id": "r-1", "tenant_id": "default", "gateway_id": "<b>gateway</b>",
        "model": "hearth-demo", "outcome": "stop", "started_at": 0.0, "duration_s": 1.0,
        "ttft_s": 0.5, "num_prompt_tokens": 900,
        "gateway_phases": [phase("validate", 0.0, 0.01), phase("submit", 0.01, 0.01)],
        "tries": [
            {"number": 1, "worker_id": "decode-1", "outcome": "worker lost", "phases": first},
            {"number": 2, "worker_id": "decode-2", "outcome": "stop", "phases": second},
        ],
    }  # fmt: skip


def test_timeline_is_drawn_to_scale(tab: HearthPage) -> None:
    tab.page.route(
        "**/v1/requests/r-1/timeline",
        lambda route: route.fulfill(body=json.dumps(served_timeline())),
    )
    tab.open("#request/r-1")
    tab.page.locator(".waterfall").wait_for()
    assert tab.page.locator(".try").count() == 3
    assert "<b>gateway</b>" in tab.page.locator(".try").first.inner_text()
    bars = tab.page.locator(".waterfall .phase")
    assert bars.count() == 6
    track = tab.page.locator(".track").last.bounding_box()
    bar = bars.last.bounding_box()
    assert abs(bar["width"] / track["width"] - 0.5) < 0.02
    assert abs((bar["x"] - track["x"]) / track["width"] - 0.5) < 0.02
    assert "2.8 MB" in tab.page.locator(".waterfall").inner_text()


def test_unknown_request_says_so(tab: HearthPage) -> None:
    tab.open("#request/unknown")
    tab.page.get_by_text("This gateway does not know the request").wait_for()
    tab.problems.clear()  # the browser logs the 404
