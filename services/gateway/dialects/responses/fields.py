"""The types of the body of OpenAI's Responses API.

One Struct holds the fields of every kind of input item: clients send kinds that are newer than this
file, and those with text are read as text.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

import msgspec
from msgspec import Meta

from services.gateway.dialects.openai.content_parts import ImageUrl
from services.gateway.request.conversation import Effort
from services.gateway.request.sampling import MAX_INT, MAX_LOGPROBS, Limit, SamplingFields
from services.gateway.request.supported_fields import (
    FOREIGN_FIELDS,
    HARMLESS_FIELDS,
    SupportedFields,
)
from services.gateway.structured.tools.call_fields import CallId, Name
from services.gateway.structured.tools.tool import MAX_TOOLS
from services.gateway.structured.tools.tool_fields import ToolBody, ToolFields

MAX_ID_CHARS = 256
MAX_CACHE_KEY_CHARS = 256
MAX_INCLUDES = 32
PREVIOUS = "previous_response_id"  # the place of items that are not in the body
TOOL_ITEMS = ("additional_tools", "tool_search_output")
READ_ITEMS = frozenset(  # kinds whose fields have a meaning here
    {
        *("message", "function_call", "function_call_output", "custom_tool_call"),
        *("custom_tool_call_output", "reasoning", "item_reference", *TOOL_ITEMS),
    }
)

# Fields that would change the response and that are not supported, with the values that change
# nothing. Any other unknown field is ignored, since clients send many.
NEUTRAL_VALUES: dict[str, tuple[Any, ...]] = {
    **{name: values for name, values in FOREIGN_FIELDS.items() if name != "reasoning"},
    "background": (None, False),
    "best_of": (None, 1),
    "conversation": (None,),
    "echo": (None, False),
    "include_reasoning": (None, True),
    "logprobs": (None, False),
    "max_completion_tokens": (None,),  # here they are `max_output_tokens`
    "max_tokens": (None,),
    "n": (None, 1),
    "options": (None, {}),
    "prompt": (None,),
    "reasoning_effort": (None,),  # here it is `reasoning.effort`
}
# OpenAI's and Codex's fields that change no answer here.
HARMLESS = HARMLESS_FIELDS | {"client_metadata", "max_tool_calls", "moderation", "stream_options"}

ItemId = Annotated[str, Meta(max_length=MAX_ID_CHARS)]
MetadataKey = Annotated[str, Meta(max_length=64)]
MetadataValue = Annotated[str, Meta(max_length=512)]


class InputPart(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    type: str = ""
    """The kind of the part: `input_text`, `input_image`, `output_text`, `refusal`,
    `reasoning_text` and others with text.
    """
    text: str | None = None
    """The text of the part."""
    refusal: str | None = None
    """The text of a part of the type `refusal`."""
    image_url: ImageUrl | str | None = None
    """The image of a part of the type `input_image`: a data URL, `data:image/png;base64,…`."""
    detail: str | None = None
    """Of an image: `low`, one tile of few tokens; `auto` or `high`."""
    file_id: str | None = None
    """Refused: no files are kept."""


Content = str | list[InputPart]


class ResponseTool(ToolBody, frozen=True, kw_only=True):
    type: str = "function"
    """`function`, `custom` or `namespace`; hosted tools such as `web_search` are left out with a
    warning.
    """
    function: ToolBody | None = None
    """The function in the nested form of chat completions."""
    custom: ToolBody | None = None
    """The custom tool in the nested form of chat completions."""
    tools: ToolFields | None = None
    """The tools of a namespace."""


class InputItem(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """An item of a conversation. Kinds of other servers are read as their text, or left out."""

    type: str = "message"
    """The kind of the item, such as `message`, `function_call`, `function_call_output` or
    `reasoning`.
    """
    id: ItemId | None = None
    """The id of the item; of an `item_reference`, that of a stored one."""
    role: str | None = None
    """Who speaks, of a message."""
    content: Content | None = None
    """A text, or parts: texts and images."""
    text: str | None = None
    """The text of kinds that have no `content`."""
    call_id: CallId | None = None
    """The id of a call, which its output repeats."""
    name: Name | None = None
    """The name of the called tool."""
    namespace: Name | None = None
    """The namespace of the called tool."""
    arguments: str | dict[str, Any] | None = None
    """The arguments of a function call."""
    input: str | None = None
    """The input of a custom call."""
    output: Content | dict[str, Any] | None = None
    """The result of a call: a text, or parts: texts and images."""
    summary: list[InputPart] | None = None
    """The summary of reasoning."""
    encrypted_content: str | None = None
    """Reasoning that this server sealed; that of other servers is left out."""
    tools: Annotated[list[ResponseTool], Meta(max_length=MAX_TOOLS)] | None = None
    """The tools that an item such as `additional_tools` brings."""


PlacedTool = tuple[str, ResponseTool]  # and its place in the request


class NamedChoice(msgspec.Struct, frozen=True, kw_only=True):
    type: str
    """The kind of the tool, or `allowed_tools`."""
    name: str | None = None
    """The name of the tool."""
    namespace: str | None = None
    """The namespace of the tool."""


class ToolChoice(NamedChoice, frozen=True, kw_only=True):
    mode: Literal["auto", "required"] = "auto"
    """Of `allowed_tools`: whether one of them may or must be called."""
    tools: Annotated[list[NamedChoice], Meta(min_length=1, max_length=MAX_TOOLS)] | None = None
    """Of `allowed_tools`: the tools."""


class TextFormat(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    type: str
    """`text`, `json_object` or `json_schema`."""
    name: str | None = None
    """A name of the schema, which changes nothing."""
    description: str | None = None
    """A description of the schema, which changes nothing."""
    schema: Any = None
    """The JSON Schema of the answer."""
    strict: bool | None = None
    """Enforces the schema exactly or refuses it; else a warning names what is not enforced."""


class TextOptions(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    format: TextFormat | None = None
    """Constrains the answer to JSON."""
    verbosity: Literal["low", "medium", "high"] | None = None
    """Accepted for compatibility; it has no effect."""


class ResponsesReasoning(msgspec.Struct, frozen=True, kw_only=True):
    effort: Effort | None = None
    """How much the model thinks, as its chat template understands it; `none` turns thinking off."""
    summary: Literal["auto", "concise", "detailed", "none"] | None = None
    """Accepted for compatibility: reasoning is returned as it is."""


class ResponsesRequest(SamplingFields, frozen=True, kw_only=True):
    LIMITS: ClassVar[tuple[str, ...]] = (*SamplingFields.LIMITS, "max_output_tokens")
    model: str | None = None
    """Name or alias of a model of `GET /v1/models`; by default the gateway's first model."""
    input: str | list[InputItem] | None = None
    """A text, or items: messages, calls, their outputs, reasoning and references."""
    instructions: str | None = None
    """The system prompt, which a later response does not inherit."""
    tools: Annotated[list[ResponseTool], Meta(max_length=MAX_TOOLS)] | None = None
    """The tools that the model may call: functions, custom tools, namespaces."""
    tool_choice: str | ToolChoice | None = None
    """Which tools the model may or must call: `auto`, `none`, `required`, one tool, or
    `allowed_tools`.
    """
    parallel_tool_calls: bool | None = None
    """Whether one answer may call several tools; by default true."""
    text: TextOptions | None = None
    """The format of the answer."""
    reasoning: ResponsesReasoning | None = None
    """How much the model thinks."""
    max_output_tokens: Limit | None = None
    """Most tokens of the output with its thinking, cut to the room in the context."""
    top_logprobs: Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)] | None = None
    """How many of the most likely tokens are reported for each place."""
    include: Annotated[list[str], Meta(max_length=MAX_INCLUDES)] | None = None
    """What the response has besides: `message.output_text.logprobs`, `reasoning.encrypted_content`.
    """
    metadata: Annotated[dict[MetadataKey, MetadataValue], Meta(max_length=16)] | None = None
    """Up to 16 pairs of texts, which the response repeats."""
    store: bool | None = None
    """Whether the response is stored, for 24 hours by default; by default true, where the tenant
    allows it.
    """
    previous_response_id: ItemId | None = None
    """The stored response that this one continues."""
    stream: bool | None = None
    """Whether the response is sent as server-sent events while it is generated."""
    truncation: Literal["disabled", "auto"] | None = None
    """`auto` has no effect: a prompt beyond the context is refused."""
    prompt_cache_key: Annotated[str, Meta(max_length=MAX_CACHE_KEY_CHARS)] | None = None
    """Requests with the same key prefer the worker that served the last of them, whose cache has
    their prefix.
    """
    safety_identifier: str | None = None
    """Accepted for compatibility; it has no effect."""
    user: str | None = None
    """Accepted for compatibility; it has no effect."""
    cache_salt: str | None = None
    """Separates the cached prefixes of this request from the tenant's others."""
    priority: Annotated[int, Meta(ge=-MAX_INT, le=MAX_INT)] | None = None
    """Higher goes first; a request can lower its tenant's priority, not raise it."""
    chat_template_kwargs: dict[str, Any] | None = None
    """Further variables of the model's chat template, such as `enable_thinking`."""

    @property
    def items(self) -> list[InputItem]:
        """Returns the items; a text is one message of the user."""
        if isinstance(self.input, str):
            return [InputItem(role="user", content=self.input)]
        return self.input or []

    @property
    def has_logprobs(self) -> bool:
        return bool(self.top_logprobs) or "message.output_text.logprobs" in (self.include or ())

    @property
    def has_sealed_reasoning(self) -> bool:
        return "reasoning.encrypted_content" in (self.include or ())


class CompleteRequest(ResponsesRequest, frozen=True, kw_only=True):
    """The body with what the gateway adds. `hearth_history`: the items of the responses before it.
    Of a large body, whose `input` is empty: `hearth_input`, the items to store, and `hearth_tools`,
    what items brought.
    """

    hearth_history: list[InputItem] | msgspec.UnsetType = msgspec.UNSET
    hearth_input: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    hearth_tools: list[PlacedTool] | msgspec.UnsetType = msgspec.UNSET

    @property
    def history(self) -> list[InputItem]:
        return [] if self.hearth_history is msgspec.UNSET else self.hearth_history

    @property
    def placed_tools(self) -> list[PlacedTool]:
        """Returns the tools with their places in the request."""
        own = enumerate(self.tools or ())
        return [*((f"tools[{index}]", each) for index, each in own), *self.item_tools]

    @property
    def item_tools(self) -> list[PlacedTool]:
        """Returns the tools that items bring."""
        if self.hearth_tools is not msgspec.UNSET:
            return self.hearth_tools
        places = [(PREVIOUS, each) for each in self.history]
        places += [(f"input[{index}]", each) for index, each in enumerate(self.items)]
        return [
            (f"{place}.tools[{index}]", tool)
            for place, item in places
            if item.type in TOOL_ITEMS
            for index, tool in enumerate(item.tools or ())
        ]


def leave_out_items(body: Any) -> bool:
    """Leaves out of a body the content of items of other servers' kinds whose fields have other
    types than here; their ids stay, for the results that name them. Returns whether there was one.
    """
    items = body.get("input") if isinstance(body, dict) else None
    if not isinstance(items, list):
        return False
    foreign = [index for index, each in enumerate(items) if _is_foreign(each)]
    for index in foreign:
        ids = {name: items[index].get(name) for name in ("type", "id", "call_id")}
        items[index] = {name: each for name, each in ids.items() if _is_id(each)}
    return bool(foreign)


def _is_foreign(item: Any) -> bool:
    kind = item.get("type", "message") if isinstance(item, dict) else None
    if not isinstance(kind, str) or kind in READ_ITEMS:
        return False
    try:
        msgspec.convert(item, InputItem)
    except msgspec.ValidationError:
        return True
    return False


def _is_id(value: Any) -> bool:
    return isinstance(value, str) and 0 < len(value) <= MAX_ID_CHARS


RESPONSES_FIELDS = SupportedFields(
    CompleteRequest, NEUTRAL_VALUES, HARMLESS, leave_out=leave_out_items
)
