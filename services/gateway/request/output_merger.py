"""All deliveries of one answer: a request with several prompts is several requests inside."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import partial

from services.gateway.request.request_output import OutputDelta, RequestOutput


class OutputMerger:
    """`next` gives what any of the deliveries has to tell; choices count on over the prompts."""

    def __init__(self, deliveries: Sequence[RequestOutput], *, num_choices: int = 1) -> None:
        """`num_choices`: of each prompt."""
        self.deliveries = tuple(deliveries)
        self.num_choices = num_choices
        self._fresh = dict.fromkeys(self.deliveries)
        self._num_open = len(self.deliveries)
        self._waiter: asyncio.Future[None] | None = None
        for index, delivery in enumerate(self.deliveries):
            delivery.first_choice_index = index * num_choices
            delivery.on_news = partial(self._wake, delivery)

    @property
    def is_told(self) -> bool:
        """`next` has given all that there was, and none of the requests failed."""
        return not self._num_open

    async def next(self) -> list[OutputDelta]:
        """What came since the last call, at least one piece; empty when all is told.

        Raises the HearthError that ended one of the requests, once nothing else is left to tell.
        """
        while True:
            pieces = self._take()
            if pieces or not self._num_open:
                return pieces
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter

    def _take(self) -> list[OutputDelta]:
        fresh, self._fresh = self._fresh, {}
        pieces = [piece for delivery in fresh for piece in delivery.take()]
        for delivery in fresh:
            if delivery.end is not None:
                self._close(delivery, has_more=bool(pieces))
        return pieces

    def _close(self, delivery: RequestOutput, *, has_more: bool) -> None:
        assert delivery.end is not None
        error = delivery.end.error
        if error is None:
            self._num_open -= 1
        elif has_more:
            self._fresh[delivery] = None  # what came before the error is told first
        else:
            raise error

    def _wake(self, delivery: RequestOutput) -> None:
        self._fresh[delivery] = None
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
