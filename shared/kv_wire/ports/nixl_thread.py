"""The thread that calls NIXL, for all links of a process: it polls what is under way.

NIXL has no descriptor to wait for, and its own thread would take half a core. Here nothing is
called while nothing is under way; then every 50 µs, and every ms what takes long.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from threading import Thread
from typing import Any, TypeVar

from shared.errors import LinkLost
from shared.kv_wire.ports.nixl_agent import Agent, Transfer

T = TypeVar("T")

POLL_S, SLOW_POLL_S, SERVE_S, IDLE_S = 50e-6, 1e-3, 0.5e-3, 0.05
SLOW_AFTER_S = 0.02
Report = Callable[[Any, BaseException | None], None]


@dataclass(eq=False)
class _Running:
    transfer: Transfer
    report: Report
    memory: object  # which must exist until the transfer has ended


_GIVEN_UP: list[_Running] = []


@dataclass(eq=False)
class _Served:
    """An agent from which others read while `is_busy`."""

    agent: Agent
    is_busy: Callable[[], bool]


class NixlThread:
    def __init__(self) -> None:
        self._orders: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._running: list[_Running] = []
        self._served: list[_Served] = []
        self._is_closed = False
        self._changed_at = 0.0
        self._thread = Thread(target=self._run, name="kv-nixl", daemon=True)
        self._thread.start()

    async def call(self, function: Callable[..., T], *arguments: Any) -> T:
        """Calls a function on the thread. A cancelled caller does not wait for it."""
        answered: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        report = _reporting(answered)

        def order() -> None:
            try:
                report(function(*arguments), None)
            except BaseException as error:
                report(None, error)

        self._orders.put(order)
        return await answered

    def read(self, start: Callable[[], Transfer], memory: object) -> asyncio.Future[None]:
        """Starts a transfer. The future raises LinkLost. It is done once nothing of the transfer
        arrives any more; it must not be cancelled.
        """
        ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        report = _reporting(ended)

        def order() -> None:
            self._changed_at = time.monotonic()
            try:
                self._running.append(_Running(start(), report, memory))
            except BaseException as error:
                report(None, error)

        self._orders.put(order)
        return ended

    def serve(self, agent: Agent, is_busy: Callable[[], bool]) -> Callable[[], None]:
        """Serves reads from an agent until the returned function is called."""
        served = _Served(agent, is_busy)
        self._orders.put(lambda: self._served.append(served))

        def stop() -> None:
            if served in self._served:
                self._served.remove(served)

        return lambda: self._orders.put(stop)

    def order(self, function: Callable[[], None]) -> None:
        """Calls a function on the thread, later; it must not raise."""
        self._orders.put(function)

    def wake(self) -> None:
        self._orders.put(None)

    def close(self) -> None:
        """Ends the thread after the orders until now. Reads that do not end are given up: their
        memory exists as long as the process.
        """
        self._orders.put(self._end)

    def _end(self) -> None:
        self._is_closed = True
        _GIVEN_UP.extend(self._running)

    # ── on the thread ────────────────────────────────────────────────────────────────────────────

    def _run(self) -> None:
        while not self._is_closed:
            with suppress(Empty):
                order = self._orders.get(timeout=self._pause_s())
                while True:
                    if order is not None:
                        order()
                    order = self._orders.get_nowait()
            self._running = [each for each in self._running if not self._has_ended(each)]
            for served in self._served:
                with suppress(LinkLost):  # of a reader that has died: the link ends, too
                    served.agent.progress()

    def _pause_s(self) -> float | None:
        if self._running:
            is_slow = time.monotonic() - self._changed_at > SLOW_AFTER_S
            return SLOW_POLL_S if is_slow else POLL_S
        if not self._served:
            return None
        return SERVE_S if any(each.is_busy() for each in self._served) else IDLE_S

    def _has_ended(self, running: _Running) -> bool:
        try:
            if not running.transfer.is_done():
                return False
        except BaseException as error:
            running.report(None, error)
        else:
            running.report(None, None)
        self._changed_at = time.monotonic()
        return True


def _reporting(future: asyncio.Future[Any]) -> Report:
    loop = asyncio.get_running_loop()
    future.add_done_callback(lambda each: each.cancelled() or each.exception())

    def settle(result: Any, error: BaseException | None) -> None:
        if future.done():
            return
        if error is None:
            future.set_result(result)
        else:
            future.set_exception(error)

    def report(result: Any, error: BaseException | None) -> None:
        with suppress(RuntimeError):  # the loop is closed: nobody waits
            loop.call_soon_threadsafe(settle, result, error)

    return report
