"""Hosts and their models in the output of `hearth status`."""

from __future__ import annotations

import json
from typing import Any

import pytest

from services.cli.fleet.fleet_tables import tables
from services.cli.fleet.host_tables import size_text
from services.cli.fleet.report import FleetReport
from services.cli.output import text_console
from shared.fleet.fleet_view import FleetView
from shared.lifecycle.health import SILENCE_LIMIT_S, TICK_S
from tests.services.cli.cluster.heartbeats import GIB, host_heartbeat, hosted

HOT = hosted(
    "big", "0123456789abcdef", "hot", worker_id="worker-1.big-1", weights_bytes=GIB // 4,
    kv_bytes=3 * GIB, wake_s=0.25, start_s=3.5, hot_s=120.0, is_pinned=True, priority=7,
)  # fmt: skip
STANDBY = hosted("small", "d", "standby", worker_id="worker-1.small-1", weights_bytes=512)
FAILED = hosted("[bad]", "r1", "failed", failure="[no] config.json in /x")


def view_of(*heartbeats: object) -> FleetView:
    view = FleetView()
    for each in heartbeats:
        view.observe(each, 50.0)  # type: ignore[arg-type]
    return view


def report_of(view: FleetView) -> FleetReport:
    return FleetReport.of(view, None, 50.0)


def json_of(view: FleetView) -> dict[str, Any]:
    line: dict[str, Any] = json.loads(report_of(view).as_json())
    return line


def shown(view: FleetView) -> list[list[str]]:
    console = text_console(width=200)
    with console.capture() as captured:
        console.print(tables(report_of(view), console.width, 0.0))
    return [line.split() for line in captured.get().splitlines()]


def test_host_is_shown_with_its_devices_and_models() -> None:
    view = view_of(host_heartbeat("host-1", HOT, STANDBY, FAILED, num_devices=2))
    lines = shown(view)
    first = lines.index(["host", "region", "device", "used", "budget", "models", "state"])
    assert [" ".join(line) for line in lines[first + 1 : first + 3]] == [
        "host-1 west cuda:0 1.0 GiB 4.0 GiB 1 hot, 1 standby, 1 failed ready",
        "cuda:1 1.0 GiB 4.0 GiB",
    ]
    bad, big, small, reason, *_ = lines[-6:]
    assert bad[:2] == ["[bad]", "r1"] and bad[-1] == "failed"
    assert " ".join(reason) == "[bad] on host-1: [no] config.json in /x"
    assert big == [
        *("big", "0123456789ab", "host-1", "cpu", "west", "worker-1.big-1", "256", "MiB", "3.0"),
        *("GiB", "0.25", "3.50", "120", "7", "pinned", "hot"),
    ]
    assert small[5:] == ["worker-1.small-1", "512", "B", "-", "-", "-", "-", "0", "standby"]


def test_json_has_hosts_and_models() -> None:
    line = json_of(view_of(host_heartbeat("host-1", HOT)))
    (host,), (model,) = line["hosts"], line["models"]
    assert host["models"] == {"hot": 1} and host["devices"][0]["used_bytes"] == GIB
    assert (model["name"], model["state"], model["host_id"]) == ("big", "hot", "host-1")
    assert (model["wake_s"], model["hot_s"], model["is_pinned"]) == (0.25, 120.0, True)
    assert [row["process_id"] for row in line["services"]] == ["host-1"]


def test_without_hosts_the_output_has_no_trace_of_them() -> None:
    assert not {"hosts", "models", "roles"} & json_of(FleetView()).keys()
    assert shown(FleetView()) == [["no", "heartbeat", "received"]]


def test_models_are_ordered_by_name_and_by_what_serves() -> None:
    hosts = (("host-1", "standby"), ("host-2", "hot"), ("host-3", "cold"))
    view = view_of(*(host_heartbeat(name, hosted("m", "d", state)) for name, state in hosts))
    assert [(it.host_id, it.state) for it in view.models()] == [
        ("host-2", "hot"),
        ("host-1", "standby"),
        ("host-3", "cold"),
    ]


def test_models_of_a_silent_host_are_marked() -> None:
    view, now = view_of(host_heartbeat("host-1", STANDBY)), 50.0
    while now < 50.0 + SILENCE_LIMIT_S + 1.0:
        now += TICK_S
        view.echo(now)
        view.tick(now)
    assert " ".join(shown(view)[-3]).endswith("standby (host silent)")
    assert view.hosts()[0].state == "silent"


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [(0, "-"), (1, "1 B"), (2**10, "1.0 KiB"), (250 * 2**20, "250 MiB"), (3 * GIB // 2, "1.5 GiB")],
)
def test_sizes(num_bytes: int, text: str) -> None:
    assert size_text(num_bytes) == text
