"""The items of a request as the turns of a conversation.

Consecutive items of the assistant are one turn, as the model wrote them:

reasoning* ──▶ message? ──▶ call*        then a message or reasoning begins the next turn
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from services.gateway.dialects.openai.content_parts import (
    IMAGE_KINDS,
    image_part,
    unreadable_part,
)
from services.gateway.dialects.responses.fields import PREVIOUS, Content, InputItem, InputPart
from services.gateway.dialects.responses.tool_names import flat_name
from services.gateway.images.input_image import bad_image
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
from services.gateway.structured.tools.call_fields import CallField, name_and_arguments
from shared.errors import InvalidRequest

MAX_ITEMS = 4096  # items, those of the responses before included
MAX_PARTS = 1024  # parts of one item
ROLES: dict[str, Role] = {
    "user": "user",
    "system": "system",
    "developer": "system",
    "assistant": "assistant",
}


def turns_of(
    instructions: str | None, history: Sequence[InputItem], items: Sequence[InputItem]
) -> tuple[Turn, ...]:
    """Converts the items to turns. Raises InvalidRequest and PayloadTooLarge."""
    check_count("input", len(history) + len(items), MAX_ITEMS)
    turns = _Turns()
    if instructions:
        turns.add_message("system", (TextPart(instructions),))
    for item in history:
        turns.add(PREVIOUS, item)
    for index, item in enumerate(items):
        turns.add(f"input[{index}]", item)
    return turns.finished()


class _Turns:
    def __init__(self) -> None:
        self._turns: list[Turn] = []
        self._answer: list[Part] = []  # the parts of the assistant's open turn
        self._call_ids: set[str] = set()
        self._left_out: set[str] = set()  # the ids of calls that the model is not given

    def finished(self) -> tuple[Turn, ...]:
        self._end_answer()
        return tuple(self._turns)

    def add_message(self, role: Role, parts: tuple[ShownPart, ...]) -> None:
        if role != "assistant":
            self._end_answer()
            self._turns.append(Turn(role, parts))
            return
        if any(not isinstance(part, Reasoning) for part in self._answer):
            self._end_answer()
        self._answer += parts

    def add(self, place: str, item: InputItem) -> None:
        match item.type:
            case "message":
                self.add_message(_role(place, item), _message_parts(place, item))
            case "function_call" | "custom_tool_call":
                self._answer.append(self._call(place, item))
            case "function_call_output" | "custom_tool_call_output":
                self._add_result(place, item)
            case "reasoning":
                self._add_reasoning(place, item)
            case "item_reference":
                param = f"{place}.id"
                raise InvalidRequest(f"{param}: a reference needs the id of an item", param=param)
            case _:
                self._add_other(place, item)

    def _add_reasoning(self, place: str, item: InputItem) -> None:
        """Adds reasoning that has a text; that of another server may be encrypted."""
        shown = _parts(f"{place}.content", item.content or "")
        text = "".join(each.text for each in shown if isinstance(each, TextPart))
        if not text:
            return
        if any(not isinstance(part, Reasoning) for part in self._answer):
            self._end_answer()
        self._answer.append(Reasoning(text))

    def _add_other(self, place: str, item: InputItem) -> None:
        """Adds the text of an item of an unknown kind. An item without one says nothing to the
        model, such as the search of another server, and is left out with its result.
        """
        texts = _known_texts(item)
        if not texts:
            self._left_out.update(filter(None, (item.call_id, item.id)))
            return
        role = "assistant" if item.role is None and item.type.startswith("agent") else item.role
        known = _role(place, msgspec.structs.replace(item, role=role or "user"))
        self.add_message(known, texts)

    def _call(self, place: str, item: InputItem) -> ToolCall:
        """Clients may use an id again in a later round."""
        call_id = _call_id(place, item)
        if item.name is None:
            raise InvalidRequest(f"{place}.name: a call needs a name", param=f"{place}.name")
        self._call_ids.add(call_id)
        if item.type == "custom_tool_call":
            arguments = msgspec.json.encode({"input": item.input or ""}).decode()
        else:
            field = CallField(name=item.name, arguments=item.arguments)
            _, arguments = name_and_arguments(field, place)
        return ToolCall(call_id, flat_name(item.namespace, item.name), arguments)

    def _add_result(self, place: str, item: InputItem) -> None:
        call_id = _call_id(place, item)
        if call_id not in self._call_ids:
            if call_id in self._left_out:
                return
            param = f"{place}.call_id"
            reason = f"no call before this item has the id {call_id[:64]!r}"
            raise InvalidRequest(f"{param}: {reason}", param=param)
        param = f"{place}.output"
        if isinstance(item.output, dict):
            raise InvalidRequest(f"{param}: a text or a list of parts is needed", param=param)
        parts = _parts(param, item.output or "")
        self._end_answer()
        self._turns.append(Turn("tool", (ToolResult(call_id, parts),)))

    def _end_answer(self) -> None:
        if self._answer:
            self._turns.append(Turn("assistant", tuple(self._answer)))
            self._answer = []


def _role(place: str, item: InputItem) -> Role:
    role = ROLES.get(item.role or "")
    if role is None:
        given = "a message needs one" if item.role is None else f"{item.role[:64]!r} is unknown"
        param = f"{place}.role"
        raise InvalidRequest(
            f"{param}: {given}: use user, system, developer or assistant", param=param
        )
    return role


def _call_id(place: str, item: InputItem) -> str:
    if item.call_id is None:
        param = f"{place}.call_id"
        raise InvalidRequest(f"{param}: a call and its output need the call's id", param=param)
    return item.call_id


def _message_parts(place: str, item: InputItem) -> tuple[ShownPart, ...]:
    if item.content is None and item.role != "assistant":
        param = f"{place}.content"
        raise InvalidRequest(f"{param}: a message needs a content", param=param)
    return _parts(f"{place}.content", item.content or "")


def _known_texts(item: InputItem) -> tuple[TextPart, ...]:
    """Returns the texts of an item of an unknown kind, without its other parts."""
    content = item.text if item.content is None else item.content
    if content is None or isinstance(content, str):
        return (TextPart(content),) if content else ()
    texts = (part.refusal if part.text is None else part.text for part in content[:MAX_PARTS])
    return tuple(TextPart(each) for each in texts if each is not None)


def _parts(place: str, content: Content) -> tuple[ShownPart, ...]:
    if isinstance(content, str):
        return (TextPart(content),) if content else ()
    check_count(place, len(content), MAX_PARTS)
    return tuple(_shown(f"{place}[{index}]", part) for index, part in enumerate(content))


def _shown(place: str, part: InputPart) -> ShownPart:
    if part.type in IMAGE_KINDS:
        if part.file_id is not None:
            raise bad_image(place, "file_id: no files are kept: send an `image_url`")
        return image_part(place, part.image_url, part.detail)
    text = part.refusal if part.text is None else part.text
    if text is None:
        raise unreadable_part(place, part.type)
    return TextPart(text)
