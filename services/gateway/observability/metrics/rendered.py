"""The text of the metrics, rendered at most once in `MAX_AGE_S`, however many read it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from shared.background import item_error, start_awaited
from shared.clock import Clock

MAX_AGE_S = 1.0


class RenderedMetrics:
    """`render`: the text under some names; called on a thread: of 100 workers it takes 16 ms, for
    which no stream has to wait.
    """

    def __init__(self, render: Callable[[str], bytes], clock: Clock) -> None:
        self._render = render
        self._clock = clock
        self._texts: dict[str, tuple[float, asyncio.Future[bytes]]] = {}

    async def text(self, names: str) -> bytes:
        """Raises what `render` raises."""
        now = self._clock.now()
        began_at, text = self._texts.get(names, (0.0, None))
        if text is None or now - began_at >= MAX_AGE_S:
            text = start_awaited(asyncio.to_thread(self._render, names))
            self._texts[names] = (now, text)
        try:
            return await asyncio.shield(text)
        except BaseException as raised:
            item_error(raised)
            self._texts.pop(names, None)  # also of names that do not exist
            raise
