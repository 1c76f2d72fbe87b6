"""Converts a request of the Responses API to a GenerationRequest."""

from __future__ import annotations

import msgspec

from services.gateway.dialects.responses.fields import CompleteRequest, TextFormat
from services.gateway.dialects.responses.input import turns_of
from services.gateway.dialects.responses.tools import options_of
from services.gateway.request.conversation import ReasoningOptions, chat_prompt
from services.gateway.request.generation_request import GenerationRequest
from services.gateway.request.sampling import SamplingFields
from services.gateway.structured.grammars.constraint import OutputConstraint
from services.gateway.structured.grammars.constraint_fields import ResponseFormat, constraint_of
from shared.errors import InvalidRequest

FORMAT = "text.format"
_OWN_PARAM = "response_format"  # the `param` of a constraint made from a format


def to_generation_request(body: CompleteRequest, default_model: str) -> GenerationRequest:
    """Returns one request. Raises InvalidRequest if fields contradict each other, and
    PayloadTooLarge.
    """
    if body.input is None and not body.history:
        raise InvalidRequest("input: send a text or items", param="input")
    effort = None if body.reasoning is None else body.reasoning.effort
    turns = turns_of(body.instructions, body.history, body.items)
    tools = options_of(body.placed_tools, body.tool_choice, body.parallel_tool_calls)
    output, variables = _output_of(body), body.chat_template_kwargs
    return GenerationRequest(
        model=body.model or default_model,
        prompt=chat_prompt(turns, tools, effort=effort, variables=variables, param="input"),
        sampling=body,
        max_tokens=body.max_output_tokens,
        max_tokens_param="max_output_tokens",
        num_logprobs=(body.top_logprobs or 0) if body.has_logprobs else None,
        logprobs_param="top_logprobs" if body.top_logprobs else "include",
        cache_salt=body.cache_salt or "",
        affinity_key=body.prompt_cache_key or "",
        priority=body.priority,
        tools=tools,
        reasoning=ReasoningOptions(effort=effort),
        output=output,
    )


def without_prompt(body: CompleteRequest, stored_input: bytes) -> CompleteRequest:
    """Returns the body without its conversation, except the tools in it. `stored_input`: the items
    as they are stored, in JSON.
    """
    return msgspec.structs.replace(
        body,
        input="",
        hearth_history=msgspec.UNSET,
        hearth_tools=body.item_tools,
        hearth_input=msgspec.Raw(stored_input),
    )


def _output_of(body: CompleteRequest) -> OutputConstraint | None:
    """Returns the constraint of `text.format`, or of a field in which other servers have it."""
    other = constraint_of(body)
    given = None if body.text is None else body.text.format
    if given is None or given.type == "text":
        return other
    if other is not None:
        raise InvalidRequest(f"{FORMAT} and {other.param} exclude each other", param=other.param)
    try:
        own = constraint_of(SamplingFields(response_format=_response_format(given)))
    except InvalidRequest as error:
        message = _own_place(error.message)
        raise InvalidRequest(message, param=_own_place(error.param or FORMAT)) from error
    assert own is not None, "a text has no constraint"
    return msgspec.structs.replace(own, param=_own_place(own.param))


def _response_format(given: TextFormat) -> ResponseFormat:
    if given.type != "json_schema":
        return ResponseFormat(type=given.type)
    wrapper = {"name": given.name, "schema": given.schema, "strict": given.strict}
    return ResponseFormat(type=given.type, json_schema=wrapper)


def _own_place(text: str) -> str:
    return text.replace(f"{_OWN_PARAM}.json_schema", FORMAT).replace(_OWN_PARAM, FORMAT)
