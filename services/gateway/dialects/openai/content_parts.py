"""The parts of a chat message. A text part may have the type that another API gives it."""

from __future__ import annotations

import msgspec

from services.gateway.request.conversation import TextPart
from services.gateway.request.supported_fields import NO_IMAGES
from shared.errors import InvalidRequest

TEXT_KINDS = ("text", "input_text", "output_text", "refusal")
IMAGE_KINDS = ("image", "image_url", "input_image")


class ContentPart(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One Struct for all kinds, so that the error for another kind than text says what is wrong."""

    type: str = "text"
    """The kind of the part: `text`, or `refusal` of an assistant; others are refused."""
    text: str | None = None
    """The text of a part of the type `text`."""
    refusal: str | None = None
    """The text of a part of the type `refusal`."""


def text_part(place: str, part: ContentPart) -> TextPart:
    """Returns the part's text. `place`: the place of the part in the request. Raises InvalidRequest
    for a part that is not text.
    """
    if part.type not in TEXT_KINDS:
        raise unreadable_part(place, part.type)
    text = part.refusal if part.text is None else part.text
    if text is None:
        raise InvalidRequest(f"{place}.text: a part needs a text", param=f"{place}.text")
    return TextPart(text)


def unreadable_part(place: str, kind: str) -> InvalidRequest:
    """Returns the error for a part of another kind than text."""
    if kind in IMAGE_KINDS:
        return InvalidRequest(f"{place}: {NO_IMAGES}", param=place)
    param = f"{place}.type"
    return InvalidRequest(f"{param}: this model reads no {kind[:64]!r}, only text", param=param)
