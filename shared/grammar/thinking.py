"""The limit of a request's reasoning on the wire, in tokens of each choice."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from shared.grammar.spec import StartTokens

THINKING_FEATURE = "thinking_budget/1"  # required of workers that enforce a `ThinkingBudget`
MAX_MARKS = 32  # ways in which tokens spell one marker

Marks = Annotated[tuple[StartTokens, ...], Meta(max_length=MAX_MARKS)]


class ThinkingBudget(msgspec.Struct, frozen=True, kw_only=True):
    """Forces one of `closes` after `max_tokens` tokens of reasoning.

    `opens` and `closes` are the token sequences that open and close reasoning; a text that is not
    one token of its own has several. The first of `closes` is forced unless another has begun. If
    `is_open`, the output begins inside reasoning. Reasoning that is opened again goes on counting.
    """

    max_tokens: Annotated[int, Meta(ge=0, le=2**31 - 1)]
    closes: Annotated[tuple[StartTokens, ...], Meta(min_length=1, max_length=MAX_MARKS)]
    opens: Marks = ()
    is_open: bool = False
