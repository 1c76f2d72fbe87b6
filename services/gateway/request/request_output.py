"""The way of one request's tokens to its client.

Tokens become text as they arrive, so a stop string is seen at once however slowly the client
reads. Text waits here until it is taken, each token's apart; what piles up for a slow client is
bounded by `max_tokens` and leaves in one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec

from services.gateway.metrics import GatewayMetrics
from services.gateway.request.preparation import PreparedRequest
from services.gateway.streams.stream import StreamEnd
from services.gateway.text.scored_tokens import ScoredToken
from services.gateway.text.text_assembler import TextAssembler
from shared.clock import Clock
from shared.errors import HearthError
from shared.messages import Finish, Served, TokenLogprobs

MAX_TEXTS = 64  # of a choice that wait; more are joined


class ClientGone(HearthError):
    """Nobody is left to read this error; its code shows in the metrics."""

    code = "client_gone"
    http_status = 499


class OutputDelta(msgspec.Struct, frozen=True):
    """`texts`: of a token each, or joined. `tokens`: those of the text, where logprobs were asked
    for.
    """

    choice_index: int
    texts: Sequence[str]
    finish_reason: str | None
    tokens: Sequence[ScoredToken] = ()

    @property
    def text(self) -> str:
        return "".join(self.texts)


class _ChoiceText:
    def __init__(self, assembler: TextAssembler) -> None:
        self.assembler = assembler
        self.texts: list[str] = []
        self.tokens: list[ScoredToken] = []
        self.finish_reason: str | None = None
        self.is_taken = False  # with its finish reason
        self.served: Served | None = None
        self.last_token_at: float | None = None

    def take_texts(self) -> list[str]:
        """Those of tokens with logprobs are joined, as the tokens are."""
        texts, self.texts = self.texts, []
        return ["".join(texts)] if len(texts) > MAX_TEXTS or self.tokens else texts

    def take_tokens(self) -> list[ScoredToken]:
        tokens, self.tokens = self.tokens, []
        return tokens


class RequestOutput:
    """A `stream.Receiver` on one side, `take()` on the other.

    `first_choice_index` is where its choices begin in an answer of several requests.
    """

    def __init__(
        self,
        prepared: PreparedRequest,
        assemblers: Sequence[TextAssembler],
        metrics: GatewayMetrics,
        clock: Clock,
        *,
        on_end: Callable[[RequestOutput], None] = lambda output: None,
    ) -> None:
        sampling = prepared.request.sampling
        self.request_id = prepared.request.request_id
        self.num_prompt_tokens = len(prepared.prompt_token_ids)
        self.echo = prepared.echo
        self.end: StreamEnd | None = None
        self.embedding: bytes | None = None
        self.prompt_logprobs: Sequence[TokenLogprobs] = ()
        self.first_choice_index = 0
        self.on_update: Callable[[], None] = lambda: None
        self._texts = [_ChoiceText(each) for each in assemblers]
        self._shows_output = prepared.generation.shows_output
        self._lacks_prompt = sampling.num_prompt_logprobs is not None and self.num_prompt_tokens > 1
        self._metrics = metrics
        self._clock = clock
        self._on_end = on_end
        self._opened_at = clock.now()

    @property
    def num_output_tokens(self) -> int:
        return sum(text.assembler.num_tokens for text in self._texts)

    @property
    def served(self) -> Served | None:
        """Of the choice for which the prompt was computed; the others share it."""
        known = [text.served for text in self._texts if text.served is not None]
        return min(known, key=lambda served: served.num_cached_tokens, default=None)

    @property
    def num_cached_tokens(self) -> int | None:
        """None when the worker was stopped before it could tell."""
        served = self.served
        return None if served is None else min(served.num_cached_tokens, self.num_prompt_tokens)

    @property
    def has_delivered(self) -> bool:
        """It has ended well, or something of the answer came before it failed."""
        is_whole = self.end is not None and self.end.error is None
        return is_whole or self.num_output_tokens > 0

    def take(self) -> list[OutputDelta]:
        """What came since the last call; nothing before the prompt's logprobs, if they are due."""
        if self._lacks_prompt and self.end is None:
            return []
        taken = []
        for index, text in enumerate(self._texts, self.first_choice_index):
            is_ending = text.finish_reason is not None and not text.is_taken
            if text.texts or text.tokens or is_ending:
                texts = text.take_texts()
                taken.append(OutputDelta(index, texts, text.finish_reason, text.take_tokens()))
                text.is_taken = is_ending
        return taken

    # ── stream.Receiver ──────────────────────────────────────────────────────────────────────────

    def on_tokens(
        self, choice_index: int, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs]
    ) -> bool:
        text = self._texts[choice_index]
        self._observe_gap(text)
        if not self._shows_output:
            return True
        fresh = text.assembler.feed(token_ids, logprobs)
        if logprobs:
            text.tokens += text.assembler.take_scored()
        text.texts += fresh
        if fresh or text.tokens:
            self.on_update()
        if text.assembler.is_stopped:
            text.finish_reason = "stop"
            self.on_update()
            return False
        return True

    def on_served(self, choice_index: int, served: Served) -> None:
        self._texts[choice_index].served = served

    def on_prompt_logprobs(self, logprobs: Sequence[TokenLogprobs]) -> None:
        if self._lacks_prompt:
            self.prompt_logprobs = logprobs
            self._lacks_prompt = False
            self.on_update()

    def on_finish(self, choice_index: int, finish: Finish) -> None:
        text = self._texts[choice_index]
        fresh = text.assembler.flush()
        if fresh:
            text.texts.append(fresh)
        text.tokens += text.assembler.take_scored()
        text.finish_reason = self._finish_reason(text, finish)
        text.served = finish.served
        self.embedding = finish.embedding
        self.on_update()

    def on_end(self, end: StreamEnd) -> None:
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
        self._on_end(self)
        self.on_update()

    # ─────────────────────────────────────────────────────────────────────────────────────────────

    def _finish_reason(self, text: _ChoiceText, finish: Finish) -> str:
        if not self._shows_output:  # no token was wanted, and none is shown
            return "length"
        return "stop" if text.assembler.is_stopped else finish.reason

    def _observe_gap(self, text: _ChoiceText) -> None:
        """The first token of any choice is that of the request; gaps are those of a choice."""
        now = self._clock.now()
        if text.last_token_at is not None:
            self._metrics.observe_itl(now - text.last_token_at)
        elif all(each.last_token_at is None for each in self._texts):
            self._metrics.observe_ttft(now - self._opened_at)
        text.last_token_at = now
