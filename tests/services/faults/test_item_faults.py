"""Whatever work on one item of others raises ends the item, and no process of the cluster."""

from __future__ import annotations

import ast
import asyncio
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from services.gateway.request.request_output import RequestOutput
from tests.services.live_cluster import MODEL, LiveCluster

ROOT = Path(__file__).resolve().parents[3]
ERRORS = (
    RuntimeError("a bug"),
    OverflowError("int too big to convert"),
    KeyError("missing"),
    OSError(28, "No space left on device"),
)
Outcome = Callable[[LiveCluster], Awaitable[None]]


def chat_gives(*statuses: int) -> Outcome:
    async def chat(cluster: LiveCluster) -> None:
        body = {"model": MODEL, "messages": MESSAGES, "max_tokens": 4, "temperature": 0}
        answer = await cluster.http.post("/v1/chat/completions", json=body)
        assert answer.status_code in statuses, answer.text

    return chat


MESSAGES = [{"role": "user", "content": "a request of one tenant, long enough for prefill to push"}]


async def response_is_not_stored(cluster: LiveCluster) -> None:
    body = {"model": MODEL, "input": "hello", "max_output_tokens": 4}
    answer = await cluster.http.post("/v1/responses", json=body)
    assert answer.status_code == 200
    found = await cluster.http.get(f"/v1/responses/{answer.json()['id']}")
    assert found.status_code in (404, 500, 503)


async def resync_is_given_up(cluster: LiveCluster) -> None:
    cluster.index._start_resync("prefill-1")
    await cluster.index._resyncs["prefill-1"]
    assert "prefill-1" not in cluster.index._resyncs


async def probe_is_skipped(cluster: LiveCluster) -> None:
    last = cluster.scheduler.health_monitor.fleet.heartbeat_of("decode-1")
    assert last is not None
    monitor = cluster.scheduler.health_monitor
    for work in (monitor._request(last), monitor._probe("decode-1")):
        await monitor._background.start_item(work, lambda error: None)


async def abort_is_lost(cluster: LiveCluster) -> None:
    cluster.scheduler._abandon("decode-1", b"p" * 16)
    await asyncio.sleep(0)


# What is broken, its method, and what happens to the item.
FAULTS: dict[str, tuple[Callable[[LiveCluster], Any], str, Outcome]] = {
    "preparation": (lambda it: it.gateway._pool, "_started", chat_gives(400, 503)),
    "submission": (lambda it: it.gateway._driver, "_request_from_scheduler", chat_gives(500)),
    "output": (lambda it: RequestOutput, "on_tokens", chat_gives(500)),
    "end of output": (lambda it: RequestOutput, "_count", chat_gives(200)),
    "stored response": (lambda it: it.gateway.response_store, "_now", response_is_not_stored),
    "placement": (lambda it: it.scheduler, "_match", chat_gives(500)),
    "placed": (lambda it: it.scheduler, "_started", chat_gives(500)),
    "abort": (lambda it: it.scheduler, "_send", abort_is_lost),
    "handoff": (
        lambda it: it.decode._handlers[0]._active_handoffs,
        "_request_prefill",
        chat_gives(200),
    ),
    "resync": (lambda it: it.index, "_try_resync", resync_is_given_up),
    "probe": (lambda it: it.scheduler.health_monitor, "_request_alive", probe_is_skipped),
}


async def test_item_fails_and_every_process_lives(
    cluster: LiveCluster, ended: list[object], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, (owner_of, method, outcome) in FAULTS.items():
        for error in ERRORS:

            def fail(*arguments: object, error: Exception = error, **fields: object) -> object:
                raise error

            with monkeypatch.context() as patch:
                patch.setattr(owner_of(cluster), method, fail)
                async with asyncio.timeout(20):
                    await outcome(cluster)
            assert ended == [], f"{name}: {error!r} ends the process"
        await chat_gives(200)(cluster)


# Loops, and steps in the life, of a process itself: an exception of theirs ends it. All other work
# in the background is on one item of others.
OWN = {
    "services/cli/status.py": ("_judge",),
    "services/decode/service.py": ("run", "_sweep"),
    "services/gateway/cluster/feed.py": ("_run",),
    "services/gateway/nats_api/api.py": ("run", "_join"),
    "services/gateway/service.py": ("run", "run", "watch"),
    "services/gateway/streams/stream_driver.py": ("_tick",),
    "services/gateway/telemetry/span_exporter.py": ("_run",),
    "services/gateway/tenancy/limits.py": ("_flush_endings", "_renew_leases"),
    "services/gateway/tenancy/usage_counter.py": ("_run",),
    "services/host/service.py": ("run", "_drive"),
    "services/host/workers/workers.py": ("bounding", "_run_templates"),
    "services/kv_index/service.py": ("_sweep", "_write_behind", "_retain_pins"),
    "services/prefill/service.py": ("_sweep",),
    "services/scheduler/service.py": ("loop",),
    "shared/engine/loop.py": ("_run", "_tick", "_count_experts"),
    "shared/engine/worker.py": ("_send_kv_events", "_expire_pins", "_leave"),
    "shared/lifecycle/heartbeat.py": ("_beat", "_watch", "_measure", "fail"),
    "shared/lifecycle/process.py": ("follow",),
    "shared/transport/bus.py": ("_fail_when_lost",),
    "shared/transport/outbox.py": ("_run",),
}


def test_only_loops_of_a_process_itself_may_end_it() -> None:
    found: dict[str, tuple[str, ...]] = {}
    for folder in ("services", "shared"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            names = tuple(_started_as_own(ast.parse(path.read_text())))
            if names:
                found[str(path.relative_to(ROOT))] = names
    assert found == OWN


def _started_as_own(tree: ast.AST) -> Iterator[str]:
    """The names of what `start_own` is called with, in the order of the file."""
    calls = [each for each in ast.walk(tree) if isinstance(each, ast.Call)]
    for call in sorted(calls, key=lambda each: each.lineno):
        if isinstance(call.func, ast.Attribute) and call.func.attr == "start_own":
            (started,) = call.args
            function = started.func if isinstance(started, ast.Call) else started
            yield function.attr if isinstance(function, ast.Attribute) else ast.unparse(function)
