"""Copies of KV on a stream of their own: they wait for no step that the device still computes.

    step thread:  step 1 ─mark─ step 2 ─mark─         the device's default stream
                            └───────▶ copies          the copy stream, while step 2 is computed

A copy waits for the last mark whose work was delivered when the copy was asked for. That covers all
work on its blocks: what it reads was computed by a delivered step, and blocks that it writes become
free only once no step in flight uses them. It has ended when it returns, so later steps see it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

from shared.engine.executors.cuda.cuda_device import CudaDevice

T = TypeVar("T")
# Kernels of copies take microseconds, and else wait for all programs of a product that runs.
HIGH_PRIORITY = -1


class Mark(NamedTuple):
    """The end of what was launched until then."""

    number: int
    event: Any


class CopyStream:
    def __init__(self, device: CudaDevice) -> None:
        """Marks what the calling thread has launched until now."""
        self._driver = device.driver
        self._stream = device.driver.Stream(device.index, HIGH_PRIORITY)
        self._launched = self.delivered = Mark(0, self._event())

    def launch(self, function: Callable[..., T], *arguments: Any) -> tuple[T, Mark]:
        """Calls a function that launches work, and marks the end, also if it then fails."""
        try:
            result = function(*arguments)
        finally:
            self._launched = mark = Mark(self._launched.number + 1, self._event())
        return result, mark

    def deliver(self, mark: Mark | None = None) -> None:
        """Records that a caller has what was launched before the mark, or all that was."""
        mark = self._launched if mark is None else mark
        if mark.number > self.delivered.number:
            self.delivered = mark

    def copy(self, mark: Mark, function: Callable[..., None], *arguments: Any) -> None:
        """Calls a function that copies KV after the work before `mark`, and waits for its end."""
        with self._driver.stream(self._stream):
            self._stream.wait_event(mark.event)
            try:
                function(*arguments)
            finally:
                self._stream.synchronize()

    def _event(self) -> Any:
        event = self._driver.Event()
        event.record()
        return event
