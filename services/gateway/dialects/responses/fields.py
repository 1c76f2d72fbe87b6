"""The types of the body of OpenAI's Responses API.

One Struct holds the fields of every kind of input item: clients send kinds that are newer than this
file, and those with text are read as text.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from services.gateway.request.conversation import Effort
from services.gateway.request.sampling import MAX_INT, MAX_LOGPROBS, SamplingFields
from services.gateway.request.supported_fields import FOREIGN_FIELDS, SupportedFields
from services.gateway.structured.tools.call_fields import CallId, Name
from services.gateway.structured.tools.tool import MAX_TOOLS
from services.gateway.structured.tools.tool_fields import ToolBody, ToolFields

MAX_ID_CHARS = 256
MAX_CACHE_KEY_CHARS = 256
MAX_INCLUDES = 32
PREVIOUS = "previous_response_id"  # the place of items that are not in the body
TOOL_ITEMS = ("additional_tools", "tool_search_output")

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

ItemId = Annotated[str, Meta(max_length=MAX_ID_CHARS)]
MetadataKey = Annotated[str, Meta(max_length=64)]
MetadataValue = Annotated[str, Meta(max_length=512)]


class InputPart(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    type: str = ""
    text: str | None = None
    refusal: str | None = None


Content = str | list[InputPart]


class ResponseTool(ToolBody, frozen=True, kw_only=True):
    """`function`, `custom`: the nested forms of chat completions. `tools`: of a namespace."""

    type: str = "function"
    function: ToolBody | None = None
    custom: ToolBody | None = None
    tools: ToolFields | None = None


class InputItem(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """`call_id`, `name`, `namespace`: of calls. `arguments`: of a function call, `input`: of a
    custom one. `output`: of either. `text`: of kinds that have no `content`. `tools`: of kinds that
    bring tools. An object as `output`: of kinds that are left out.
    """

    type: str = "message"
    id: ItemId | None = None
    role: str | None = None
    content: Content | None = None
    text: str | None = None
    call_id: CallId | None = None
    name: Name | None = None
    namespace: Name | None = None
    arguments: str | dict[str, Any] | None = None
    input: str | None = None
    output: Content | dict[str, Any] | None = None
    summary: list[InputPart] | None = None
    encrypted_content: str | None = None
    tools: Annotated[list[ResponseTool], Meta(max_length=MAX_TOOLS)] | None = None


PlacedTool = tuple[str, ResponseTool]  # and its place in the request


class NamedChoice(msgspec.Struct, frozen=True, kw_only=True):
    type: str
    name: str | None = None
    namespace: str | None = None


class ToolChoice(NamedChoice, frozen=True, kw_only=True):
    """`mode`, `tools`: of `allowed_tools`."""

    mode: Literal["auto", "required"] = "auto"
    tools: Annotated[list[NamedChoice], Meta(min_length=1, max_length=MAX_TOOLS)] | None = None


class TextFormat(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    type: str
    name: str | None = None
    description: str | None = None
    schema: Any = None
    strict: bool | None = None


class TextOptions(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """`verbosity` has no effect."""

    format: TextFormat | None = None
    verbosity: Literal["low", "medium", "high"] | None = None


class ResponsesReasoning(msgspec.Struct, frozen=True, kw_only=True):
    """`summary` has no effect: reasoning is returned as it is."""

    effort: Effort | None = None
    summary: Literal["auto", "concise", "detailed", "none"] | None = None


class ResponsesRequest(SamplingFields, frozen=True, kw_only=True):
    model: str | None = None  # None: the gateway's only model
    input: str | list[InputItem] | None = None
    instructions: str | None = None
    tools: Annotated[list[ResponseTool], Meta(max_length=MAX_TOOLS)] | None = None
    tool_choice: str | ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    text: TextOptions | None = None
    reasoning: ResponsesReasoning | None = None
    max_output_tokens: Annotated[int, Meta(ge=1, le=MAX_INT)] | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)] | None = None
    include: Annotated[list[str], Meta(max_length=MAX_INCLUDES)] | None = None
    metadata: Annotated[dict[MetadataKey, MetadataValue], Meta(max_length=16)] | None = None
    store: bool | None = None
    previous_response_id: ItemId | None = None
    stream: bool | None = None
    truncation: Literal["disabled", "auto"] | None = None
    prompt_cache_key: Annotated[str, Meta(max_length=MAX_CACHE_KEY_CHARS)] | None = None
    safety_identifier: str | None = None
    user: str | None = None
    cache_salt: str | None = None
    priority: Annotated[int, Meta(ge=-MAX_INT, le=MAX_INT)] | None = None  # higher goes first
    chat_template_kwargs: dict[str, Any] | None = None

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


RESPONSES_FIELDS = SupportedFields(CompleteRequest, NEUTRAL_VALUES)
