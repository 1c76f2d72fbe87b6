"""What `prompt` of completions and `input` of embeddings may be: one or many, text or tokens."""

from __future__ import annotations

from typing import Annotated, cast

from msgspec import Meta

from services.gateway.prompt import TextPrompt, TokenPrompt
from shared.errors import InvalidRequest

MAX_PROMPTS = 256

TokenId = Annotated[int, Meta(ge=0, le=2**32 - 1)]
Prompts = str | list[str | TokenId | list[TokenId]]


def prompts_of(
    param: str, given: Prompts, *, add_special_tokens: bool = True
) -> list[TextPrompt | TokenPrompt]:
    """Raises InvalidRequest if `given` mixes kinds, holds nothing or too much."""
    if isinstance(given, str):
        return [TextPrompt(given, param, add_special_tokens)]
    kinds = {type(each) for each in given}
    if len(kinds) != 1:
        kind = "must not be empty" if not kinds else "must be all texts or all tokens"
        raise InvalidRequest(f"{param}: the list {kind}", param=param)
    if kinds == {int}:
        return [TokenPrompt(cast(list[int], given), param)]
    if len(given) > MAX_PROMPTS:
        raise InvalidRequest(f"{param}: at most {MAX_PROMPTS} at once", param=param)
    if kinds == {str}:
        return [TextPrompt(text, param, add_special_tokens) for text in cast(list[str], given)]
    return [TokenPrompt(token_ids, param) for token_ids in cast(list[list[int]], given)]
