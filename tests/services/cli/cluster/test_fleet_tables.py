"""The tables of `hearth status` in narrow terminals, and what makes its exit status 1."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from services.cli.fleet.fleet_tables import full_cache_notes, releases_note, tables
from services.cli.fleet.rejection_table import capacity_note
from services.cli.fleet.report import FleetReport
from services.cli.fleet.times import since
from services.cli.output import text_console
from services.local.processes.supervision_log import Restarts
from shared.fleet.fleet_view import FleetView, ProcessView
from shared.fleet.host_view import ModelView
from shared.fleet.link_view import LinkView
from shared.fleet.read_fleet import (
    FleetRead,
    RecentFigures,
    RejectedCode,
    Rejection,
    ServerView,
)
from shared.fleet.tenant_views import TenantRefusal, TenantSite
from shared.messages import RoleDemand
from tests.support.grids import in_one_test

OK = ServerView(state="ok", for_s=100.0)
NOON = 12 * 3600.0


def worker(process_id: str, **fields: Any) -> ProcessView:
    load = {"num_running": 3, "num_waiting": 12, "num_free_blocks": 900, "num_total_blocks": 1024}
    known: dict[str, Any] = {
        **{"role": "decode", "state": "ready", "model": "org/a-model-of-8B", "region": "west"},
        **{"generated_per_s": 1234.5, "prefilled_per_s": 0.0, "hit_ratio": 0.5},
        **{"num_failed_steps": 0, **load},
    }
    return ProcessView(process_id=process_id, **(known | fields))


SHORT = worker("decode-4", num_out_of_memory=3, max_step_tokens=512)
LOST = worker("decode.a1b2c3d4e5f6", state="silent", state_age_s=125)
GATEWAY = ProcessView(process_id="gateway-1", role="gateway", state="ready", num_open_streams=7)
STOPPED = worker("decode-3", state="stopped", state_age_s=4)
FAILED = ModelView(
    name="org/broken", revision="0123456789abcdef", state="failed", host_id="host-1",
    device="cuda:0", host_state="ready", failure="model.safetensors: no such file",
)  # fmt: skip
COLD = msgspec.structs.replace(FAILED, state="cold", failure="")
REJECTED = tuple(
    Rejection(gateway_id="gateway-1", code=code, count=count, at=NOON - 5.0)
    for code, count in (("invalid_api_key", 1533), ("overloaded", 324))
)
BUSY = ProcessView(
    process_id="scheduler-1", role="scheduler", state="ready", num_queued_requests=275,
    oldest_wait_s=16.7,
)  # fmt: skip
DEMAND = RoleDemand(model="org/a-model-of-8B", role="decode", num_workers=2, num_wanted_workers=6)


def read(*processes: ProcessView, **fields: Any) -> FleetRead:
    servers = {"redis": OK, "nats": OK} | fields
    return FleetRead(gateway_id="gateway-1", uptime_s=9.0, processes=processes, **servers)


def report(*processes: ProcessView, **fields: Any) -> FleetReport:
    return FleetReport.of(FleetView(), read(*processes, **fields), 0.0)


@pytest.mark.parametrize(
    "releases, expected",
    [
        ({}, ""),
        ({"decode-1": "0.2.0", "decode-2": "0.2.0"}, ""),
        ({"decode-1": "0.2.0", "decode-2": ""}, ""),  # older than the field
        (
            {"b": "0.1.0", "a": "0.1.0", "c": "0.2.0", "d": "0.2.0", "e": "0.2.0"},
            "several releases: 0.1.0: a, b; 0.2.0: 3 others",
        ),
    ],
)
def test_processes_of_another_release_are_named(releases: dict[str, str], expected: str) -> None:
    rows = [worker(name, release=release) for name, release in releases.items()]
    gone = [worker("x", release="1", state="silent"), worker("y", release="2", state="stopped")]
    assert releases_note([*rows, *gone]) == expected
    console = text_console(width=200)
    with console.capture() as captured:
        console.print(tables(report(*rows, *gone), 200, NOON))
    assert ("several releases" in captured.get()) == bool(expected)


def test_links_of_prefill_workers_are_shown_with_a_port_that_failed() -> None:
    links = "1 tcp (other host, nixl failed)"
    console = text_console(width=300)
    with console.capture() as captured:
        console.print(tables(report(worker("prefill-1", kv_links=links)), 300, NOON))
    assert "KV links" in captured.get() and links in captured.get()


@pytest.mark.parametrize("width", [60, 80, 100])
def test_no_cell_is_cut_and_ids_are_whole(width: int) -> None:
    away = ServerView(state="unavailable", for_s=5.0)
    recent = RecentFigures(requests_per_s=1234.5, ttft_p50_s=0.021, ttft_p99_s=12.3456)
    shown = report(
        worker("decode-1"),
        SHORT,
        LOST,
        GATEWAY,
        redis=away,
        recent=recent,
        rejected=REJECTED,
        rejected_day=(RejectedCode(code="overloaded", count=12345, first_at=-9e4, last_at=9e3),),
    )
    again = [Restarts("redis", 2, NOON - 60)]
    full = msgspec.structs.replace(shown, demands=[DEMAND], models=[FAILED], restarts=again)
    console = text_console(width=width)
    with console.capture() as captured:
        console.print(tables(full, width, NOON))
    text = captured.get()
    lines = [" ".join(line.split()) for line in text.splitlines()]
    assert "…" not in text and max(map(len, text.splitlines())) <= width
    (lost,) = (line for line in lines if line.startswith("decode.a1b2c3d4e5f6 "))
    assert lost.endswith("lost (silent) since 11:57:55Z")
    assert any(line.startswith("decode-1 ") and line.endswith(" ready") for line in lines)
    assert "redis unavailable 11:59:55Z" in lines
    short = "decode-4 ran out of GPU memory 3 times; its steps have at most 512 tokens for now"
    assert short in " ".join(lines)
    assert "last minute: 1,234.5 requests/s, TTFT 21 ms, p99 12.3 s" in lines
    restarted = "restarted within the last hour: redis (2, last 11:59:00Z); see `hearth logs up`"
    assert restarted in " ".join(lines)
    assert "org/broken on host-1: model.safetensors: no such file" in lines
    assert "code count last gateway" in lines
    assert "invalid_api_key 1,533 11:59:55Z gateway-1" in lines
    assert "overloaded 12,345 1969-12-30 23:00:00Z 02:30:00Z" in lines
    (heading,) = (line for line in lines if " wanted " in line and "(" not in line)
    assert lines[lines.index(heading) + 1].split()[heading.split().index("wanted")] == "6"


def test_work_is_a_share_of_the_peak_or_a_rate() -> None:
    work = {"traffic_bytes_per_s": 2.1e12, "operations_per_s": 4.7e10}
    shares = worker("gpu", **work, bandwidth_ratio=0.44, arithmetic_ratio=0.0)
    console = text_console(width=200)
    with console.capture() as captured:
        console.print(tables(report(shares, worker("cpu", **work), worker("old")), 200, NOON))
    lines = [line.split("  ") for line in captured.get().splitlines()[:4]]
    heading, *rows = ([cell.strip() for cell in line if cell.strip()] for line in lines)
    first = heading.index("bandwidth")
    assert heading[first + 1] == "arithmetic"
    shown = {row[0]: row[first : first + 2] for row in rows}
    assert shown == {"gpu": ["44%", "0%"], "cpu": ["2.1 TB/s", "47 GFLOP/s"], "old": ["-", "-"]}


@in_one_test(
    ("found", "is_sound"),
    [
        (report(worker("decode-1"), GATEWAY), True),
        (report(STOPPED, GATEWAY), True),
        (report(GATEWAY, BUSY, rejected=REJECTED), True),
        (report(LOST, GATEWAY), False),
        (report(GATEWAY, redis=ServerView(state="unavailable", for_s=1.0)), False),
        (report(GATEWAY, redis=ServerView(state="new", for_s=1.0)), True),
        (report(GATEWAY, unready="no live decode worker"), False),
        (msgspec.structs.replace(report(GATEWAY), models=[FAILED]), False),
        (msgspec.structs.replace(report(GATEWAY), models=[COLD]), True),
        (FleetReport.of(FleetView(), None, 0.0), False),
    ],
)
def test_a_loss_makes_the_report_unsound(found: FleetReport, is_sound: bool) -> None:
    assert found.is_sound == is_sound


def test_lack_of_capacity_is_a_line() -> None:
    rejected = report(GATEWAY, rejected=REJECTED)
    busy = msgspec.structs.replace(report(GATEWAY, BUSY, rejected=REJECTED), demands=[DEMAND])
    assert capacity_note(report(GATEWAY, rejected=REJECTED[:1])) == ""
    assert capacity_note(rejected) == "324 requests rejected in 15 minutes for lack of capacity"
    assert capacity_note(busy) == (
        "275 requests wait, the longest 16.7 s; 324 rejected in 15 minutes for lack of capacity: "
        "add workers (wanted 6 decode)"
    )


FULL = {"num_free_blocks": 51, "num_total_blocks": 1024}


@in_one_test(
    ("rows", "notes"),
    [
        ([worker("decode-1", **FULL)], ["decode-1: KV cache full, requests wait: 12 there"]),
        (
            [worker("decode-1", **FULL), BUSY],
            ["decode-1: KV cache full, requests wait: 12 there, 275 at schedulers"],
        ),
        (
            [worker("worker-1", role="prefill+decode", num_waiting=0, **FULL), BUSY],
            ["worker-1: KV cache full, requests wait: 275 at schedulers"],
        ),
        ([worker("prefill-1", role="prefill", num_waiting=0, **FULL), BUSY], []),
        ([worker("decode-1", num_waiting=0, **FULL)], []),
        ([worker("decode-1", **{**FULL, "num_free_blocks": 52}), BUSY], []),
        ([worker("decode-1", num_free_blocks=0, num_total_blocks=0)], []),  # in standby
        ([worker("decode-1", state="silent", **FULL), BUSY], []),
    ],
)
def test_full_cache_with_waiting_requests_is_a_line(
    rows: list[ProcessView], notes: list[str]
) -> None:
    assert full_cache_notes(rows) == notes
    console = text_console(width=100)
    with console.capture() as captured:
        console.print(tables(report(*rows), 100, NOON))
    assert [each for each in captured.get().splitlines() if "KV cache full" in each] == notes


def test_time_of_an_earlier_day_has_its_date() -> None:
    assert since(60.0, NOON) == "11:59:00Z"
    assert since(NOON + 1.0, NOON) == "1969-12-31 23:59:59Z"
    assert since(None, NOON) == ""


@pytest.mark.parametrize("width", [60, 100, 200])
def test_links_and_where_the_requests_of_tenants_ran(width: int) -> None:
    links = (
        LinkView(site="b", region="us", for_s=60, round_trip_s=0.0213, sent_per_s=1234.0),
        LinkView(site="c", is_cut=True, for_s=12),
    )
    ran = tuple(
        TenantSite(tenant_id=tenant, site=site, num_requests=5)
        for tenant, site in (("t1", "a"), ("t1", "b"), *((f"u{n}", "a") for n in range(9)))
    )
    refused = (TenantRefusal(tenant_id="t1", check="decode", region="us", count=3),)
    found = report(GATEWAY, links=links, tenant_sites=ran, tenant_refusals=refused)
    assert not found.is_sound
    console = text_console(width=width)
    with console.capture() as captured:
        console.print(tables(found, width, NOON))
    shown = captured.get()
    assert "link to site c: cut for 12 s" in shown and "21.3 ms" in shown
    assert "decode 3 (us)" in shown
    assert "a 5, b 5" in shown and "and 2 other tenants: hearth status --json" in shown
    if width == 200:
        assert "1.2 kB/s" in shown and "connected since 11:59:00Z" in shown
    assert report(GATEWAY, links=links[:1]).is_sound
