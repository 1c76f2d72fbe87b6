"""`prompt` of completions and `input` of embeddings: one or many prompts, text or tokens."""

from __future__ import annotations

from typing import Annotated, cast

from msgspec import Meta

from services.gateway.request.prompt import TextPrompt, TokenPrompt
from services.gateway.request.supported_fields import check_count
from shared.errors import InvalidRequest

MAX_PROMPTS = 256

TokenId = Annotated[int, Meta(ge=0, le=2**32 - 1)]
Prompts = str | list[str | TokenId | list[TokenId]]


def to_prompts(
    param: str, given: Prompts, *, add_special_tokens: bool = True, most: int = MAX_PROMPTS
) -> list[TextPrompt | TokenPrompt]:
    """Returns the prompts. The `param` of each is its position, such as `prompt[3]`, which errors
    name. Raises InvalidRequest if `given` mixes kinds or is empty, and PayloadTooLarge for more
    than `most`.
    """
    if isinstance(given, str):
        return [TextPrompt(given, param, add_special_tokens)]
    kinds = {type(each) for each in given}
    if len(kinds) != 1:
        kind = "must not be empty" if not kinds else "must be all texts or all tokens"
        raise InvalidRequest(f"{param}: the list {kind}", param=param)
    if kinds == {int}:
        return [TokenPrompt(cast(list[int], given), param)]
    check_count(param, len(given), most)
    places = [f"{param}[{index}]" for index in range(len(given))]
    if kinds == {str}:
        texts = zip(cast(list[str], given), places, strict=True)
        return [TextPrompt(text, place, add_special_tokens) for text, place in texts]
    tokens = zip(cast(list[list[int]], given), places, strict=True)
    return [TokenPrompt(token_ids, place) for token_ids, place in tokens]
