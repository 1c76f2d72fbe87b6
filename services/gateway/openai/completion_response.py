"""The response of a text completion, as a dialect of `http/response.py`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial

import msgspec

from services.gateway.http import sse
from services.gateway.http.dialect import ChoiceResult
from services.gateway.http.json_parts import with_list, with_value
from services.gateway.openai.completions import Completion, CompletionChoice, CompletionChunk
from services.gateway.openai.errors import OpenAIDialect
from services.gateway.openai.logprobs import (
    ListedToken,
    check_prompt_logprobs,
    completion_logprobs,
    completion_logprobs_parts,
    mean_logprob,
    output_tokens,
    prompt_tokens,
)
from services.gateway.openai.usage import hearth_info_of, to_usage
from services.gateway.request.output_merger import OutputMerger
from services.gateway.request.request_output import OutputDelta, RequestOutput
from services.gateway.text.scored_tokens import ScoredToken
from services.gateway.text.token_bytes import TokenBytes

_encode = msgspec.json.Encoder().encode


@dataclass(frozen=True, slots=True)
class CompletionRenderer(OpenAIDialect):
    """Returns the best `num_shown` of the choices sampled for a prompt."""

    merger: OutputMerger
    token_bytes: TokenBytes
    request_id: str
    model: str
    created: int
    has_usage: bool
    has_logprobs: bool
    num_shown: int
    _echoed: set[int] = field(default_factory=set)  # choices whose prompt was sent
    _text_events: dict[int, sse.TextEvent] = field(default_factory=dict)  # by choice

    def event(self, delta: OutputDelta) -> bytes:
        """Returns one event per text; a choice's last has the finish reason."""
        index, is_echo_due, last = delta.choice_index, self._is_echo_due(delta.choice_index), b""
        texts = [delta.text] if is_echo_due else list(delta.texts)
        if is_echo_due or self.has_logprobs or delta.finish_reason is not None:
            text = texts.pop() if texts else ""
            choice = self._choice(index, text, delta.tokens, delta.finish_reason)
            last = sse.event(self._chunk(choice))
        return self._text_event(index).of(texts) + last

    def closing(self) -> bytes:
        if not self.has_usage:
            return sse.DONE
        outputs = self.merger.outputs
        chunk = CompletionChunk(
            id=f"cmpl-{self.request_id}",
            object="text_completion",
            created=self.created,
            model=self.model,
            choices=(),
            usage=to_usage(outputs),
            hearth=hearth_info_of(self.request_id, outputs),
        )
        return sse.event(chunk) + sse.DONE

    def body(self, results: list[ChoiceResult]) -> Iterator[bytes]:
        """Raises HearthError if a worker sent a wrong number of prompt logprobs."""
        outputs = self.merger.outputs
        if self.has_logprobs:
            for each in outputs:
                _check_echo(each)
        completion = Completion(
            id=f"cmpl-{self.request_id}",
            created=self.created,
            model=self.model,
            choices=(),
            usage=to_usage(outputs),
            hearth=hearth_info_of(self.request_id, outputs),
        )
        shown = (self._choice_parts(each, index) for index, each in enumerate(self._best(results)))
        return with_list(_encode(completion), b"choices", shown)

    def _best(self, results: list[ChoiceResult]) -> list[ChoiceResult]:
        shown: list[ChoiceResult] = []
        num_sampled = self.merger.num_choices
        for start in range(0, len(results), num_sampled):
            sampled = results[start : start + num_sampled]
            if self.num_shown < num_sampled:
                sampled.sort(key=lambda each: mean_logprob(each.tokens), reverse=True)
            shown += sampled[: self.num_shown]
        return shown

    def _choice_parts(self, result: ChoiceResult, index: int) -> Iterable[bytes]:
        echo = self._output_of(result.index).echo
        text = result.text if echo is None else echo.text + result.text
        choice = CompletionChoice(index=index, text=text, finish_reason=result.finish_reason)
        encoded = _encode(choice)
        if not self.has_logprobs:
            return (encoded,)
        tokens = partial(self._listed, result.index, result.tokens, has_echo=echo is not None)
        logprobs = completion_logprobs_parts(tokens, self.token_bytes)
        return with_value(encoded, b"logprobs", logprobs)

    def _choice(
        self, index: int, text: str, tokens: Sequence[ScoredToken], finish_reason: str | None
    ) -> CompletionChoice:
        """Includes the prompt if echo is requested and this is the choice's first output."""
        output = self._output_of(index)
        is_echo_due = self._is_echo_due(index)
        if output.echo is not None and is_echo_due:
            self._echoed.add(index)
            text = output.echo.text + text
        logprobs = None
        if self.has_logprobs:
            if is_echo_due:
                _check_echo(output)
            listed = list(self._listed(index, tokens, has_echo=is_echo_due))
            logprobs = completion_logprobs(listed, self.token_bytes)
        return CompletionChoice(
            index=index, text=text, logprobs=logprobs, finish_reason=finish_reason
        )

    def _listed(
        self, index: int, tokens: Sequence[ScoredToken], *, has_echo: bool
    ) -> Iterator[ListedToken]:
        output = self._output_of(index)
        first_offset = 0 if output.echo is None else len(output.echo.text)
        if output.echo is not None and has_echo:
            yield from prompt_tokens(output.echo, output.prompt_logprobs)
        yield from output_tokens(tokens, first_offset=first_offset)

    def _is_echo_due(self, index: int) -> bool:
        return self._output_of(index).echo is not None and index not in self._echoed

    def _output_of(self, index: int) -> RequestOutput:
        return self.merger.outputs[index // self.merger.num_choices]

    def _text_event(self, index: int) -> sse.TextEvent:
        known = self._text_events.get(index)
        if known is None:
            known = sse.TextEvent(
                lambda text: self._chunk(CompletionChoice(index=index, text=text))
            )
            self._text_events[index] = known
        return known

    def _chunk(self, choice: CompletionChoice) -> CompletionChunk:
        return CompletionChunk(
            id=f"cmpl-{self.request_id}",
            object="text_completion",
            created=self.created,
            model=self.model,
            choices=(choice,),
        )


def _check_echo(output: RequestOutput) -> None:
    if output.echo is not None:
        check_prompt_logprobs(output.echo, output.prompt_logprobs)
