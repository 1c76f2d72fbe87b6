"""Several pushes that succeed or fail as one."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from shared.background import start_awaited
from shared.engine.kv.ports import Push
from shared.kv_wire.link import PushPlan


class JoinedPush:
    """A `Push` of several pushes. The first error cancels the others, and is raised once
    all have ended.
    """

    def __init__(self, pushes: Sequence[Push]) -> None:
        self._pushes = pushes

    @property
    def num_bytes(self) -> int:
        return sum(push.num_bytes for push in self._pushes)

    @property
    def link_s(self) -> float:
        return max((push.link_s for push in self._pushes), default=0.0)

    @property
    def plan(self) -> PushPlan | None:
        """That of the first one that has begun."""
        return next((push.plan for push in self._pushes if push.plan is not None), None)

    def computed(self, num_computed_tokens: int) -> None:
        for push in self._pushes:
            push.computed(num_computed_tokens)

    def cancel(self) -> None:
        for push in self._pushes:
            push.cancel()

    async def run(self) -> bool:
        tasks = [start_awaited(push.run()) for push in self._pushes]
        try:
            if tasks:
                await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
        finally:
            if not all(task.done() for task in tasks):
                self.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        results = [task.result() for task in tasks]  # raises if any failed
        return all(results)
