"""Merges the outputs of one response: each prompt of an HTTP request is a separate request."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from functools import partial

from services.gateway.request.request_output import OutputDelta, RequestOutput


class OutputMerger:
    """`next` returns the deltas of all outputs; choice indices continue across the prompts."""

    def __init__(
        self,
        outputs: Sequence[RequestOutput],
        *,
        num_choices: int = 1,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        """`num_choices`: choices per prompt. `headers`: the state of the tenant's limits."""
        self.outputs = tuple(outputs)
        self.headers = {} if headers is None else headers
        self.num_choices = num_choices
        self._fresh = dict.fromkeys(self.outputs)
        self._num_open = len(self.outputs)
        self._waiter: asyncio.Future[None] | None = None
        for index, output in enumerate(self.outputs):
            output.first_choice_index = index * num_choices
            output.on_update = partial(self._wake, output)

    @property
    def is_complete(self) -> bool:
        """Whether `next` has returned all deltas and none of the requests failed."""
        return not self._num_open

    async def next(self) -> list[OutputDelta]:
        """Waits for the next deltas. Returns an empty list once all requests are complete.

        Raises the HearthError that ended one of the requests, after the deltas before it.
        """
        while True:
            deltas = self._take()
            if deltas or not self._num_open:
                return deltas
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter

    def _take(self) -> list[OutputDelta]:
        fresh, self._fresh = self._fresh, {}
        deltas = [delta for output in fresh for delta in output.take()]
        for output in fresh:
            if output.end is not None:
                self._close(output, has_more=bool(deltas))
        return deltas

    def _close(self, output: RequestOutput, *, has_more: bool) -> None:
        assert output.end is not None
        error = output.end.error
        if error is None:
            self._num_open -= 1
        elif has_more:
            self._fresh[output] = None  # deltas before the error are returned first
        else:
            raise error

    def _wake(self, output: RequestOutput) -> None:
        self._fresh[output] = None
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
