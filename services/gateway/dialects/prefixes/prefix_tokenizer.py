"""Tokenizes a named prefix: the tokens shared by all conversations that start with the prefix."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from itertools import takewhile
from operator import eq
from typing import Any

import msgspec

from services.gateway.dialects.prefixes.errors import PrefixTooLarge, PrefixTooShort
from services.gateway.images.input_image import InputImage, bad_image
from services.gateway.request.generation_request import check_min_tokens, prompt_too_long
from services.gateway.request.prompt import ChatPrompt
from shared.errors import PromptTooLong
from shared.messages import ImagePart, ModelCard
from shared.packing import BLOCK_HASH_BYTES, TOKEN_ID_BYTES, pack_token_ids
from shared.tenancy.prefixes.pinned_prefix import PinnedPrefix, PrefixImage

# of conversations that begin alike, with the images that all of them begin with
Tokens = tuple[list[list[int]], Sequence[ImagePart]]
Tokenize = Callable[[str, Sequence[ChatPrompt]], Awaitable[Tokens]]  # the first is the tenant
TokenizeOfTenant = Callable[[Sequence[ChatPrompt]], Awaitable[Tokens]]

ENVELOPE_BYTES = 4096  # bytes of the pin message besides tokens and hashes
STORED_BYTES_PER_TOKEN = 16  # in a prefix's record in Redis: the token's id takes four
STORED_EXTRA_BYTES = 64 << 10
MAX_IMAGE_BYTES = 4 << 20  # of the images of a prefix, as sent
# Fields of a message. A result's `name`, its tool, is stored too, a participant's is not.
STORED_FIELDS = ("role", "content", "tool_calls", "tool_call_id", "reasoning_content")
# Possible continuations: the first token of a continuation can merge with the text before it.
PROBES = ("A", "0", "\u2026", " x")


async def prefix_tokens(
    tokenize: TokenizeOfTenant, prompt: ChatPrompt
) -> tuple[list[int], Sequence[ImagePart]]:
    """Returns the common prefix of the conversation's token ids with each of PROBES appended, and
    its images. Templates write any text around a message, so the end of a prefix is found by
    experiment. Raises the errors of `tokenize`.
    """
    role = "assistant" if prompt.messages[-1]["role"] == "user" else "user"
    messages = [(*prompt.messages, {"role": role, "content": probe}) for probe in PROBES]
    prompts, images = await tokenize(
        [msgspec.structs.replace(prompt, messages=each) for each in messages]
    )
    first, last = min(prompts), max(prompts)  # the others have all that these two share
    num_tokens = sum(takewhile(bool, map(eq, first, last)))
    return first[:num_tokens], images


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
        self,
        prefix: PinnedPrefix,
        card: ModelCard,
        *,
        images: Sequence[InputImage] = (),
        max_input_tokens: int | None = None,
    ) -> PinnedPrefix:
        """Returns the prefix as it is stored: with its tokens, the files of its `images`, and of
        each message the fields that all templates render. `max_input_tokens`: a tenant's limit.
        Raises PromptTooLong, ExceedsLimit, PrefixTooShort, PrefixTooLarge, and the errors of
        images.
        """
        prompt = ChatPrompt(tuple(prefix.messages), tools=tuple(prefix.tools), images=tuple(images))
        check_min_tokens(
            prompt,
            self._longest_token_chars,
            max_context_tokens=card.max_context_tokens,
            max_input_tokens=max_input_tokens,
        )
        _check_files(images)
        tokenize = partial(self._tokenize, prefix.tenant_id)
        token_ids, parts = await prefix_tokens(tokenize, prompt)
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
        # 4 MiB of base64 take 24 ms
        contents = await asyncio.to_thread(lambda: [each.content for each in images])
        stored = msgspec.structs.replace(
            prefix,
            messages=messages,
            token_ids=pack_token_ids(token_ids),
            images=[
                PrefixImage(part, content, given.media_type, given.detail)
                for part, content, given in zip(parts, contents, images, strict=True)
            ],
            revision=card.revision if images else "",
        )
        _check_size(stored, num_tokens)
        return stored


def _stored(message: Mapping[str, Any]) -> dict[str, Any]:
    names = (*STORED_FIELDS, "name") if message["role"] == "tool" else STORED_FIELDS
    return {name: value for name, value in message.items() if name in names}


def _check_files(images: Sequence[InputImage]) -> None:
    """Raises InvalidRequest for an image at an address, and PrefixTooLarge for files that would
    fill Redis. In base64 they take a third more.
    """
    for each in images:
        if each.address:
            raise bad_image(each.place, "the images of a named prefix are sent as data URLs")
    num_bytes = sum(len(each.data) for each in images)
    if num_bytes > MAX_IMAGE_BYTES:
        raise PrefixTooLarge(
            f"the images of a prefix may take {MAX_IMAGE_BYTES} bytes as sent, these take "
            f"{num_bytes}",
            param=images[0].place,
        )


def _check_size(prefix: PinnedPrefix, num_tokens: int) -> None:
    """Raises PrefixTooLarge for text that would fill Redis: a template may skip it, and then it
    costs no tokens.
    """
    max_bytes = num_tokens * STORED_BYTES_PER_TOKEN + STORED_EXTRA_BYTES
    num_bytes = prefix.num_bytes - prefix.num_image_bytes
    if num_bytes > max_bytes:
        raise PrefixTooLarge(
            f"a prefix of {num_tokens} tokens may take {max_bytes} bytes, this one takes "
            f"{num_bytes}: remove text and fields that the template does not render",
            param="messages",
        )
