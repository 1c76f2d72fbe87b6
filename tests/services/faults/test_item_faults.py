"""Whatever work on one item of others raises ends the item, and no process of the cluster."""

from __future__ import annotations

import ast
import asyncio
import inspect
from collections.abc import Awaitable, Callable, Iterator
from functools import cache
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest

from services.decode import service as decode_service
from services.gateway.dialects.responses.dialect import OpenResponsesDialect
from services.gateway.dialects.responses.storage.store import ResponseStore
from services.gateway.request.request_output import RequestOutput
from services.gateway.streams import streams
from services.prefill import service as prefill_service
from services.scheduler.candidates import size_of
from services.scheduler.service import TICK_S
from shared.engine import worker
from shared.engine.kv.kv_sender import KvSender
from shared.kv_wire.expected_pushes import ExpectedPushes
from shared.kv_wire.kv_server import KvServer
from shared.lifecycle import heartbeat
from tests.services.scheduler.literals import submit_of
from tests.support.services.live_cluster import MODEL, LiveCluster
from tests.support.waiting import LIMIT_S, until

ROOT = Path(__file__).resolve().parents[3]


class Panic(BaseException):
    """Like what native code panics with, which is no Exception."""


ERRORS: tuple[BaseException, ...] = (
    Panic("called `Option::unwrap()` on a `None` value"),
    RuntimeError("a bug"),
    OverflowError("int too big to convert"),
    KeyError("missing"),
    OSError(28, "No space left on device"),
)
ALL_ERRORS = pytest.mark.parametrize(
    "has_all_errors", [pytest.param(False, id="one"), pytest.param(True, marks=pytest.mark.long)]
)
NUMBERS = count()
SWEEP_S = 0.02
Outcome = Callable[[LiveCluster], Awaitable[None]]


def chat_gives(*statuses: int) -> Outcome:
    async def chat(cluster: LiveCluster) -> None:
        content = f"{next(NUMBERS)}, of one tenant, long enough for prefill to push, in no cache"
        messages = [{"role": "user", "content": content}]
        body = {"model": MODEL, "messages": messages, "max_tokens": 4, "temperature": 0}
        answer = await cluster.http.post("/v1/chat/completions", json=body)
        assert answer.status_code in statuses, answer.text

    return chat


async def response_is_not_stored(cluster: LiveCluster) -> None:
    body = {"model": MODEL, "input": "hello", "max_output_tokens": 4}
    answer = await cluster.http.post("/v1/responses", json=body)
    assert answer.status_code == 200
    found = await cluster.http.get(f"/v1/responses/{answer.json()['id']}")
    assert found.status_code in (404, 500, 503)


async def resync_is_given_up(cluster: LiveCluster) -> None:
    cluster.index._start_resync("prefill-1", "")
    await cluster.index._resyncs["prefill-1", ""]
    assert ("prefill-1", "") not in cluster.index._resyncs


async def late_peer_is_not_asked(cluster: LiveCluster) -> None:
    monitor = cluster.scheduler.health_monitor
    last = monitor.fleet.heartbeat_of("decode-1")
    assert last is not None
    late = [[last]]
    monitor.fleet.late = lambda now: late.pop() if late else []  # type: ignore[method-assign]
    await until(lambda: not late and not monitor._requested)
    del monitor.fleet.late


async def round_trip_is_not_measured(cluster: LiveCluster) -> None:
    trips = cluster.scheduler.health_monitor.requests.round_trips
    due = [["decode-1"]]
    trips.due_for_probe = lambda now: due.pop() if due else []  # type: ignore[method-assign]
    await until(lambda: not due)
    await asyncio.sleep(0)
    del trips.due_for_probe


async def abort_is_lost(cluster: LiveCluster) -> None:
    cluster.scheduler._abandon("decode-1", b"p" * 16)
    await asyncio.sleep(0)


async def failure_is_lost(cluster: LiveCluster) -> None:
    ticket = cluster.scheduler._queues.enqueue(submit_of("lost"), 0.0)
    cluster.scheduler._fail(ticket, RuntimeError("the request fails"))
    await asyncio.sleep(0)


async def queue_is_probed_later(cluster: LiveCluster) -> None:
    scheduler = cluster.scheduler
    now = scheduler._clock.now
    ticket = scheduler._queues.enqueue(submit_of("blocked", model="none"), now())
    assert scheduler._queues.pop(now()) is ticket
    opening = SimpleNamespace(decodes=SimpleNamespace(opens_at=lambda *_: now()))
    with patch.object(scheduler._workers, "serving", return_value=opening):
        scheduler._block(ticket, size_of(ticket))
    assert ticket.queue in scheduler._opening
    await until(lambda: ticket.queue not in scheduler._opening)
    await asyncio.sleep(0)
    assert scheduler._queues.remove("blocked")


async def queue_is_retried(cluster: LiveCluster) -> None:
    scheduler = cluster.scheduler
    ticket = scheduler._queues.enqueue(submit_of("blocked", model="none"), scheduler._clock.now())
    assert scheduler._queues.pop(scheduler._clock.now()) is ticket
    scheduler._blocked.block(ticket.queue, size_of(ticket))
    await asyncio.sleep(1.5 * TICK_S)
    assert scheduler._blocked.unblock(ticket.queue) and scheduler._queues.remove("blocked")


async def overdue_placement_is_left(cluster: LiveCluster) -> None:
    decode, due = decode_of(cluster), [[b"p" * 16]]
    decode._overdue = lambda now: due.pop() if due else []
    await until(lambda: not due)
    await asyncio.sleep(0)
    del decode._overdue


async def sweeps_go_on(cluster: LiveCluster) -> None:
    await asyncio.sleep(4 * SWEEP_S)


def response_store(cluster: LiveCluster) -> ResponseStore:
    opened = cluster.gateway.dialects.opened
    return next(each.store for each in opened if isinstance(each, OpenResponsesDialect))


# What is broken, its method, and what happens to the item.
FAULTS: dict[str, tuple[Callable[[LiveCluster], Any], str, Outcome]] = {
    "preparation": (lambda it: it.gateway._models.pools.requests, "_started", chat_gives(400, 503)),
    "submission": (lambda it: it.gateway._driver, "_request_from_scheduler", chat_gives(500)),
    "output": (lambda it: RequestOutput, "on_tokens", chat_gives(500)),
    "end of output": (lambda it: RequestOutput, "_count", chat_gives(200)),
    "stored response": (response_store, "_now", response_is_not_stored),
    "admission": (lambda it: it.scheduler._queues, "enqueue", chat_gives(500)),
    "placement": (lambda it: it.scheduler, "_match", chat_gives(500)),
    "placed": (lambda it: it.scheduler, "_started", chat_gives(500)),
    "abort": (lambda it: it.scheduler, "_send", abort_is_lost),
    "handoff": (
        lambda it: it.decode._handlers[0]._active_handoffs,
        "_request_prefill",
        chat_gives(200),
    ),
    "resync": (lambda it: it.index, "_try_resync", resync_is_given_up),
    "failure": (lambda it: it.scheduler, "_send", failure_is_lost),
    "queue": (lambda it: it.scheduler, "_probe", queue_is_probed_later),
    "blocked queue": (lambda it: it.scheduler, "_unblock", queue_is_retried),
    "late peer": (lambda it: it.scheduler.health_monitor, "_request_alive", late_peer_is_not_asked),
    "overdue placement": (lambda it: decode_of(it), "_fence", overdue_placement_is_left),
    "tokens to resend": (lambda it: decode_of(it), "_resend_overdue", sweeps_go_on),
    "expired prefill": (lambda it: prefill_of(it), "_expire", sweeps_go_on),
    "probe": (lambda it: it.scheduler.health_monitor, "_request_alive", round_trip_is_not_measured),
    "announced blocks": (lambda it: prefill_of(it)._worker, "_post_events_of", chat_gives(200)),
    "expired pins": (lambda it: prefill_of(it)._worker.pins, "expire", sweeps_go_on),
}


def decode_of(cluster: LiveCluster) -> Any:
    return cluster.decode._handlers[0]


def prefill_of(cluster: LiveCluster) -> Any:
    return cluster.prefill._handlers[0]


# Faults that another try, another worker or the worker itself makes up for.
BEFORE_REPLY = ("admission of decode", "outputs of decode")  # a worker holds nothing then
PASSING: dict[str, tuple[Callable[[LiveCluster], Any], str]] = {
    "admission of decode": (decode_of, "_admit"),
    "outputs of decode": (lambda it: decode_of(it)._output_buffer, "open"),
    "token": (decode_of, "_emit"),
    "end of a handoff": (lambda it: decode_of(it)._engine, "activate"),
    "expected push": (lambda it: decode_of(it)._active_handoffs._port, "expect"),
    "received frame": (lambda it: ExpectedPushes, "deliver"),
    "admission of prefill": (lambda it: prefill_of(it)._port, "start"),
    "computed prompt": (lambda it: KvSender, "computed"),
    "pushed frame": (lambda it: KvSender, "_send"),
    "connection of a push": (lambda it: KvServer, "_open_tcp"),
}


def raising(error: BaseException, work: Callable[..., Any]) -> Callable[..., Any]:
    """Raises like the function in whose place it is: an async one once it is awaited."""

    def fail(*arguments: object, **fields: object) -> None:
        raise error

    async def fail_when_awaited(*arguments: object, **fields: object) -> None:
        raise error

    return fail_when_awaited if inspect.iscoroutinefunction(work) else fail


def errors_of(index: int, has_all_errors: bool) -> tuple[Exception, ...]:
    """Of the fault with this index: otherwise one, so that neighbours have different ones."""
    return ERRORS if has_all_errors else (ERRORS[index % len(ERRORS)],)


@ALL_ERRORS
@pytest.mark.asyncio(loop_scope="module")
async def test_fault_that_passes_costs_no_request_and_no_block(
    cluster: LiveCluster,
    ended: list[object],
    monkeypatch: pytest.MonkeyPatch,
    has_all_errors: bool,
) -> None:
    monkeypatch.setattr(streams, "TOKEN_TIMEOUT_S", 0.2)
    for index, (name, (owner_of, method)) in enumerate(PASSING.items()):
        for number, error in enumerate(errors_of(index, has_all_errors)):
            owner, errors, held = owner_of(cluster), [error], list[int]()
            work = getattr(owner, method)

            def fail_once(
                *arguments: object,
                work: Any = work,
                errors: list[BaseException] = errors,
                held: list[int] = held,
                **fields: Any,
            ) -> object:
                if errors:
                    soon = asyncio.get_running_loop().call_soon
                    soon(lambda: held.append(len(decode_of(cluster)._placements)))
                    raise errors.pop()
                return work(*arguments, **fields)

            await cluster.prefill._handlers[0]._port._dialer.close()  # the next push connects
            with monkeypatch.context() as patched:
                patched.setattr(owner, method, fail_once)
                async with asyncio.timeout(LIMIT_S):
                    answer = await cluster.chat(f"{number} {name}: a prompt that is in no cache")
                    await everything_has_ended(cluster)
            assert answer.json()["usage"]["completion_tokens"] == 8
            assert (errors, ended) == ([], []), name
            assert held == [0] or name not in BEFORE_REPLY, name


async def everything_has_ended(cluster: LiveCluster) -> None:
    decode, prefill = decode_of(cluster), prefill_of(cluster)
    while (
        decode.num_unfinished + prefill.num_unfinished + len(decode._active_handoffs._under_way)
        or not decode._engine.is_idle
        or not prefill._worker.loop.engine.is_idle
    ):
        await asyncio.sleep(0.005)


@ALL_ERRORS
@pytest.mark.asyncio(loop_scope="module")
async def test_item_fails_and_every_process_lives(
    cluster: LiveCluster,
    ended: list[object],
    monkeypatch: pytest.MonkeyPatch,
    has_all_errors: bool,
) -> None:
    monkeypatch.setattr(heartbeat, "MEASURE_S", 0.05)
    slow_s = max(decode_service.SWEEP_S, prefill_service.SWEEP_S, worker.EXPIRE_PINS_S)
    for module in (decode_service, prefill_service):
        monkeypatch.setattr(module, "SWEEP_S", SWEEP_S)
    monkeypatch.setattr(worker, "EXPIRE_PINS_S", SWEEP_S)
    await asyncio.sleep(slow_s)  # the sweeps that have begun their wait
    for index, (name, (owner_of, method, outcome)) in enumerate(FAULTS.items()):
        for error in errors_of(index, has_all_errors):
            owner = owner_of(cluster)
            with monkeypatch.context() as patched:
                patched.setattr(owner, method, raising(error, getattr(owner, method)))
                async with asyncio.timeout(LIMIT_S):
                    await outcome(cluster)
            assert ended == [], f"{name}: {error!r} ends the process"
        await chat_gives(200)(cluster)


# Loops, and steps in the life, of a process itself: an exception of theirs ends it. All other work
# in the background is on one item of others.
OWN = {
    "services/cli/fleet/fleet_poll.py": ("_judge",),
    "services/decode/service.py": ("run", "_sweep"),
    "services/encode/service.py": ("_sweep",),
    "services/gateway/operator/cluster/feed.py": ("_run",),
    "services/gateway/http/server.py": ("_serve", "watch"),
    "services/gateway/nats_api/api.py": ("run", "_join"),
    "services/gateway/sites/site_service.py": ("_report", "_sweep", "run"),
    "services/gateway/sites/site_tenants.py": ("run", "run"),
    "services/gateway/sites/tenant_copies.py": ("_run",),
    "services/gateway/service.py": (
        *("run", "run", "declare_regions", "removed", "run", "run", "run"),
        *("changed", "watch", "run", "task"),
    ),
    "services/gateway/streams/stream_driver.py": ("_tick",),
    "services/gateway/observability/telemetry/span_exporter.py": ("_run",),
    "services/gateway/tenancy/limits.py": ("_flush_endings", "_renew_leases"),
    "services/gateway/tenancy/site_leases.py": ("_run",),
    "services/gateway/tenancy/usage_counter.py": ("_run",),
    "services/host/service.py": ("run", "_drive"),
    "services/host/workers/workers.py": ("bounding", "_run_templates"),
    "services/worker/encode_worker.py": ("_leave",),
    "services/kv_index/service.py": ("_sweep", "_write_behind", "_retain_pins", "_drop_kv"),
    "services/prefill/service.py": ("_sweep",),
    "services/scheduler/other_sites.py": ("_sweep",),
    "services/scheduler/service.py": ("loop",),
    "shared/engine/loop.py": ("_run", "_tick", "_count_experts"),
    "shared/engine/executors/group/kv/rank_kv.py": ("_count",),
    "shared/engine/vision/remote_vectors.py": ("_renew_leases",),
    "shared/engine/worker.py": ("_send_kv_events", "_expire_pins", "_leave"),
    "shared/kv_wire/kv_server.py": ("_accept",),
    "shared/lifecycle/heartbeat.py": ("_beat", "_watch", "_measure", "fail"),
    "shared/lifecycle/process.py": ("collect_garbage", "poll_files", "report_progress", "follow"),
    "shared/lifecycle/start_heartbeats.py": ("_beat",),
    "shared/transport/bus.py": ("_fail_when_lost",),
    "shared/transport/outbox.py": ("_run",),
}


def test_only_loops_of_a_process_itself_may_end_it() -> None:
    found: dict[str, tuple[str, ...]] = {}
    for path in _sources("start_own"):
        names = tuple(started_by(path, "start_own"))
        if names:
            found[str(path.relative_to(ROOT))] = names
    assert found == OWN


def started_by(path: Path, start: str) -> Iterator[str]:
    """The names of what this method of `Background` is called with, in the order of the file."""
    for call in sorted(_calls(path), key=lambda each: each.lineno):
        if _name(call) == start:
            started, *_ = call.args
            function = started.func if isinstance(started, ast.Call) else started
            yield function.attr if isinstance(function, ast.Attribute) else ast.unparse(function)


# What starts a task elsewhere: nobody may see its exception, and asyncio holds it weakly.
STARTS = ("create_task", "ensure_future", "TaskGroup", "run_coroutine_threadsafe")


def test_tasks_are_started_by_one_module() -> None:
    found = {
        f"{path.relative_to(ROOT)}:{call.lineno}"
        for path in _sources(*STARTS)
        if path != ROOT / "shared/background.py"
        for call in _calls(path)
        if _name(call) in STARTS
    }
    assert found == set()


def test_what_is_awaited_has_an_owner() -> None:
    found = {
        f"{path.relative_to(ROOT)}:{node.lineno}"
        for path in _sources("start_awaited")
        if any(_name(call) == "start_awaited" for call in _calls(path))
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call)
        if _name(node.value) == "start_awaited"
    }
    assert found == set()


# Python alone runs in these: the templates of checkpoints, and the rendering of a line of the log.
WITHOUT_NATIVE_CODE = {
    "services/gateway/preparation/template_process.py",
    "services/gateway/text/chat_template.py",
    "services/gateway/text/history/content_parts.py",
    "shared/telemetry/log.py",
}


def test_handlers_of_any_error_take_panics_of_native_code() -> None:
    """Such as a tokenizer's, which is no Exception: `except BaseException` and `item_error`."""
    found = {
        str(path.relative_to(ROOT))
        for path in _sources("except Exception")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ExceptHandler)
        if isinstance(node.type, ast.Name) and node.type.id == "Exception"
    }
    assert {each for each in found if not each.startswith("kernels/")} == WITHOUT_NATIVE_CODE


def _sources(*words: str) -> Iterator[Path]:
    """Those that contain one of the words: only they need to be parsed."""
    for folder in ("services", "shared", "kernels"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            text = path.read_text()
            if any(each in text for each in words):
                yield path


@cache
def _calls(path: Path) -> tuple[ast.Call, ...]:
    tree = ast.parse(path.read_text())
    return tuple(each for each in ast.walk(tree) if isinstance(each, ast.Call))


def _name(call: ast.Call) -> str:
    return call.func.attr if isinstance(call.func, ast.Attribute) else ast.unparse(call.func)
