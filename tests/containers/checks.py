"""What must hold of a composed cluster that runs."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx

from services.cli.cluster.service_options import DEMO_MODEL_DIR
from tests.containers.engine import Engine
from tests.containers.questions import QUESTIONS, Api
from tests.support.waiting import wait_until

LIMIT_S = 120.0
SERVICES = ("nats", "redis", "kv_index", "scheduler", "prefill", "decode", "gateway")
SECRET_WORDS = ("PASSWORD", "TOKEN", "SECRET")


def check_containers(engine: Engine) -> None:
    for service in SERVICES:
        (name,) = engine.containers(service)
        found = engine.inspect(name)
        host = found["HostConfig"]
        assert host["ReadonlyRootfs"] is True, name
        assert not found.get("EffectiveCaps"), (name, found.get("EffectiveCaps"))
        assert any("no-new-privileges" in each for each in host["SecurityOpt"]), name
        assert found["Config"]["User"] not in ("", "0", "root"), name
        for variable in found["Config"]["Env"]:
            option, _, value = variable.partition("=")
            is_secret = any(word in option for word in SECRET_WORDS)
            assert not is_secret or value.startswith("/run/secrets/"), (name, option)
        processes = Path(f"/proc/{found['State']['Pid']}/status").read_text()
        assert "NoNewPrivs:\t1" in processes and "CapEff:\t0000000000000000" in processes, name


def check_snapshot(engine: Engine, image: str, folder: Path) -> None:
    """The folder of a model in the cache of huggingface_hub is mounted as a whole."""
    cached = folder / "models--org--demo"
    snapshot, blobs = cached / "snapshots" / "abc", cached / "blobs"
    snapshot.mkdir(parents=True)
    shutil.copytree(DEMO_MODEL_DIR, blobs)
    for each in blobs.iterdir():
        (snapshot / each.name).symlink_to(Path("../../blobs") / each.name)
    for each in (folder, cached):  # a temporary folder is closed to the container's user
        each.chmod(0o755)
    volume = ("--volume", f"{cached}:/model:ro")
    shown = engine.run("run", "--rm", *volume, image, "plan", "--model", "/model/snapshots/abc")
    assert "KV tokens" in shown, shown


def check_access(engine: Engine, api: Api, secrets: Path) -> None:
    operator, metrics = text_of(secrets, "operator-token"), text_of(secrets, "metrics-token")
    assert api.get("/v1/cluster").status_code in (401, 403)
    assert len(api.get("/v1/cluster", operator).json()["processes"]) >= 5
    assert api.get("/metrics", "wrong").status_code in (401, 403)
    assert "hearth_process_live" in api.get("/metrics", metrics).text
    assert api.get("/").status_code == 200
    shown = engine.run_tool("observer", "status", "--once")
    assert "decode" in shown and "prefill" in shown, shown


def check_observed(engine: Engine, api: Api) -> None:
    """Of the profile's four services these two are asked: a trace arrives at the collector's port,
    and Prometheus has the fleet of the gateway, and each process of its own port.
    """
    services = ("collector", "prometheus")
    engine.compose("--profile", "observe", "up", "--detach", "--no-build", "--no-deps", *services)
    (collector,), (prometheus,) = map(engine.containers, services)
    api.ask(QUESTIONS[0])
    wait_until(lambda: "v1/traces" in engine.run("logs", collector), timeout_s=LIMIT_S, poll_s=0.5)
    for query, least in (("hearth_process_live", 5), ("hearth_event_loop_stall_seconds", 5)):
        wait_until(
            lambda query=query, least=least: num_series(engine, query) >= least,
            timeout_s=LIMIT_S,
            poll_s=1.0,
        )
    engine.run("rm", "--force", collector, prometheus)


def num_series(engine: Engine, query: str) -> int:
    """Asks Prometheus from inside the containers' network."""
    code = (
        "import sys, json, urllib.request as u; "
        "r = u.urlopen(sys.argv[1], timeout=5); print(len(json.load(r)['data']['result']))"
    )
    url = f"http://prometheus:9090/api/v1/query?query={query}"
    (gateway,) = engine.containers("gateway")
    found = engine.run("exec", gateway, "python", "-c", code, url, is_checked=False).strip()
    return int(found or 0)


def ready_workers(api: Api, secrets: Path, role: str) -> list[str]:
    try:
        found: dict[str, Any] = api.get("/ready", text_of(secrets, "operator-token")).json()
    except (httpx.HTTPError, ValueError):
        return []
    workers: list[str] = found.get("workers", {}).get(role, [])
    return workers


def check_killed_worker(engine: Engine, api: Api, secrets: Path) -> None:
    """Kills the process of each decode container in turn: one of them has the stream."""
    expected = "".join(api.stream())
    for container in engine.containers("decode"):
        pieces = api.stream()
        received = next(pieces)
        os.kill(engine.inspect(container)["State"]["Pid"], signal.SIGKILL)
        assert received + "".join(pieces) == expected, "a stream was altered"
        wait_until(
            lambda: len(ready_workers(api, secrets, "decode")) == 2,
            timeout_s=LIMIT_S,
            poll_s=0.2,
            seen=lambda: engine.run("ps", "--all"),
        )


def check_upgrade(engine: Engine, api: Api, service: str) -> None:
    """Replaces the container of a service, as for another image, and asks again."""
    before = set(engine.containers(service))
    ids = {each: engine.inspect(each)["Id"] for each in before}
    engine.compose("up", "--detach", "--no-build", "--no-deps", "--force-recreate", service)
    wait_until(lambda: bool(_answers(api)), timeout_s=LIMIT_S, poll_s=0.2)
    for each in engine.containers(service):
        assert engine.inspect(each)["Id"] != ids.get(each), f"{each} was not replaced"


def _answers(api: Api) -> Iterator[object] | None:
    try:
        return iter([api.ask(QUESTIONS[0])])
    except httpx.HTTPError:
        return None


def text_of(secrets: Path, name: str) -> str:
    return (secrets / name).read_text().strip()
