"""Templates that never end or use all memory, in a process that can be killed."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest
import pytest_asyncio

from services.gateway.text.chat_template import ChatTemplate, LiteralText
from services.gateway.text.template_process import Late, Rendered, RenderJob, reply_to
from services.gateway.text.template_renderer import MAX_ROUND, Renderer
from shared.errors import InvalidRequest, NoCapacity, Overloaded

MESSAGES = [{"role": "user", "content": "hello <s>"}]
TEMPLATE = "{{ bos_token }}{% for each in messages %}{{ each.content }}{% endfor %}"
ENDLESS_TEMPLATE = (
    "{% if messages|length > 1 %}{% for a in range(99999) %}{% for b in range(99999) %}"
    "{% endfor %}{% endfor %}{% endif %}" + TEMPLATE
)
GREEDY_TEMPLATE = "{% set box = namespace(text='x' * 1000) %}" + (
    "{% if messages|length > 1 %}{% for a in range(40) %}"
    "{% set box.text = box.text ~ box.text %}{% endfor %}{% endif %}" + TEMPLATE
)
SLOW_TEMPLATE = ENDLESS_TEMPLATE.replace("range(99999)", "range(99)", 1)  # some tenths of a second
Make = Callable[[str], Awaitable[Renderer]]


@pytest_asyncio.fixture
async def make() -> AsyncIterator[Make]:
    renderers: list[Renderer] = []

    async def renderer(source: str) -> Renderer:
        template = ChatTemplate(source, special_tokens=["<s>"], variables={"bos_token": "<s>"})
        # long, so that a paused machine does not count as a hang
        renderers.append(Renderer(template, max_wait_s=60.0, hang_s=600.0))
        return renderers[-1]

    yield renderer
    for each in renderers:
        await each.close()


async def test_renderer_returns_parts_of_template(make: Make) -> None:
    renderer = await make(TEMPLATE)
    parts = await renderer.render(MESSAGES)
    assert parts == ["<s>hello ", "<s>"]
    assert [isinstance(part, LiteralText) for part in parts] == [False, True]


@pytest.mark.parametrize("source", [ENDLESS_TEMPLATE, GREEDY_TEMPLATE])
async def test_runaway_template_fails_without_blocking_loop(make: Make, source: str) -> None:
    renderer = await make(source)
    assert await renderer.render(MESSAGES) == ["<s>hello ", "<s>"]
    num_turns = 0

    async def count() -> None:
        nonlocal num_turns
        while True:
            await asyncio.sleep(0.01)
            num_turns += 1

    counter = asyncio.create_task(count())
    with pytest.raises(InvalidRequest, match=r"exceeded 2 s|MemoryError") as caught:
        await renderer.render(MESSAGES * 2)
    assert caught.value.param == "messages"
    assert num_turns > 0  # the event loop runs during rendering
    counter.cancel()
    assert await renderer.render(MESSAGES) == ["<s>hello ", "<s>"]


async def test_rejection_includes_message_of_template(make: Make) -> None:
    renderer = await make("{{ raise_exception('roles must alternate') }}")
    with pytest.raises(InvalidRequest, match="roles must alternate"):
        await renderer.render(MESSAGES)


async def test_jobs_of_one_round_have_separate_results(make: Make) -> None:
    """Jobs after an endless job and after a rejected job succeed."""
    renderer = await make(ENDLESS_TEMPLATE)
    jobs = [[{"role": "user", "content": f"{number} "}] for number in range(3 * MAX_ROUND)]
    jobs[1] = MESSAGES * 2
    jobs[MAX_ROUND] = [{"role": "user"}]
    tasks = [asyncio.create_task(renderer.render(each)) for each in jobs]
    tasks[2].cancel()
    replies = await asyncio.gather(*tasks, return_exceptions=True)
    assert isinstance(replies[1], InvalidRequest)
    assert isinstance(replies[2], asyncio.CancelledError)
    others = [number for number in range(len(jobs)) if number not in (1, 2, MAX_ROUND)]
    assert [replies[each] for each in others] == [[f"<s>{each} "] for each in others]


async def test_cancel_after_reply_does_not_affect_next_job(make: Make) -> None:
    renderer = await make(TEMPLATE)
    for _ in range(5):
        assert await renderer.render(MESSAGES) == ["<s>hello ", "<s>"]
        cancelled = asyncio.create_task(renderer.render(MESSAGES))
        while not renderer._round:
            await asyncio.sleep(0)
        time.sleep(0.02)
        cancelled.cancel()
        assert await renderer.render(MESSAGES) == ["<s>hello ", "<s>"]


async def test_job_not_started_in_time_is_overloaded(make: Make) -> None:
    renderer = await make(ENDLESS_TEMPLATE)
    await renderer.render(MESSAGES)  # starts the process, which takes a while
    renderer.max_wait_s = 1.0
    first = [MESSAGES * 2] + [MESSAGES] * (MAX_ROUND - 1)
    tasks = [asyncio.create_task(renderer.render(each)) for each in (*first, MESSAGES)]
    replies = await asyncio.gather(*tasks, return_exceptions=True)
    assert isinstance(replies[0], InvalidRequest)
    assert all(isinstance(each, Overloaded) for each in replies[1:])


async def test_job_of_slow_round_is_overloaded_before_it_ends(make: Make) -> None:
    """Each job of the round is fast enough, but the round is not: late jobs fail at once."""
    renderer = await make(SLOW_TEMPLATE)
    await renderer.render(MESSAGES)  # starts the process, which takes a while
    renderer.max_wait_s = 1.0
    tasks = [asyncio.create_task(renderer.render(MESSAGES * 2)) for _ in range(MAX_ROUND)]
    while not renderer._round:
        await asyncio.sleep(0)
    with pytest.raises(Overloaded):
        await renderer.render(MESSAGES)
    replies = await asyncio.gather(*tasks, return_exceptions=True)
    assert replies[0] == ["<s>hello ", "<s>", "hello ", "<s>"]
    assert isinstance(replies[-1], Overloaded)


async def test_only_current_job_waits_for_hung_process(make: Make) -> None:
    renderer = await make(TEMPLATE)
    assert await renderer.render(MESSAGES) == ["<s>hello ", "<s>"]
    assert renderer._process is not None
    os.kill(renderer._process.pid, signal.SIGSTOP)
    renderer.max_wait_s = 0.2
    renderer.hang_s = 1.0
    raised: list[type[BaseException]] = []

    async def render_once() -> None:
        with pytest.raises((NoCapacity, Overloaded)) as caught:
            await renderer.render(MESSAGES)
        raised.append(caught.type)

    await asyncio.gather(*[render_once() for _ in range(3)])
    assert raised == [Overloaded, Overloaded, NoCapacity]
    renderer.max_wait_s = 60.0
    assert await renderer.render(MESSAGES) == ["<s>hello ", "<s>"]


def test_expired_job_is_skipped() -> None:
    template = ChatTemplate(TEMPLATE, special_tokens=["<s>"], variables={"bos_token": "<s>"})
    assert reply_to(template, RenderJob(MESSAGES, latest_start=time.monotonic() - 1.0)) == Late()
    assert isinstance(reply_to(template, RenderJob(MESSAGES)), Rendered)


async def test_close_fails_waiting_jobs(make: Make) -> None:
    renderer = await make(ENDLESS_TEMPLATE)
    await renderer.start()
    tasks = [asyncio.create_task(renderer.render(MESSAGES * 2)) for _ in range(2 * MAX_ROUND)]
    await asyncio.sleep(0.05)
    await renderer.close()
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
    await renderer.start()
    assert renderer._process is not None
    rendering = asyncio.create_task(renderer.render(MESSAGES * 2))
    await asyncio.sleep(0.05)
    os.kill(renderer._process.pid, signal.SIGKILL)
    with pytest.raises(NoCapacity, match="the template process ended"):
        await rendering
    assert await renderer.render(MESSAGES) == ["<s>hello ", "<s>"]


async def test_killed_process_is_restarted_and_ends_on_close(make: Make) -> None:
    renderer = await make(TEMPLATE)
    await renderer.start()
    process = renderer._process
    assert process is not None
    os.kill(process.pid, signal.SIGKILL)
    await process.wait()
    assert await renderer.render(MESSAGES) == ["<s>hello ", "<s>"]
    process = renderer._process
    await renderer.close()
    assert process is not None and process.returncode is not None
