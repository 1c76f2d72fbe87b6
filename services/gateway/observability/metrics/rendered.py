"""The text of the metrics, rendered at most once in `MAX_AGE_S` for all readers."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from shared.background import item_error, start_awaited
from shared.clock import Clock

MAX_AGE_S = 1.0


class RenderedMetrics:
    """Caches the metrics' text. `render` returns the text under some names; it runs on a thread,
    since it takes 16 ms for 100 workers and would delay streams.
    """

    def __init__(self, render: Callable[[str], bytes], clock: Clock) -> None:
        self._render = render
        self._clock = clock
        self._texts: dict[str, tuple[float, asyncio.Future[bytes]]] = {}

    async def text(self, names: str) -> bytes:
        """Returns the text under the names. Raises the errors of `render`."""
        now = self._clock.now()
        began_at, text = self._texts.get(names, (0.0, None))
        if text is None or now - began_at >= MAX_AGE_S:
            text = start_awaited(asyncio.to_thread(self._render, names))
            self._texts[names] = (now, text)
        try:
            return await asyncio.shield(text)
        except BaseException as raised:
            item_error(raised)
            self._texts.pop(names, None)  # unknown names leave no entry
            raise
