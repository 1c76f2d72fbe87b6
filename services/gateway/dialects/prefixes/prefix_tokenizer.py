"""Tokenizes a named prefix: the tokens shared by all conversations that start with the prefix."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from itertools import takewhile
from operator import eq
from typing import Any

import msgspec

from services.gateway.dialects.prefixes.errors import PrefixTooLarge, PrefixTooShort
from services.gateway.preparation.template_renderer import Messages
from services.gateway.request.generation_request import check_min_tokens, prompt_too_long
from services.gateway.request.prompt import ChatPrompt
from shared.errors import PromptTooLong
from shared.messages import ModelCard
from shared.packing import BLOCK_HASH_BYTES, TOKEN_ID_BYTES, pack_token_ids
from shared.tenancy.pinned_prefix import PinnedPrefix

Tokenize = Callable[[str, Messages, Messages], Awaitable[list[int]]]  # tenant, messages, tools
TokenizeOfTenant = Callable[[Messages, Messages], Awaitable[list[int]]]

ENVELOPE_BYTES = 4096  # bytes of the pin message besides tokens and hashes
STORED_BYTES_PER_TOKEN = 16  # in a prefix's record in Redis: the token's id takes four
STORED_EXTRA_BYTES = 64 << 10
# Fields of a message. A result's `name`, its tool, is stored too, a participant's is not.
STORED_FIELDS = ("role", "content", "tool_calls", "tool_call_id", "reasoning_content")
# Possible continuations: the first token of a continuation can merge with the text before it.
PROBES = ("A", "0", "\u2026", " x")


async def prefix_tokens(
    tokenize: TokenizeOfTenant, messages: Messages, tools: Messages
) -> list[int]:
    """Returns the common prefix of the conversation's token ids with each of PROBES appended.
    Templates write any text around a message, so the end of a prefix is found by experiment.
    Raises the errors of `tokenize`.
    """
    role = "assistant" if messages[-1]["role"] == "user" else "user"
    prompts = [
        await tokenize([*messages, {"role": role, "content": probe}], tools) for probe in PROBES
    ]
    first, last = min(prompts), max(prompts)  # the others have all that these two share
    return first[: sum(takewhile(bool, map(eq, first, last)))]


class PrefixTokenizer:
    def __init__(
        self,
        tokenize: Tokenize,
        max_payload_bytes: Callable[[], int],
        longest_token_chars: int | None = None,
    ) -> None:
        """`longest_token_chars`: characters of the tokenizer's longest token; None: unbounded."""
        self._tokenize = tokenize
        self._max_payload_bytes = max_payload_bytes
        self._longest_token_chars = longest_token_chars

    async def read(
        self, prefix: PinnedPrefix, card: ModelCard, *, max_input_tokens: int | None = None
    ) -> PinnedPrefix:
        """Returns the prefix as it is stored: with its tokens, and of each message the fields that
        all templates render. `max_input_tokens`: a tenant's limit. Raises PromptTooLong,
        ExceedsLimit, PrefixTooShort and PrefixTooLarge.
        """
        check_min_tokens(
            ChatPrompt(tuple(prefix.messages), tools=tuple(prefix.tools)),
            self._longest_token_chars,
            max_context_tokens=card.max_context_tokens,
            max_input_tokens=max_input_tokens,
        )
        tokenize = partial(self._tokenize, prefix.tenant_id)
        token_ids = await prefix_tokens(tokenize, prefix.messages, prefix.tools)
        num_tokens, context = len(token_ids), card.max_context_tokens
        if num_tokens >= context:
            length = f"{num_tokens} tokens, and a request has at least one other"
            raise prompt_too_long("messages", length, context)
        if num_tokens < card.block_size:
            raise PrefixTooShort(
                f"a prefix of {num_tokens} tokens is less than one block of {card.block_size}: "
                "only full blocks are shared",
                param="messages",
            )
        num_blocks = num_tokens // card.block_size
        num_bytes = num_tokens * TOKEN_ID_BYTES + num_blocks * BLOCK_HASH_BYTES + ENVELOPE_BYTES
        if num_bytes > self._max_payload_bytes():
            raise PromptTooLong(
                f"the prefix takes {num_bytes} bytes as an internal message; the limit is "
                f"{self._max_payload_bytes()}",
                param="messages",
            )
        messages = [_stored(each) for each in prefix.messages]
        stored = msgspec.structs.replace(
            prefix, messages=messages, token_ids=pack_token_ids(token_ids)
        )
        _check_size(stored, num_tokens)
        return stored


def _stored(message: Mapping[str, Any]) -> dict[str, Any]:
    names = (*STORED_FIELDS, "name") if message["role"] == "tool" else STORED_FIELDS
    return {name: value for name, value in message.items() if name in names}


def _check_size(prefix: PinnedPrefix, num_tokens: int) -> None:
    """Raises PrefixTooLarge for text that would fill Redis: a template may skip it, and then it
    costs no tokens.
    """
    max_bytes = num_tokens * STORED_BYTES_PER_TOKEN + STORED_EXTRA_BYTES
    if prefix.num_bytes > max_bytes:
        raise PrefixTooLarge(
            f"a prefix of {num_tokens} tokens may take {max_bytes} bytes, this one takes "
            f"{prefix.num_bytes}: remove text and fields that the template does not render",
            param="messages",
        )
