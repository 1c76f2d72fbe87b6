"""The calls that a client repeats in its messages, in the forms of all dialects."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from services.gateway.structured.tools.value_bounds import check_values
from shared.errors import InvalidRequest, PayloadTooLarge
from shared.transport.wire_errors import UNREADABLE

MAX_CALLS = 1024  # calls of one message
MAX_ID_CHARS = 256
MAX_NAME_CHARS = 256
INVALID = "invalid"  # the key for arguments that are no JSON object

CallId = Annotated[str, Meta(min_length=1, max_length=MAX_ID_CHARS)]
Name = Annotated[str, Meta(min_length=1, max_length=MAX_NAME_CHARS)]


class CalledFunction(msgspec.Struct, frozen=True, kw_only=True):
    name: Name
    """The name of the function."""
    arguments: str | dict[str, Any] | None = None
    """A JSON object, as text or as it is."""


class CalledCustom(msgspec.Struct, frozen=True, kw_only=True):
    name: Name
    """The name of the custom tool."""
    input: str = ""
    """The text that the tool was called with."""


class CallField(msgspec.Struct, frozen=True, kw_only=True):
    """A call of a tool."""

    id: CallId | None = None
    """The id of the call, which its result repeats."""
    type: Literal["function", "custom"] = "function"
    """The kind of the tool."""
    function: CalledFunction | None = None
    """The called function."""
    custom: CalledCustom | None = None
    """The called custom tool."""
    name: Name | None = None
    """The name of the function, in the flat form."""
    arguments: str | dict[str, Any] | None = None
    """The arguments of the function, in the flat form."""


CallFields = Annotated[list[CallField], Meta(max_length=MAX_CALLS)]


def name_and_arguments(field: CallField, param: str) -> tuple[str, str]:
    """Returns a call's name and its arguments as a JSON object. `param` is the field's place.
    Raises InvalidRequest and PayloadTooLarge.
    """
    if field.type == "custom" and field.custom is not None:
        arguments = msgspec.json.encode({"input": field.custom.input}).decode()
        return field.custom.name, arguments
    if field.function is not None:
        function = field.function
        return function.name, _json_object(function.arguments, f"{param}.function.arguments")
    if field.name is None:
        place = f"{param}.{field.type}"
        raise InvalidRequest(f"{place}: a call needs a {field.type} with a name", param=place)
    return field.name, _json_object(field.arguments, f"{param}.arguments")


def _json_object(arguments: str | dict[str, Any] | None, param: str) -> str:
    """Returns the arguments as the text of a JSON object. Text without an object within the bounds
    becomes the value of INVALID: a model may have written it, and must read it again. Some clients
    send an empty text for a call without arguments.
    """
    if isinstance(arguments, dict):
        check_values([arguments], param)
        return msgspec.json.encode(arguments).decode()
    text = arguments or ""
    if not text.strip():
        return "{}"
    return text if _is_object(text, param) else msgspec.json.encode({INVALID: text}).decode()


def _is_object(text: str, param: str) -> bool:
    try:
        values = msgspec.json.decode(text)
        check_values([values], param)
    except (*UNREADABLE, PayloadTooLarge):
        return False
    return isinstance(values, dict)
