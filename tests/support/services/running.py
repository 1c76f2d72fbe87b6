"""Starts `hearth` processes of a test and finds them by the state directory that they share."""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from services.gateway.tenancy.usage_counter import day_of
from services.local.state import LocalClusterState, clusters_dir, running_cluster
from shared.clock import MonotonicClock
from shared.errors import ConfigError
from shared.store import RedisStore
from shared.tenancy.tenant import TenantRecord, UsageRow
from shared.tenancy.tenant_admin import TenantAdmin
from tests.support.waiting import LIMIT_S, wait_until

ROOT = Path(__file__).parents[3]
LAST_LINE = "Ctrl-C stops everything\n"  # of `hearth up` when it is ready
STOP_S = 60.0
WAIT_S = 300.0  # the first start compiles kernels


def environ_for(state_home: Path) -> dict[str, str]:
    clean = {name: value for name, value in os.environ.items() if not name.startswith("HEARTH_")}
    return {**clean, "XDG_STATE_HOME": str(state_home), "PYTHONPATH": str(ROOT), "COLUMNS": "200"}


def start_hearth(state_home: Path, *arguments: str, **environ: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "services", *arguments],
        env={**environ_for(state_home), **environ},
        cwd=ROOT,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def read_until(process: subprocess.Popen[str], end: str, timeout_s: float = WAIT_S) -> str:
    """Returns what a process prints until `end`, and what comes with it. The rest stays for
    `communicate`. Raises AssertionError if the process ends before.
    """
    assert process.stdout is not None
    descriptor, deadline = process.stdout.fileno(), time.monotonic() + timeout_s
    output = b""
    while end.encode() not in output:
        readable, _, _ = select.select([descriptor], [], [], max(0, deadline - time.monotonic()))
        data = os.read(descriptor, 1 << 16) if readable else b""
        assert data, f"no {end!r} in {output.decode()}"
        output += data
    return output.decode()


def run_hearth(
    state_home: Path, *arguments: str, text: str | None = None
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "services", *arguments],
        env=environ_for(state_home),
        cwd=ROOT,
        input="" if text is None else text,
        capture_output=True,
        text=True,
        timeout=WAIT_S,
    )


def processes_of(state_home: Path) -> dict[int, str]:
    """Returns command lines, by pid, of the live processes that were started with this
    state directory.

    redis-server overwrites its environment with its title; its working directory identifies it.
    """
    variable = f"XDG_STATE_HOME={state_home}".encode()
    found = {}
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            is_inside = (entry / "cwd").readlink().is_relative_to(state_home)
            if is_inside or variable in (entry / "environ").read_bytes().split(b"\0"):
                line = (entry / "cmdline").read_bytes().decode()
                if line:  # it has not ended meanwhile
                    found[int(entry.name)] = line
        except OSError:
            continue  # the process ended, or belongs to another user
    return found


def eventually(predicate: Callable[[], Any], event: str, timeout_s: float = WAIT_S) -> Any:
    """Polls until the predicate returns a true value, and returns this value."""
    return wait_until(predicate, timeout_s=timeout_s, poll_s=0.02, seen=lambda: f"no {event}")


def cluster_of(state_home: Path) -> tuple[Path, LocalClusterState] | None:
    try:
        return running_cluster(clusters_dir({"XDG_STATE_HOME": str(state_home)}))
    except ConfigError:
        return None


@contextmanager
def up(
    state_home: Path, *arguments: str, timeout_s: float = WAIT_S, **environ: str
) -> Iterator[LocalClusterState]:
    """Runs `hearth up` on a free port until the block ends. Raises RuntimeError if it ends
    before.
    """
    process = start_hearth(state_home, "up", "--http", "127.0.0.1:0", *arguments, **environ)
    try:
        found = eventually(
            lambda: cluster_of(state_home) or process.poll() is not None, "up", timeout_s
        )
        if not isinstance(found, tuple):
            raise RuntimeError(process.communicate()[0])
        yield found[1]
    finally:
        process.terminate()
        try:
            process.communicate(timeout=STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()


def ready(state: LocalClusterState) -> dict[str, Any]:
    """Returns the operator's body of /ready; empty while the gateway is not ready."""
    headers = {"Authorization": f"Bearer {state.operator_token}"}
    request = urllib.request.Request(f"{state.url}/ready", headers=headers)
    try:
        with urllib.request.urlopen(request, timeout=2) as response:
            return json.load(response)
    except (urllib.error.URLError, OSError):
        return {}


class NoModel(Exception):
    """The gateway has no model yet."""


def complete(url: str, api_key: str) -> dict[str, Any]:
    """Requests one chat completion of 8 tokens, not streamed. Raises OSError or NoModel."""
    headers = {"Authorization": f"Bearer {api_key}", "Content-Type": "application/json"}
    models = urllib.request.Request(f"{url}/v1/models", headers=headers)
    with urllib.request.urlopen(models, timeout=10) as response:
        served = json.load(response)["data"]
    if not served:
        raise NoModel
    body = {
        "model": served[0]["id"],
        "messages": [{"role": "user", "content": "Hello"}],
        "max_tokens": 8,
        "ignore_eos": True,
    }
    request = urllib.request.Request(
        f"{url}/v1/chat/completions", data=json.dumps(body).encode(), headers=headers
    )
    with urllib.request.urlopen(request, timeout=30) as response:
        return json.load(response)


async def add_tenants(
    redis_url: str, tenants: Mapping[str, Mapping[str, Any]], keys: Mapping[str, str]
) -> None:
    store = RedisStore(redis_url, MonotonicClock(), timeout_s=LIMIT_S)
    for name, limits in tenants.items():
        await TenantAdmin(store, time.time).add(name, limits, keys[name])
    await store.close()


async def records_of(
    redis_url: str, tenant_ids: Sequence[str]
) -> tuple[list[TenantRecord], list[UsageRow]]:
    store = RedisStore(redis_url, MonotonicClock(), timeout_s=LIMIT_S)
    admin, today = TenantAdmin(store, time.time), time.time()
    records = [await admin.one(each) for each in tenant_ids]
    usage = await admin.usage(tenant_ids, [day_of(today - 86_400), day_of(today)])
    await store.close()
    return records, usage
