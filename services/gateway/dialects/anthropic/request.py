"""The body of `/v1/messages`, and its conversion to a GenerationRequest."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from services.gateway.dialects.anthropic.blocks import (
    AnthropicMessage,
    Messages,
    SystemField,
    leave_out_blocks,
)
from services.gateway.dialects.anthropic.tools import AnthropicChoiceField, Tools, tool_options
from services.gateway.dialects.anthropic.turns import turns_of
from services.gateway.request.conversation import (
    Effort,
    ReasoningOptions,
    chat_prompt,
)
from services.gateway.request.generation_request import GenerationRequest
from services.gateway.request.sampling import (
    MAX_INT,
    MAX_STOP_STRINGS,
    Limit,
    SamplingFields,
    StopString,
    capped,
)
from services.gateway.request.supported_fields import (
    FOREIGN_FIELDS,
    HARMLESS_FIELDS,
    SupportedFields,
)
from services.gateway.structured.grammars.constraint import OutputConstraint
from services.gateway.structured.tools.value_bounds import check_values
from shared.errors import InvalidRequest

MAX_KEY_CHARS = 256  # characters of an affinity key

# Fields that would change the output and that are not supported, with the values that change
# nothing. Any other unknown field is ignored, such as `context_management`, `service_tier`.
NEUTRAL_VALUES: dict[str, tuple[Any, ...]] = {
    **{name: values for name, values in FOREIGN_FIELDS.items() if name != "thinking"},
    "mcp_servers": (None, []),
    # OpenAI's and vLLM's fields, which have other names or none here
    "bad_words": (None, []),
    "best_of": (None, 1),
    "chat_template_kwargs": (None, {}),
    "ebnf": (None,),
    "echo": (None, False),
    "frequency_penalty": (None, 0),
    "guided_choice": (None,),
    "guided_grammar": (None,),
    "guided_json": (None,),
    "guided_regex": (None,),
    "guided_whitespace_pattern": (None,),
    "include_reasoning": (None, True),
    "json_schema": (None,),
    "logit_bias": (None, {}),
    "logprobs": (None, False),
    "max_completion_tokens": (None,),
    "min_p": (None, 0),
    "min_tokens": (None, 0),
    "n": (None, 1),
    "parallel_tool_calls": (None, True),
    "presence_penalty": (None, 0),
    "reasoning_effort": (None,),
    "regex": (None,),
    "repetition_penalty": (None, 1),
    "response_format": (None,),
    "stop": (None, []),
    "stop_token_ids": (None, []),
    "structured_outputs": (None,),
    "suffix": (None, ""),
    "top_logprobs": (None, 0),
}
# Anthropic's fields that change no answer here.
HARMLESS = HARMLESS_FIELDS | {
    *("anthropic_version", "betas", "cache_control", "container", "context_management"),
    *("diagnostics", "inference_geo", "speed"),
}


class Metadata(msgspec.Struct, frozen=True):
    user_id: str | None = None
    """Requests of one id prefer one worker; clients such as Claude Code put the session into it."""


class ThinkingField(msgspec.Struct, frozen=True, kw_only=True):
    type: Literal["enabled", "adaptive", "disabled"]
    """`enabled` and `adaptive` turn thinking on, `disabled` turns it off."""
    budget_tokens: Limit | None = None
    """Most tokens of thinking, less than `max_tokens`."""
    display: str | None = None
    """`omitted` hides the thinking in the response."""

    def __post_init__(self) -> None:
        capped(self, ("budget_tokens",), MAX_INT - 1)  # less than any `max_tokens` of this size


class OutputFormat(msgspec.Struct, frozen=True, kw_only=True):
    type: Literal["json_schema"]
    """The kind of the format."""
    schema: dict[str, Any]
    """The JSON Schema that the answer matches: enforced exactly, or refused."""


class OutputConfig(msgspec.Struct, frozen=True, kw_only=True):
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    """How much the model thinks, as the chat template understands it."""
    format: OutputFormat | None = None
    """Constrains the answer to a JSON Schema."""


class PromptFields(msgspec.Struct, frozen=True, kw_only=True):
    """What the prompt depends on: the body of `/v1/messages/count_tokens`."""

    model: str
    """Name or alias of a model of `GET /v1/models`."""
    messages: Messages
    """The conversation, whose last message must not be the assistant's."""
    system: SystemField | None = None
    """The system prompt: a text, or blocks of text."""
    tools: Tools | None = None
    """The tools that the model may call; those that Anthropic's servers run are left out with a
    warning.
    """
    tool_choice: AnthropicChoiceField | None = None
    """Which tools the model may or must call; by default `auto`."""
    thinking: ThinkingField | None = None
    """Whether the model thinks first; by default the chat template decides."""
    output_config: OutputConfig | None = None
    """The effort, and the format of the answer."""
    output_format: OutputFormat | None = None
    """The older place of `output_config.format`."""


class MessagesRequest(PromptFields, frozen=True, kw_only=True):
    """Anthropic's fields, `seed` and `ignore_eos`."""

    max_tokens: Limit
    """Most tokens of the answer, cut to the room that the prompt leaves in the context."""
    stop_sequences: Annotated[list[StopString], Meta(max_length=MAX_STOP_STRINGS)] | None = None
    """Texts that end the answer; `stop_sequence` in the response names the one that matched."""
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    """Scales the logits before sampling; 0: always the most likely token."""
    top_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    """Samples from the most likely tokens whose probabilities add up to this."""
    top_k: Annotated[int, Meta(ge=0)] | None = None
    """Samples from this many most likely tokens; 0: from all."""
    seed: Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)] | None = None
    """The same seed and request give the same tokens; by default it is random. An extension."""
    ignore_eos: bool | None = None
    """Whether generation goes on after the end-of-sequence token. An extension."""
    stream: bool | None = None
    """Whether the response is sent as server-sent events while it is generated."""
    metadata: Metadata | None = None
    """About the request."""

    def __post_init__(self) -> None:
        capped(self, ("max_tokens", "top_k"))


MESSAGES_FIELDS = SupportedFields(
    MessagesRequest, NEUTRAL_VALUES, HARMLESS, leave_out=leave_out_blocks
)
COUNT_FIELDS = SupportedFields(PromptFields, NEUTRAL_VALUES, HARMLESS, leave_out=leave_out_blocks)
NO_MESSAGES = [AnthropicMessage("user", "")]


def request_of(body: PromptFields) -> GenerationRequest:
    """Returns the request without sampling options and limits. Raises InvalidRequest if fields
    contradict each other, and PayloadTooLarge.
    """
    turns, tools = turns_of(body.system, body.messages), tool_options(body.tools, body.tool_choice)
    output, reasoning, variables = _constraint(body), _reasoning(body), _variables(body.thinking)
    return GenerationRequest(
        model=body.model,
        prompt=chat_prompt(turns, tools, effort=reasoning.effort, variables=variables),
        sampling=SamplingFields(),
        tools=tools,
        reasoning=reasoning,
        output=output,
    )


def to_generation_requests(body: MessagesRequest, _: str) -> Sequence[GenerationRequest]:
    """Returns one request. Raises InvalidRequest if fields contradict each other, and
    PayloadTooLarge.
    """
    _check_budget(body)
    generation = msgspec.structs.replace(
        request_of(body),
        sampling=_sampling(body),
        default_max_tokens=body.max_tokens,
        asked_max_tokens=body.max_tokens,
        affinity_key=_affinity_key(body.metadata),
    )
    return [generation]


def without_prompts(body: MessagesRequest, _: int) -> MessagesRequest:
    """Returns the body without its prompt."""
    return msgspec.structs.replace(body, system=None, messages=NO_MESSAGES)


def _check_budget(body: MessagesRequest) -> None:
    thinking, param = body.thinking, "thinking.budget_tokens"
    if thinking is None or thinking.type != "enabled":
        return
    if thinking.budget_tokens is None:
        raise InvalidRequest(f"{param}: enabled thinking needs a budget", param=param)
    if thinking.budget_tokens >= body.max_tokens:
        raise InvalidRequest(
            f"{param}: {thinking.budget_tokens} must be less than max_tokens={body.max_tokens}",
            param=param,
        )


def _reasoning(body: PromptFields) -> ReasoningOptions:
    thinking = body.thinking
    effort: Effort | None = None if body.output_config is None else body.output_config.effort
    if thinking is not None and thinking.type == "disabled":
        effort = "none"
    is_shown = thinking is None or thinking.display != "omitted"
    return ReasoningOptions(effort=effort, is_shown=is_shown, max_tokens=_budget(thinking))


def _budget(thinking: ThinkingField | None) -> int | None:
    """Returns the tokens of thinking after which it ends, or None. A model that does not mark its
    thinking accepts the budget and ignores it, since clients such as Claude Code send it to every
    model.
    """
    return thinking.budget_tokens if thinking is not None and thinking.type == "enabled" else None


def _variables(thinking: ThinkingField | None) -> dict[str, Any]:
    """Returns the variables that switch thinking on in chat templates, which have two names for it.
    Without the field, or with "disabled", which becomes an effort, none is set.
    """
    if thinking is None or thinking.type == "disabled":  # the latter is an effort
        return {}
    return {"enable_thinking": True, "thinking": True}


def _constraint(body: PromptFields) -> OutputConstraint | None:
    given, param = body.output_format, "output_format"
    if body.output_config is not None and body.output_config.format is not None:
        if given is not None:
            raise InvalidRequest(
                f"{param} and output_config.format exclude each other", param=param
            )
        given, param = body.output_config.format, "output_config.format"
    if given is None:
        return None
    param = f"{param}.schema"
    check_values([given.schema], param)
    source = msgspec.json.encode(given.schema).decode()
    return OutputConstraint(kind="json_schema", source=source, is_strict=True, param=param)


def _sampling(body: MessagesRequest) -> SamplingFields:
    return SamplingFields(
        temperature=body.temperature,
        top_p=body.top_p,
        top_k=body.top_k,
        seed=body.seed,
        ignore_eos=body.ignore_eos,
        stop=body.stop_sequences,
    )


def _affinity_key(metadata: Metadata | None) -> str:
    return "" if metadata is None else (metadata.user_id or "")[:MAX_KEY_CHARS]
