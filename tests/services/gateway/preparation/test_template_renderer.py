"""Templates that never end or use all memory, in a process that can be killed."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from services.gateway.preparation import preparation_pool
from services.gateway.preparation.preparation_pool import (
    TEMPLATE_PROCESS,
    PreparationPool,
    _PoolProcess,
)
from services.gateway.preparation.template_renderer import Renderer
from services.gateway.text.chat_template import ChatTemplate, LiteralText
from services.gateway.text.process_jobs import (
    LIMIT_S,
    MAX_SETUPS,
    JobFinished,
    ProcessSetup,
    Rendered,
    frame,
)
from shared.errors import InvalidRequest, NoCapacity, Overloaded
from tests.support.waiting import until

MESSAGES = [{"role": "user", "content": "hello <s>"}]
TEMPLATE = "{{ bos_token }}{% for each in messages %}{{ each.content }}{% endfor %}"
ENDLESS_TEMPLATE = (
    "{% if messages|length > 1 %}{% for a in range(99999) %}{% for b in range(99999) %}"
    "{% endfor %}{% endfor %}{% endif %}" + TEMPLATE
)
GREEDY_TEMPLATE = "{% set box = namespace(grown='x' * 1000) %}" + (
    "{% if messages|length > 1 %}{% for a in range(40) %}"
    "{% set box.grown = box.grown ~ box.grown %}{% endfor %}{% endif %}" + TEMPLATE
)
NEVER_S = 3600.0
QUICK = "tests.services.gateway.preparation.quick_process"


class PooledRenderer(Renderer):
    """A renderer with its own pool of processes, whose seats a test may look at."""

    def __init__(self, template: ChatTemplate, num_processes: int, module: str) -> None:
        setup = ProcessSetup(template.source)
        self.pool = PreparationPool(
            setup,
            module=module,
            num_processes=num_processes,
            max_wait_s=60.0,  # long, so that a paused machine does not count as a hang
            hang_s=600.0,
            spare_delay_s=NEVER_S,
        )
        super().__init__(self.pool, setup)


Make = Callable[..., Awaitable[PooledRenderer]]


@pytest_asyncio.fixture
async def make() -> AsyncIterator[Make]:
    renderers: list[PooledRenderer] = []

    async def renderer(
        source: str, num_processes: int = 1, module: str = TEMPLATE_PROCESS
    ) -> PooledRenderer:
        template = ChatTemplate(source, special_tokens=["<s>"], variables={"bos_token": "<s>"})
        renderers.append(PooledRenderer(template, num_processes, module))
        return renderers[-1]

    yield renderer
    for each in renderers:
        await each.pool.close()


async def test_renderer_returns_parts_of_template(make: Make) -> None:
    renderer = await make(TEMPLATE)
    parts = await renderer.render(MESSAGES)
    assert parts == ["<s>hello ", "<s>"]
    assert [isinstance(part, LiteralText) for part in parts] == [False, True]


@pytest.mark.parametrize(
    "source", [pytest.param(ENDLESS_TEMPLATE, marks=pytest.mark.long), GREEDY_TEMPLATE]
)
async def test_runaway_template_fails_without_blocking_loop(make: Make, source: str) -> None:
    renderer = await make(source)
    assert await renderer.render(MESSAGES) == ["<s>hello ", "<s>"]
    num_turns = 0

    async def count() -> None:
        nonlocal num_turns
        while True:
            await asyncio.sleep(0.001)
            num_turns += 1

    counter = asyncio.create_task(count())
    longest_s, renderer.pool.hang_s = renderer.pool.hang_s, 0.1 - LIMIT_S
    with pytest.raises(InvalidRequest, match=r"exceeded 2 s|MemoryError") as caught:
        await renderer.render(MESSAGES * 2)  # what computes does not hang, whatever time it takes
    renderer.pool.hang_s = longest_s
    assert caught.value.param == "messages"
    assert num_turns > 0  # the event loop runs during rendering
    counter.cancel()
    assert await renderer.render(MESSAGES) == ["<s>hello ", "<s>"]


async def test_rejection_includes_message_of_template(make: Make) -> None:
    renderer = await make("{{ raise_exception('roles must alternate') }}")
    with pytest.raises(InvalidRequest, match="roles must alternate"):
        await renderer.render(MESSAGES)


async def test_each_job_has_its_own_result(make: Make) -> None:
    """Jobs after an endless job and after a rejected job succeed."""
    renderer = await make(ENDLESS_TEMPLATE, module=QUICK)
    jobs = [[{"role": "user", "content": f"{number} "}] for number in range(20)]
    jobs[1] = MESSAGES * 2
    jobs[9] = [{"role": "user"}]
    tasks = [asyncio.create_task(renderer.render(each)) for each in jobs]
    tasks[2].cancel()
    replies = await asyncio.gather(*tasks, return_exceptions=True)
    assert isinstance(replies[1], InvalidRequest)
    assert isinstance(replies[2], asyncio.CancelledError)
    others = [number for number in range(len(jobs)) if number not in (1, 2, 9)]
    assert [replies[each] for each in others] == [[f"<s>{each} "] for each in others]


async def test_cancel_after_reply_does_not_affect_next_job(make: Make) -> None:
    renderer = await make(TEMPLATE)
    for _ in range(3):
        assert await renderer.render(MESSAGES) == ["<s>hello ", "<s>"]
        cancelled = asyncio.create_task(renderer.render(MESSAGES))
        await asyncio.sleep(0)
        time.sleep(0.02)
        cancelled.cancel()
        assert await renderer.render(MESSAGES) == ["<s>hello ", "<s>"]


async def test_job_not_started_in_time_is_overloaded(make: Make) -> None:
    renderer = await make(ENDLESS_TEMPLATE, module=QUICK)
    await renderer.render(MESSAGES)  # starts the process, which takes a while
    renderer.pool.max_wait_s = 0.1
    tasks = [asyncio.create_task(renderer.render(each)) for each in (MESSAGES * 2, MESSAGES)]
    first, second = await asyncio.gather(*tasks, return_exceptions=True)
    assert isinstance(first, InvalidRequest)
    assert isinstance(second, Overloaded)


class LostProcess:
    """Its second turn ends it, after a while. Each other job is done at once."""

    def __init__(self) -> None:
        self.num_turns = 0
        self.wait_s = 0.0
        self.is_frozen, self.is_watched = False, True

    def begin_watch(self) -> None:
        self.num_turns += 1

    def end_watch(self) -> None: ...
    def send_setup(self, setup: ProcessSetup) -> None: ...
    def send(self, *frames: bytearray) -> None: ...

    async def finished(self) -> JobFinished:
        if self.num_turns == 2:
            await asyncio.sleep(self.wait_s)
            raise EOFError
        return JobFinished(Rendered([]), 0.0)


async def test_overdue_job_of_a_lost_process_is_not_put_back(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    renderer, process = await make(TEMPLATE), LostProcess()
    renderer.pool.max_wait_s, process.wait_s = 0.1, 0.2

    async def started(seat: Any, setup: Any) -> Any:
        return process

    monkeypatch.setattr(renderer.pool, "_started", started)
    monkeypatch.setattr(renderer.pool, "_start_spares", lambda: None)
    jobs = [renderer.render(MESSAGES) for _ in range(3)]
    replies = await asyncio.gather(*jobs, return_exceptions=True)
    assert replies[0] == []
    assert [type(each) for each in replies[1:]] == [NoCapacity, Overloaded]
    assert process.num_turns == 2


async def test_tenant_does_not_wait_for_endless_jobs_of_another(make: Make) -> None:
    """The attacker's jobs need 2 s of CPU each; it holds one process of two."""
    renderer = await make(ENDLESS_TEMPLATE, num_processes=2)
    attacks = [
        asyncio.create_task(renderer.render(MESSAGES * 2, tenant_id="attacker")) for _ in range(4)
    ]
    await asyncio.sleep(0)
    for _ in range(3):
        assert await renderer.render(MESSAGES, tenant_id="victim") == ["<s>hello ", "<s>"]
    assert not any(each.done() for each in attacks)
    for each in attacks:
        each.cancel()


async def test_process_of_templates_inherits_no_secret(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("HEARTH_CLUSTER_SECRET", "HEARTH_NATS_URL", "HF_TOKEN", "DATABASE_PASSWORD"):
        monkeypatch.setenv(name, "secret-of-the-gateway")
    renderer = await make(TEMPLATE)
    assert await renderer.render(MESSAGES) == ["<s>hello ", "<s>"]
    (pid,) = renderer.pool.process_ids
    environ = await asyncio.to_thread(Path(f"/proc/{pid}/environ").read_bytes)
    assert b"PATH=" in environ and b"secret-of" not in environ


async def test_job_of_frozen_process_is_done_by_another(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(preparation_pool, "SUSPECT_S", 0.1)
    renderer = await make(TEMPLATE)
    assert await renderer.render(MESSAGES) == ["<s>hello ", "<s>"]
    (process_id,) = renderer.pool.process_ids
    os.kill(process_id, signal.SIGSTOP)
    async with asyncio.timeout(20):
        replies = await asyncio.gather(*[renderer.render(MESSAGES) for _ in range(3)])
    assert replies == [["<s>hello ", "<s>"]] * 3
    assert process_id not in renderer.pool.process_ids


async def test_job_whose_processes_freeze_again_fails(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(preparation_pool, "SUSPECT_S", 0.1)
    renderer = await make(TEMPLATE)
    started = renderer.pool._started

    async def frozen(seat: Any, setup: Any) -> Any:
        process = await started(seat, setup)
        os.kill(process.pid, signal.SIGSTOP)
        return process

    monkeypatch.setattr(renderer.pool, "_started", frozen)
    with pytest.raises(NoCapacity):
        await renderer.render(MESSAGES)
    assert renderer.pool.num_lost == 2


async def test_close_fails_all_jobs(make: Make) -> None:
    renderer = await make(ENDLESS_TEMPLATE)
    await renderer.pool.start()
    tasks = [asyncio.create_task(renderer.render(MESSAGES * 2)) for _ in range(4)]
    await asyncio.sleep(0.05)
    await renderer.pool.close()
    replies = await asyncio.gather(*tasks, return_exceptions=True)
    assert all(isinstance(each, NoCapacity) for each in replies)


async def test_cancel_during_rendering_does_not_affect_next_job(make: Make) -> None:
    renderer = await make(ENDLESS_TEMPLATE)
    await renderer.render(MESSAGES)
    cancelled = asyncio.create_task(renderer.render(MESSAGES * 2))
    await asyncio.sleep(0)
    cancelled.cancel()
    with pytest.raises(asyncio.CancelledError):
        await cancelled
    assert await renderer.render(MESSAGES) == ["<s>hello ", "<s>"]


async def test_job_of_killed_process_is_retryable(make: Make) -> None:
    renderer = await make(ENDLESS_TEMPLATE)
    await renderer.pool.start()
    (process_id,) = renderer.pool.process_ids
    rendering = asyncio.create_task(renderer.render(MESSAGES * 2))
    await asyncio.sleep(0.05)
    os.kill(process_id, signal.SIGKILL)
    with pytest.raises(NoCapacity, match="the preparation process ended"):
        await rendering
    assert await renderer.render(MESSAGES) == ["<s>hello ", "<s>"]


async def test_spare_takes_the_place_of_a_killed_process(make: Make) -> None:
    renderer = await make(TEMPLATE)
    renderer.pool._spare_delay_s = 0.0
    await renderer.pool.start()
    await until(lambda: renderer.pool._spares)
    spare = renderer.pool._spares[0]
    process = renderer.pool._seats[0].process
    assert process is not None
    await process.killed()
    assert await renderer.render(MESSAGES) == ["<s>hello ", "<s>"]
    assert renderer.pool.process_ids == [spare.pid]
    await until(lambda: renderer.pool._spares)
    processes = [spare, *renderer.pool._spares]
    await renderer.pool.close()
    assert not any(each.is_alive for each in processes)


async def test_processes_hold_several_models_and_the_least_recent_leave(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One process renders for more models than it retains, each job with its model's template."""
    templates = [
        ChatTemplate(f"{number}{{{{ messages[0].content }}}}", special_tokens=(), variables={})
        for number in range(MAX_SETUPS + 3)
    ]
    setups = [ProcessSetup(each.source, key=f"k{i}") for i, each in enumerate(templates)]
    pool = PreparationPool(None, num_processes=1, spare_delay_s=NEVER_S, max_wait_s=60.0)
    sent: list[type] = []
    send = _PoolProcess.send
    frames = {bytes(frame(each)): ProcessSetup for each in setups}

    def record(process: _PoolProcess, *given: bytearray) -> None:
        sent.extend(frames.get(bytes(each), bytes) for each in given)
        send(process, *given)

    monkeypatch.setattr(_PoolProcess, "send", record)
    order = [*range(len(setups)), len(setups) - 1, 3, 0, 3, 0]
    for number in order:
        parts = await Renderer(pool, setups[number]).render([{"role": "user", "content": "x"}])
        assert parts == [f"{number}x"]
    assert len(pool.process_ids) == 1
    assert sent.count(ProcessSetup) == len(setups) + 1  # 0 left, 3 did not
    await pool.close()


async def test_job_goes_to_a_process_that_has_its_model() -> None:
    template = ChatTemplate(TEMPLATE, special_tokens=(), variables={})
    setups = [ProcessSetup(template.source, key=key) for key in "ab"]
    pool = PreparationPool(None, num_processes=2, spare_delay_s=NEVER_S, max_wait_s=60.0)
    renderers = [Renderer(pool, each) for each in setups]
    both = zip("ab", renderers, strict=True)
    await asyncio.gather(*(each.render(MESSAGES, tenant_id=tenant) for tenant, each in both))
    assert len(pool.process_ids) == 2
    for renderer in (*renderers, *reversed(renderers)):
        await renderer.render(MESSAGES)
    held = [[each.process.has_loaded(setup) for setup in setups] for each in pool._seats]  # type: ignore[union-attr]
    assert sorted(held) == [[False, True], [True, False]]
    await pool.close()


async def test_pool_counts_its_queue_and_the_processes_it_lost(make: Make) -> None:
    renderer = await make(ENDLESS_TEMPLATE)
    pool = renderer.pool
    await renderer.render(MESSAGES)
    assert (pool.num_waiting, pool.num_running, pool.num_lost) == (0, 0, 0)
    first = asyncio.create_task(renderer.render([*MESSAGES, *MESSAGES], tenant_id="a"))
    second = asyncio.create_task(renderer.render(MESSAGES, tenant_id="b"))
    await asyncio.sleep(0)  # both have called the pool
    assert (pool.num_waiting, pool.num_running) == (1, 1)
    os.kill(pool.process_ids[0], signal.SIGKILL)
    with pytest.raises(NoCapacity):
        await first
    await second
    assert (pool.num_waiting, pool.num_lost) == (0, 1)


async def test_integers_of_any_size_reach_the_template(make: Make) -> None:
    """Such as a maximum of 1e30 in a tool's schema, written as an integer."""
    renderer = await make("{{ x }} {{ tools[0].maximum }}")
    tools = [{"maximum": 10**30}]
    assert await renderer.render(MESSAGES, tools, variables={"x": -(10**400)}) == [
        f"-1{'0' * 400} 1{'0' * 30}"
    ]


async def test_error_of_a_job_fails_that_job_alone(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    renderer = await make(TEMPLATE)
    for error in (RuntimeError, OverflowError, KeyError, OSError):
        with monkeypatch.context() as patch:

            def fail(*_: object, error: type[Exception] = error) -> bytes:
                raise error("of a client's data")

            patch.setattr(preparation_pool, "frame", fail)
            with pytest.raises((InvalidRequest, NoCapacity)):
                await renderer.render(MESSAGES)
        assert await renderer.render(MESSAGES) == ["<s>hello ", "<s>"]


async def test_small_jobs_of_a_tenant_share_a_turn(make: Make) -> None:
    """A job that ends the process ends alone: those after it run again."""
    renderer = await make(ENDLESS_TEMPLATE, module=QUICK)
    pool = renderer.pool
    await renderer.render(MESSAGES, tenant_id="b")
    sent = []
    send = _PoolProcess.send

    def record(self: _PoolProcess, *frames: bytearray) -> None:
        sent.append(frames)
        send(self, *frames)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_PoolProcess, "send", record)
        given = [MESSAGES, MESSAGES, [*MESSAGES, *MESSAGES], *[MESSAGES] * 5]
        jobs = [asyncio.create_task(renderer.render(each, tenant_id="a")) for each in given]
        await asyncio.sleep(0)
        assert pool.num_running + pool.num_waiting == len(jobs)
        replies = await asyncio.gather(*jobs, return_exceptions=True)
    assert [isinstance(each, InvalidRequest) for each in replies] == [n == 2 for n in range(8)]
    assert len(sent) <= 4  # of which one or two have the setup of a new process
    assert pool.num_lost == 1
