"""The system prompt and the messages of a request, as turns.

Messages of one role that follow each other are one turn, as at Anthropic. A message of the user
becomes one turn for its texts, and one for each row of results between them.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

import msgspec

from services.gateway.dialects.anthropic.blocks import (
    AnthropicMessage,
    Block,
    CompactionBlock,
    DocumentBlock,
    ImageBlock,
    ImageSource,
    RedactedThinkingBlock,
    ResultBlock,
    ResultContent,
    SearchResultBlock,
    SystemField,
    TextBlock,
    ThinkingBlock,
    ToolReferenceBlock,
    ToolResultBlock,
    ToolUseBlock,
)
from services.gateway.images.input_image import (
    InputImage,
    bad_image,
    image_of_base64,
    image_of_url,
)
from services.gateway.request.conversation import (
    Part,
    Reasoning,
    Role,
    ShownPart,
    TextPart,
    ToolCall,
    ToolResult,
    Turn,
)
from services.gateway.request.supported_fields import check_count
from services.gateway.structured.tools.value_bounds import check_values
from shared.errors import InvalidRequest

MAX_MESSAGES = 4096
MAX_BLOCKS = 1024  # blocks of one message
# Claude Code's first line of the system prompt. It has a hash of the request: with it, no two
# requests would share a cached block.
BILLING_HEADER = "x-anthropic-billing-header:"
ERROR = "Error: "
OWN_ID, EXTERNAL_ID = "call_", "toolu_"  # the start of a call's id, here and in this dialect


def turns_of(system: SystemField | None, messages: Sequence[AnthropicMessage]) -> tuple[Turn, ...]:
    """Converts the system prompt and the messages to turns. Raises InvalidRequest and
    PayloadTooLarge.
    """
    check_count("messages", len(messages), MAX_MESSAGES)
    if messages[-1].role == "assistant":
        param = f"messages[{len(messages) - 1}].role"
        raise InvalidRequest(
            f"{param}: the last message must be of the user: an assistant's text is not continued",
            param=param,
        )
    texts = _system_texts(system)
    first = [Turn("system", texts)] if texts else []
    conversion = _Conversion()
    return tuple(_joined(itertools.chain(first, conversion.turns(messages))))


def external_id(call_id: str) -> str:
    """Returns the id of a call as clients of this dialect see it."""
    return _with_start(call_id, OWN_ID, EXTERNAL_ID)


def _with_start(text: str, start: str, other: str) -> str:
    return other + text.removeprefix(start) if text.startswith(start) else text


class _Conversion:
    """Converts the messages of one conversation. `_ids`: the ids of the calls so far, to find
    results without a call.
    """

    def __init__(self) -> None:
        self._ids: set[str] = set()

    def turns(self, messages: Sequence[AnthropicMessage]) -> Iterator[Turn]:
        for index, message in enumerate(messages):
            place = f"messages[{index}].content"
            content = message.content
            blocks = [TextBlock(content)] if isinstance(content, str) else content
            check_count(place, len(blocks), MAX_BLOCKS)
            for position, block in enumerate(blocks):
                part = self._part(message.role, block, f"{place}[{position}]")
                if part is not None:
                    is_result = isinstance(part, ToolResult)
                    yield Turn("tool" if is_result else message.role, (part,))
            if not blocks:
                yield Turn(message.role, (TextPart(""),))

    def _part(self, role: Role, block: Block, place: str) -> Part | None:
        match block:
            case CompactionBlock():
                return TextPart(block.content) if block.content else None
            case ToolUseBlock() | ToolResultBlock() | ThinkingBlock() | RedactedThinkingBlock():
                return self._of_role(role, block, place)
        return _shown(block, place)

    def _of_role(self, role: Role, block: Block, place: str) -> Part | None:
        match block:
            case ToolUseBlock() if role == "assistant":
                return self._call(block, place)
            case ToolResultBlock() if role == "user":
                return self._result(block, place)
            case ThinkingBlock() if role == "assistant":
                return Reasoning(block.thinking) if block.thinking else None
            case RedactedThinkingBlock() if role == "assistant":
                return None
        kind = type(block).__struct_config__.tag
        raise InvalidRequest(
            f"{place}.type: a message of role {role!r} has no {kind}", param=f"{place}.type"
        )

    def _call(self, block: ToolUseBlock, place: str) -> ToolCall:
        if block.id in self._ids:
            param = f"{place}.id"
            raise InvalidRequest(f"{param}: two calls have the id {block.id!r}", param=param)
        self._ids.add(block.id)
        check_values([block.input], f"{place}.input")
        arguments = msgspec.json.encode(block.input).decode()
        return ToolCall(_own_id(block.id), block.name, arguments)

    def _result(self, block: ToolResultBlock, place: str) -> ToolResult:
        if block.tool_use_id not in self._ids:
            param = f"{place}.tool_use_id"
            raise InvalidRequest(
                f"{param}: no tool_use before this result has the id {block.tool_use_id!r}",
                param=param,
            )
        parts = _result_parts(block.content, f"{place}.content")
        return ToolResult(_own_id(block.tool_use_id), _as_error(parts) if block.is_error else parts)


def _own_id(call_id: str) -> str:
    return _with_start(call_id, EXTERNAL_ID, OWN_ID)


def _system_texts(system: SystemField | None) -> tuple[TextPart, ...]:
    """Returns the texts without the billing header and without empty ones."""
    texts = [system] if isinstance(system, str) else [each.text for each in system or ()]
    check_count("system", len(texts), MAX_BLOCKS)
    if texts and texts[0].startswith(BILLING_HEADER):
        texts[0] = texts[0].partition("\n")[2].lstrip("\n")
    return tuple(TextPart(each) for each in texts if each)


def _result_parts(content: ResultContent | None, place: str) -> tuple[ShownPart, ...]:
    if content is None or isinstance(content, str):
        return (TextPart(content or ""),)
    check_count(place, len(content), MAX_BLOCKS)
    parts = (_shown(block, f"{place}[{index}]") for index, block in enumerate(content))
    return tuple(each for each in parts if each is not None)


def _as_error(parts: tuple[ShownPart, ...]) -> tuple[ShownPart, ...]:
    match parts:
        case (TextPart(text=text), *others):
            return (TextPart(f"{ERROR}{text}"), *others)
    return (TextPart(ERROR), *parts)


def _shown(block: ResultBlock, place: str) -> ShownPart | None:
    """Returns None for a block that says nothing to this model. Raises InvalidRequest."""
    if isinstance(block, ImageBlock):
        return _image(block.source, place)
    text = _text_of(block, place)
    return None if text is None else TextPart(text)


def _image(source: ImageSource, place: str) -> InputImage:
    if source.type == "url" and source.url is not None:
        return image_of_url(place, source.url)
    if source.type != "base64":
        kind = source.type[:64]
        raise bad_image(place, f"a source of type {kind!r} is not supported: send base64")
    if source.data is None:
        raise bad_image(place, "a source of type 'base64' needs data")
    return image_of_base64(place, source.data, source.media_type or "")


def _text_of(block: ResultBlock, place: str) -> str | None:
    """Returns None for a block without text for this model. Raises InvalidRequest."""
    match block:
        case TextBlock():
            return block.text
        case DocumentBlock():
            return _document(block, place)
        case SearchResultBlock():
            texts = (each.text for each in block.content)
            return "\n".join((block.title, block.source, *texts))
        case ToolReferenceBlock():
            return block.tool_name
    return None


def _document(block: DocumentBlock, place: str) -> str:
    source = block.source
    if source.type == "text" and source.data is not None:
        text = source.data
    elif source.type == "content" and source.content is not None:
        content = source.content
        text = content if isinstance(content, str) else "\n".join(each.text for each in content)
    else:
        param = f"{place}.source"
        raise InvalidRequest(f"{param}: only documents of text are supported", param=param)
    return "\n".join(filter(None, (block.title, block.context, text)))


def _joined(turns: Iterator[Turn]) -> Iterator[Turn]:
    last: Turn | None = None
    for turn in turns:
        if last is not None and last.role == turn.role:
            last = Turn(last.role, (*last.parts, *turn.parts))
            continue
        if last is not None:
            yield last
        last = turn
    if last is not None:
        yield last
