"""The response of a text completion, as a dialect of `http/response.py`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from services.gateway.http import sse
from services.gateway.http.dialect import ChoiceResult
from services.gateway.openai.completions import Completion, CompletionChoice, CompletionChunk
from services.gateway.openai.errors import OpenAIDialect
from services.gateway.openai.logprobs import (
    CompletionLogprobs,
    completion_logprobs,
    joined,
    mean_logprob,
    prompt_logprobs,
)
from services.gateway.openai.usage import hearth_info_of, to_usage
from services.gateway.request.output_merger import OutputMerger
from services.gateway.request.request_output import OutputDelta, RequestOutput
from services.gateway.text.scored_tokens import ScoredToken
from services.gateway.text.token_bytes import TokenBytes


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
            choice = self._choice(index, texts.pop() if texts else "", delta.tokens)
            last = sse.event(self._chunk(_finished(choice, index, delta.finish_reason)))
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

    def body(self, results: list[ChoiceResult]) -> Completion:
        outputs = self.merger.outputs
        return Completion(
            id=f"cmpl-{self.request_id}",
            created=self.created,
            model=self.model,
            choices=self._best(results),
            usage=to_usage(outputs),
            hearth=hearth_info_of(self.request_id, outputs),
        )

    def _best(self, results: list[ChoiceResult]) -> list[CompletionChoice]:
        shown: list[CompletionChoice] = []
        num_sampled = self.merger.num_choices
        for start in range(0, len(results), num_sampled):
            sampled = results[start : start + num_sampled]
            if self.num_shown < num_sampled:
                sampled.sort(key=lambda each: mean_logprob(each.tokens), reverse=True)
            for each in sampled[: self.num_shown]:
                choice = self._choice(each.index, each.text, each.tokens)
                shown.append(_finished(choice, len(shown), each.finish_reason))
        return shown

    def _choice(self, index: int, text: str, tokens: Sequence[ScoredToken]) -> CompletionChoice:
        """Includes the prompt if echo is requested and this is the choice's first output."""
        output = self._output_of(index)
        logprobs = self._logprobs(output, tokens) if self.has_logprobs else None
        if output.echo is not None and self._is_echo_due(index):
            self._echoed.add(index)
            text = output.echo.text + text
            if logprobs is not None:
                of_prompt = prompt_logprobs(output.echo, output.prompt_logprobs, self.token_bytes)
                logprobs = joined(of_prompt, logprobs)
        return CompletionChoice(index=index, text=text, logprobs=logprobs)

    def _logprobs(self, output: RequestOutput, tokens: Sequence[ScoredToken]) -> CompletionLogprobs:
        first_offset = 0 if output.echo is None else len(output.echo.text)
        return completion_logprobs(tokens, self.token_bytes, first_offset=first_offset)

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


def _finished(choice: CompletionChoice, index: int, finish_reason: str | None) -> CompletionChoice:
    return CompletionChoice(
        index=index, text=choice.text, logprobs=choice.logprobs, finish_reason=finish_reason
    )
