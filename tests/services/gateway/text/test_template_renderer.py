"""Templates that never end or eat all memory, in a process that can be stopped."""

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
GOOD = "{{ bos_token }}{% for each in messages %}{{ each.content }}{% endfor %}"
RENDER_TIMEOUT = (
    "{% if messages|length > 1 %}{% for a in range(99999) %}{% for b in range(99999) %}"
    "{% endfor %}{% endfor %}{% endif %}" + GOOD
)
GREEDY = "{% set box = namespace(text='x' * 1000) %}" + (
    "{% if messages|length > 1 %}{% for a in range(40) %}"
    "{% set box.text = box.text ~ box.text %}{% endfor %}{% endif %}" + GOOD
)
SLOW = RENDER_TIMEOUT.replace("range(99999)", "range(99)", 1)  # some tenths of a second
Make = Callable[[str], Awaitable[Renderer]]


@pytest_asyncio.fixture
async def make() -> AsyncIterator[Make]:
    made: list[Renderer] = []

    async def renderer(source: str) -> Renderer:
        template = ChatTemplate(source, special_tokens=["<s>"], variables={"bos_token": "<s>"})
        # long enough that a machine that stands still is no hang
        made.append(Renderer(template, max_wait_s=60.0, hang_s=600.0))
        return made[-1]

    yield renderer
    for each in made:
        await each.close()


async def test_it_renders_as_the_template_does(make: Make) -> None:
    renderer = await make(GOOD)
    pieces = await renderer.render(MESSAGES)
    assert pieces == ["<s>hello ", "<s>"]
    assert [isinstance(piece, LiteralText) for piece in pieces] == [False, True]


@pytest.mark.parametrize("source", [RENDER_TIMEOUT, GREEDY])
async def test_what_does_not_end_is_refused_and_holds_up_nobody(make: Make, source: str) -> None:
    renderer = await make(source)
    assert await renderer.render(MESSAGES) == ["<s>hello ", "<s>"]
    num_turns = 0

    async def count() -> None:
        nonlocal num_turns
        while True:
            await asyncio.sleep(0.01)
            num_turns += 1

    counting = asyncio.create_task(count())
    with pytest.raises(InvalidRequest, match=r"exceeded 2 s|MemoryError") as refused:
        await renderer.render(MESSAGES * 2)
    assert refused.value.param == "messages"
    assert num_turns > 0  # of the event loop, meanwhile
    counting.cancel()
    assert await renderer.render(MESSAGES) == ["<s>hello ", "<s>"]


async def test_a_template_that_refuses_says_why(make: Make) -> None:
    renderer = await make("{{ raise_exception('roles must alternate') }}")
    with pytest.raises(InvalidRequest, match="roles must alternate"):
        await renderer.render(MESSAGES)


async def test_orders_of_one_round_are_answered_apart(make: Make) -> None:
    """Also those behind one that does not end, and those behind one that is refused."""
    renderer = await make(RENDER_TIMEOUT)
    orders = [[{"role": "user", "content": f"{number} "}] for number in range(3 * MAX_ROUND)]
    orders[1] = MESSAGES * 2
    orders[MAX_ROUND] = [{"role": "user"}]
    asked = [asyncio.create_task(renderer.render(each)) for each in orders]
    asked[2].cancel()
    replies = await asyncio.gather(*asked, return_exceptions=True)
    assert isinstance(replies[1], InvalidRequest)
    assert isinstance(replies[2], asyncio.CancelledError)
    others = [number for number in range(len(orders)) if number not in (1, 2, MAX_ROUND)]
    assert [replies[each] for each in others] == [[f"<s>{each} "] for each in others]


async def test_who_leaves_when_the_reply_is_there_spoils_nobodys_turn(make: Make) -> None:
    renderer = await make(GOOD)
    for _ in range(5):
        assert await renderer.render(MESSAGES) == ["<s>hello ", "<s>"]
        leaving = asyncio.create_task(renderer.render(MESSAGES))
        while not renderer._round:
            await asyncio.sleep(0)
        time.sleep(0.02)
        leaving.cancel()
        assert await renderer.render(MESSAGES) == ["<s>hello ", "<s>"]


async def test_who_waits_too_long_for_others_is_told(make: Make) -> None:
    renderer = await make(RENDER_TIMEOUT)
    await renderer.render(MESSAGES)  # the process is there: to start it takes a while
    renderer.max_wait_s = 1.0
    first = [MESSAGES * 2] + [MESSAGES] * (MAX_ROUND - 1)
    asked = [asyncio.create_task(renderer.render(each)) for each in (*first, MESSAGES)]
    replies = await asyncio.gather(*asked, return_exceptions=True)
    assert isinstance(replies[0], InvalidRequest)
    assert all(isinstance(each, Overloaded) for each in replies[1:])


async def test_who_waits_too_long_is_told_in_the_middle_of_a_round(make: Make) -> None:
    """None of its orders takes too long, but together they do, and nobody waits for all of them."""
    renderer = await make(SLOW)
    await renderer.render(MESSAGES)  # the process is there: to start it takes a while
    renderer.max_wait_s = 1.0
    asked = [asyncio.create_task(renderer.render(MESSAGES * 2)) for _ in range(MAX_ROUND)]
    while not renderer._round:
        await asyncio.sleep(0)
    with pytest.raises(Overloaded):
        await renderer.render(MESSAGES)
    replies = await asyncio.gather(*asked, return_exceptions=True)
    assert replies[0] == ["<s>hello ", "<s>", "hello ", "<s>"]
    assert isinstance(replies[-1], Overloaded)


async def test_only_whose_turn_it_is_waits_for_a_process_that_hangs(make: Make) -> None:
    renderer = await make(GOOD)
    assert await renderer.render(MESSAGES) == ["<s>hello ", "<s>"]
    assert renderer._process is not None
    os.kill(renderer._process.pid, signal.SIGSTOP)
    renderer.max_wait_s = 0.2
    renderer.hang_s = 1.0
    told: list[type[BaseException]] = []

    async def ask() -> None:
        with pytest.raises((NoCapacity, Overloaded)) as refused:
            await renderer.render(MESSAGES)
        told.append(refused.type)

    await asyncio.gather(*[ask() for _ in range(3)])
    assert told == [Overloaded, Overloaded, NoCapacity]
    renderer.max_wait_s = 60.0
    assert await renderer.render(MESSAGES) == ["<s>hello ", "<s>"]


def test_an_order_that_nobody_waits_for_is_passed_over() -> None:
    template = ChatTemplate(GOOD, special_tokens=["<s>"], variables={"bos_token": "<s>"})
    assert reply_to(template, RenderJob(MESSAGES, latest_start=time.monotonic() - 1.0)) == Late()
    assert isinstance(reply_to(template, RenderJob(MESSAGES)), Rendered)


async def test_who_waits_when_it_is_closed_is_told(make: Make) -> None:
    renderer = await make(RENDER_TIMEOUT)
    await renderer.start()
    asked = [asyncio.create_task(renderer.render(MESSAGES * 2)) for _ in range(2 * MAX_ROUND)]
    await asyncio.sleep(0.05)
    await renderer.close()
    replies = await asyncio.gather(*asked, return_exceptions=True)
    assert all(isinstance(each, NoCapacity) for each in replies)


async def test_who_leaves_in_the_middle_spoils_nobodys_answer(make: Make) -> None:
    renderer = await make(RENDER_TIMEOUT)
    await renderer.render(MESSAGES)
    leaving = asyncio.create_task(renderer.render(MESSAGES * 2))
    await asyncio.sleep(0)
    leaving.cancel()
    with pytest.raises(asyncio.CancelledError):
        await leaving
    assert await renderer.render(MESSAGES) == ["<s>hello ", "<s>"]


async def test_job_of_a_killed_process_may_be_retried(make: Make) -> None:
    renderer = await make(RENDER_TIMEOUT)
    await renderer.start()
    assert renderer._process is not None
    rendering = asyncio.create_task(renderer.render(MESSAGES * 2))
    await asyncio.sleep(0.05)
    os.kill(renderer._process.pid, signal.SIGKILL)
    with pytest.raises(NoCapacity, match="the template process ended"):
        await rendering
    assert await renderer.render(MESSAGES) == ["<s>hello ", "<s>"]


async def test_it_is_started_anew_after_a_kill_and_leaves_nothing(make: Make) -> None:
    renderer = await make(GOOD)
    await renderer.start()
    process = renderer._process
    assert process is not None
    os.kill(process.pid, signal.SIGKILL)
    await process.wait()
    assert await renderer.render(MESSAGES) == ["<s>hello ", "<s>"]
    process = renderer._process
    await renderer.close()
    assert process is not None and process.returncode is not None
