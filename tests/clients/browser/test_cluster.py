"""The cluster's view while workers freeze and die, and a request's timeline."""

from __future__ import annotations

import json
import os
import signal
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

from tests.support.account import EXPIRED, Account
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
    assert "index exact" in tab.page.locator("#totals").inner_text()


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
        event = tab.page.locator("#losses li", has_text="decode-1").first
        assert "silent" in event.inner_text()
    finally:
        os.kill(pid, signal.SIGCONT)
    wait_for_state(tab, "decode-1", "ready")
    for _ in range(65):
        assert rejected_status(tab.account) == 400
    row = tab.page.locator("#rejected li", has_text="invalid request")
    row.filter(has_text="by gateway-1, last").wait_for()
    tab.wait_until("parseInt(document.querySelector('#rejected b').textContent) >= 65")
    assert row.count() == 1
    assert tab.page.locator("#losses li", has_text="silent").count() >= 1


def test_operator_freezes_a_worker_by_keyboard(tab: HearthPage) -> None:
    tab.open("#cluster")
    wait_for_state(tab, "decode-1", "ready")
    tile(tab, "decode-1").locator("summary").focus()
    tab.page.keyboard.press("Enter")
    tab.page.keyboard.press("Tab")
    tab.page.keyboard.press("Tab")
    focused = tab.page.evaluate("document.activeElement.textContent")
    assert focused == "Freeze decode-1 for 30 s"
    tab.page.keyboard.press("Enter")
    try:
        tab.page.get_by_text("decode-1 is frozen for 30 s.").wait_for()
        wait_for_state(tab, "decode-1", "silent")
        tab.page.locator("#losses li", has_text="by an operator").first.wait_for()
    finally:
        os.kill(tab.account.pids["decode-1"], signal.SIGCONT)
    wait_for_state(tab, "decode-1", "ready")


def rejected_status(account: Account) -> int:
    """Sends a request without messages."""
    body = json.dumps({"model": "hearth-demo", "messages": []}).encode()
    headers = account.headers | {"content-type": "application/json"}
    try:
        urlopen(Request(f"{account.url}/v1/chat/completions", body, headers))
    except HTTPError as error:
        return error.code
    return 200


def test_headline_shows_what_the_gateway_kept(tab: HearthPage) -> None:
    tab.open()
    tab.answer("What is Hearth?")
    tab.page.click("nav >> text=Cluster")
    tab.page.locator("#headline li").nth(5).wait_for()
    first = tab.page.locator("#headline li", has_text="Time to first token")
    first.locator("b", has_text="ms").wait_for(timeout=20_000)
    assert " p99" in first.inner_text() and "15 min" in first.inner_text()
    label = first.locator("svg").get_attribute("aria-label")
    assert label is not None and label.startswith("Time to first token, last 15 minutes")
    tab.page.reload()  # the samples are the gateway's
    tab.page.locator("#headline svg[aria-label]").first.wait_for()
    assert first.locator("b", has_text="ms").count() == 1


def served_cluster() -> dict[str, Any]:
    worker = {"role": "decode", "num_running": 0, "num_waiting": 0, "num_free_blocks": 0}
    worker |= {"model": "parked", "revision": "r1"}
    standby = worker | {"state": "standby", "num_total_blocks": 0}
    site = {"state": "ready", "num_total_blocks": 4, "kv_bytes": 268_435_456, "device": "sm90"}
    model = {"revision": "r1", "host_id": "host-1", "device": "cuda:0", "host_state": "ready"}
    parked = model | {"name": "parked", "state": "standby", "worker_id": "w-1", "wake_s": 0.3}
    broken = model | {"name": "broken", "state": "failed", "failure": "no such file"}
    device = {"device": "cuda:0", "budget_bytes": 80_000_000_000, "used_bytes": 20_000_000_000}
    lists = {
        "figures": None, "rejected": [], "demands": [
            {"model": "parked", "role": "decode", "num_workers": 1, "num_wanted_workers": 3}],
        "hosts": [{"process_id": "host-1", "state": "ready", "devices": [device],
                   "models": {"standby": 1, "failed": 1}}],
        "models": [parked, broken],
        "links": [  # fields of their default are missing
            {"site": "b", "region": "us", "for_s": 7200, "round_trip_s": 0.02, "sent_per_s": 1500},
            {"site": "c", "is_cut": True, "for_s": 12, "num_placed": 3}],
    }  # fmt: skip
    events = [
        {"number": 1, "at": 86_400.0, "kind": "moved", "process_id": "w-2", "count": 3,
         "gateway_id": "gateway-1"},
        {"number": 2, "at": 86_400.0, "kind": "role changed", "process_id": "w-2",
         "detail": "prefill → decode"},
    ]  # fmt: skip
    fast = worker | site | {"host": "site-a", "release": "9.9", "started_at": 0}
    return {
        "number": 1, "gateway_id": "gateway-1", "processes": {"w-1": standby, "w-2": fast},
        "events": events, "samples": [], "lists": lists,
    }  # fmt: skip


def test_parked_and_failed_models_hosts_and_roles_are_shown(tab: HearthPage) -> None:
    body = f"event: snapshot\ndata: {json.dumps(served_cluster())}\n\n"
    tab.page.route(
        "**/v1/cluster/events",
        lambda route: route.fulfill(body=body, headers={"content-type": "text/event-stream"}),
    )
    tab.open("#cluster")
    wait_for_state(tab, "w-1", "standby")
    parked = tile(tab, "w-1").inner_text()
    assert "wakes in about 300.0 ms" in parked and "KV" not in parked
    other = tile(tab, "w-2").inner_text()
    assert all(each in other for each in ("sm90", "site-a", "9.9", "100 % of 268 MB"))
    sections = tab.page.locator("#sections").inner_text()
    assert "no such file" in sections and "20.0 GB of 80.0 GB" in sections
    assert tab.page.locator("#sections tr", has_text="parked").last.inner_text().split() == [
        *("parked", "decode", "1", "3", "0")
    ]
    assert "connected for 2 h" in sections and "1.5 kB/s" in sections
    assert "cut for 12 s" in sections
    losses = tab.page.locator("#losses li").inner_text()
    assert "3 streams moved" in losses and "from w-2, by gateway-1" in losses
    assert "2 Jan" in losses
    assert "w-2: prefill → decode" in tab.page.locator("#events").inner_text()


def test_killed_worker_is_shown(tab: HearthPage) -> None:
    tab.open("#cluster")
    wait_for_state(tab, "decode-2", "ready")
    os.kill(tab.account.pids["decode-2"], signal.SIGKILL)
    tab.page.locator("#losses li", has_text="decode-2").locator(".bad").first.wait_for()


def test_page_comes_back_after_a_restart_of_the_gateway(tab: HearthPage) -> None:
    tab.open("#cluster")
    wait_for_state(tab, "decode-1", "ready")
    joined = tab.page.locator("#events li", has_text="decode-1").last.inner_text()
    os.kill(tab.account.pids["gateway-1"], signal.SIGKILL)
    tab.page.get_by_text("The gateway does not answer; trying again").wait_for()
    assert tab.page.locator(".stale").count() == 1
    tab.page.locator("#cluster-body:not(.stale)").wait_for(timeout=60_000)
    wait_for_state(tab, "decode-1", "ready", 60_000)
    assert joined in tab.page.locator("#events li").all_inner_texts()  # from Redis
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
    assert tab.page.locator(".try .phase").count() == 6
    assert tab.page.locator(".waterfall .phase:visible").count() == 6
    tab.page.get_by_role("button", name="Try 2").click()
    bars = tab.page.locator(".waterfall .phase:visible")
    assert bars.count() == 8
    track = tab.page.locator(".track").last.bounding_box()
    bar = bars.last.bounding_box()
    assert abs(bar["width"] / track["width"] - 0.5) < 0.02
    assert abs((bar["x"] - track["x"]) / track["width"] - 0.5) < 0.02
    assert "2.8 MB" in tab.page.locator(".waterfall").inner_text()


def test_unknown_request_says_so(tab: HearthPage) -> None:
    tab.open("#request/unknown")
    tab.page.get_by_text("This gateway does not know the request").wait_for()
    tab.problems.clear()  # the browser logs the 404
