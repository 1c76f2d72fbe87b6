"""The way of one request's tokens to its client.

Tokens become text as they arrive, so a stop string is seen at once however slowly the client
reads. Text waits here until it is taken; what piles up for a slow client is bounded by
`max_tokens` and leaves in one piece.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from services.gateway.metrics import GatewayMetrics
from services.gateway.stream import End
from services.gateway.text.assembler import TextAssembler
from shared.clock import Clock
from shared.errors import HearthError
from shared.messages import Finish, Request, Served


class ClientGone(HearthError):
    """Nobody is left to read this error; its code shows in the metrics."""

    code = "client_gone"
    http_status = 499


@dataclass(frozen=True, slots=True)
class Piece:
    choice_index: int
    text: str
    finish_reason: str | None


class _ChoiceText:
    def __init__(self, assembler: TextAssembler) -> None:
        self.assembler = assembler
        self.pieces: list[str] = []
        self.finish_reason: str | None = None
        self.is_taken = False  # with its finish reason


class Delivery:
    """A `stream.Receiver` on one side, `next()` on the other."""

    def __init__(
        self,
        request: Request,
        assemblers: Sequence[TextAssembler],
        metrics: GatewayMetrics,
        clock: Clock,
        *,
        num_prompt_tokens: int,
    ) -> None:
        self.request_id = request.request_id
        self.num_prompt_tokens = num_prompt_tokens
        self.served: Served | None = None
        self.end: End | None = None
        self._texts = [_ChoiceText(each) for each in assemblers]
        self._metrics = metrics
        self._clock = clock
        self._opened_at = clock.now()
        self._heard_at: float | None = None
        self._waiter: asyncio.Future[None] | None = None

    @property
    def num_output_tokens(self) -> int:
        return sum(text.assembler.num_tokens for text in self._texts)

    @property
    def num_cached_tokens(self) -> int | None:
        """None when the worker was stopped before it could tell."""
        if self.served is None:
            return None
        return min(self.served.num_cached_tokens, self.num_prompt_tokens)

    async def next(self) -> list[Piece]:
        """What came since the last call, at least one piece; empty when all is told.

        Raises the HearthError that ended the request.
        """
        while True:
            pieces = self._take()
            if pieces:
                return pieces
            if self.end is not None:
                if self.end.error is not None:
                    raise self.end.error
                return []
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter

    # ── stream.Receiver ──────────────────────────────────────────────────────────────────────────

    def on_tokens(self, choice_index: int, token_ids: Sequence[int]) -> bool:
        self._observe_gap()
        text = self._texts[choice_index]
        fresh = text.assembler.feed(token_ids)
        if fresh:
            text.pieces.append(fresh)
            self._wake()
        if text.assembler.is_stopped:
            text.finish_reason = "stop"
            return False
        return True

    def on_served(self, served: Served) -> None:
        self.served = served

    def on_finish(self, choice_index: int, finish: Finish) -> None:
        text = self._texts[choice_index]
        text.pieces.append(text.assembler.flush())
        text.finish_reason = "stop" if text.assembler.is_stopped else finish.reason
        self.served = finish.served

    def on_end(self, end: End) -> None:
        self.end = end
        if end.error is None:
            self._metrics.count_request(self._texts[0].finish_reason or "stop")
        else:
            self._metrics.count_request(end.error.code)
        self._metrics.count_tokens(
            prompt=self.num_prompt_tokens,
            cached=self.num_cached_tokens or 0,
            output=self.num_output_tokens,
        )
        self._wake()

    # ─────────────────────────────────────────────────────────────────────────────────────────────

    def _take(self) -> list[Piece]:
        taken = []
        for index, text in enumerate(self._texts):
            is_ending = text.finish_reason is not None and not text.is_taken
            joined = "".join(text.pieces)
            if joined or is_ending:
                taken.append(Piece(index, joined, text.finish_reason))
                text.pieces.clear()
                text.is_taken = is_ending
        return taken

    def _observe_gap(self) -> None:
        now = self._clock.now()
        if self._heard_at is None:
            self._metrics.observe_ttft(now - self._opened_at)
        else:
            self._metrics.observe_itl(now - self._heard_at)
        self._heard_at = now

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
