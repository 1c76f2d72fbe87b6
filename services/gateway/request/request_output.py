"""Buffers one request's output for the client.

Tokens are detokenized on arrival, so a stop string is detected at once however slowly the client
reads. Text is buffered per token until `take`; the backlog of a slow client is bounded by
`max_tokens` and is joined.
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

MAX_TEXTS = 64  # buffered texts of a choice; more are joined


class ClientDisconnected(HearthError):
    """Reaches no client, since the client disconnected; its code appears in the metrics."""

    code = "client_gone"
    http_status = 499


class OutputDelta(msgspec.Struct, frozen=True):
    """`texts`: one per token, or joined. `tokens`: the tokens of the text, if logprobs were
    requested.
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
        self.is_taken = False  # including the finish reason
        self.served: Served | None = None
        self.last_token_at: float | None = None

    def take_texts(self) -> list[str]:
        """Joins the texts of tokens with logprobs, since one delta holds these tokens together."""
        texts, self.texts = self.texts, []
        return ["".join(texts)] if len(texts) > MAX_TEXTS or self.tokens else texts

    def take_tokens(self) -> list[ScoredToken]:
        tokens, self.tokens = self.tokens, []
        return tokens


class RequestOutput:
    """A `stream.Receiver` that buffers the output until `take()`.

    `first_choice_index`: index of its first choice in a response of several requests.
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
        self._awaits_prompt_logprobs = (
            sampling.num_prompt_logprobs is not None and self.num_prompt_tokens > 1
        )
        self._metrics = metrics
        self._clock = clock
        self._on_end = on_end
        self._opened_at = clock.now()

    @property
    def num_output_tokens(self) -> int:
        return sum(text.assembler.num_tokens for text in self._texts)

    @property
    def served(self) -> Served | None:
        """`Served` of the choice whose prompt was computed; the other choices share that prompt."""
        known = [text.served for text in self._texts if text.served is not None]
        return min(known, key=lambda served: served.num_cached_tokens, default=None)

    @property
    def num_cached_tokens(self) -> int | None:
        """None if the worker was stopped before it reported the number."""
        served = self.served
        return None if served is None else min(served.num_cached_tokens, self.num_prompt_tokens)

    @property
    def has_delivered(self) -> bool:
        """Whether the request succeeded, or returned output tokens before it failed."""
        has_succeeded = self.end is not None and self.end.error is None
        return has_succeeded or self.num_output_tokens > 0

    def take(self) -> list[OutputDelta]:
        """Returns the deltas since the last call; empty while prompt logprobs are outstanding."""
        if self._awaits_prompt_logprobs and self.end is None:
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
        if self._awaits_prompt_logprobs:
            self.prompt_logprobs = logprobs
            self._awaits_prompt_logprobs = False
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
        if not self._shows_output:  # the client requested no tokens
            return "length"
        return "stop" if text.assembler.is_stopped else finish.reason

    def _observe_gap(self, text: _ChoiceText) -> None:
        """Observes TTFT at the request's first token, ITL between two tokens of a choice."""
        now = self._clock.now()
        if text.last_token_at is not None:
            self._metrics.observe_itl(now - text.last_token_at)
        elif all(each.last_token_at is None for each in self._texts):
            self._metrics.observe_ttft(now - self._opened_at)
        text.last_token_at = now
