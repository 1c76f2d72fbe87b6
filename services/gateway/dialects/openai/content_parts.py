"""The parts of a chat message. A text part may have the type that another API gives it."""

from __future__ import annotations

import msgspec

from services.gateway.images.input_image import Detail, InputImage, bad_image, image_of_url
from services.gateway.request.conversation import ShownPart, TextPart
from shared.errors import InvalidRequest

TEXT_KINDS = ("text", "input_text", "output_text", "refusal")
IMAGE_KINDS = ("image_url", "input_image")
DETAILS: dict[str, Detail] = {"auto": "auto", "low": "low", "high": "high", "original": "high"}


class ImageUrl(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    url: str
    """A data URL: `data:image/png;base64,…` of a JPEG, PNG, WebP or GIF; none is fetched."""
    detail: str | None = None
    """`low`: one tile, of few tokens; `auto` and `high`: as many as the model's processor makes."""


class ContentPart(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One Struct for all kinds, so that the error for an unknown kind says what is wrong."""

    type: str = "text"
    """The kind of the part: `text`, `image_url`, or `refusal` of an assistant; others are refused.
    """
    text: str | None = None
    """The text of a part of the type `text`."""
    refusal: str | None = None
    """The text of a part of the type `refusal`."""
    image_url: ImageUrl | str | None = None
    """The image of a part of the type `image_url`."""
    detail: str | None = None
    """As of `image_url`, in a part of the type `input_image`."""


def shown_part(place: str, part: ContentPart) -> ShownPart:
    """Returns the part's text or image. `place`: the place of the part in the request. Raises
    InvalidRequest for a part of another kind.
    """
    if part.type in IMAGE_KINDS:
        return image_part(place, part.image_url, part.detail)
    if part.type not in TEXT_KINDS:
        raise unreadable_part(place, part.type)
    text = part.refusal if part.text is None else part.text
    if text is None:
        raise InvalidRequest(f"{place}.text: a part needs a text", param=f"{place}.text")
    return TextPart(text)


def image_part(place: str, given: ImageUrl | str | None, detail: str | None) -> InputImage:
    """Returns the image of a part. Raises InvalidRequest."""
    if given is None:
        raise bad_image(place, "an image needs an `image_url`, with a data URL")
    url, own = (given, None) if isinstance(given, str) else (given.url, given.detail)
    known = DETAILS.get(own or detail or "auto")
    if known is None:
        raise bad_image(place, f"detail must be one of {', '.join(DETAILS)}")
    return image_of_url(place, url, known)


def unreadable_part(place: str, kind: str) -> InvalidRequest:
    """Returns the error for a part that is neither text nor an image."""
    if kind == "image":
        return bad_image(place, "an image is a part of the type 'image_url'")
    param = f"{place}.type"
    reason = f"this model reads no {kind[:64]!r}, only text and images"
    return InvalidRequest(f"{param}: {reason}", param=param)
