"""A request to generate, free of any HTTP dialect, and how it becomes a `Request` on the wire."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from services.gateway.text.model_files import GenerationDefaults, ModelFiles
from shared.block_hash import extend_chain, root_hash
from shared.errors import InvalidRequest, PromptTooLong
from shared.messages import Choice, ModelCard, Request, SamplingParams
from shared.packing import BLOCK_HASH_BYTES, TOKEN_ID_BYTES, pack_hashes, pack_token_ids

# What a message holds besides tokens and hashes: ids, sampling, the scheduler's additions.
ENVELOPE_BYTES = 16 * 1024
MESSAGE_CHARS = 32  # a message without text takes the template as long as this much text


class Generation(msgspec.Struct, frozen=True, kw_only=True):
    """None: not given, the model's or the gateway's default holds. Zeros are values."""

    model: str
    messages: tuple[Mapping[str, Any], ...]
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    max_tokens: int | None = None
    min_tokens: int = 0
    ignore_eos: bool = False
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    cache_salt: str = ""

    @property
    def num_chars(self) -> int:
        """What rendering and tokenizing cost; an empty message is not free either."""
        return sum(MESSAGE_CHARS + len(message["content"]) for message in self.messages)


class Origin(msgspec.Struct, frozen=True, kw_only=True):
    """Who asks, through which gateway, and until when."""

    request_id: str
    tenant_id: str
    gateway_id: str
    timeout_s: float
    drawn_seed: int


def tokenize(generation: Generation, files: ModelFiles) -> list[int]:
    """Raises InvalidRequest if the template refuses the messages."""
    if files.chat_template is None:
        raise InvalidRequest("this model has no chat template", param="messages")
    return files.tokenizer.encode(files.chat_template.render(generation.messages))


def max_output_tokens(
    generation: Generation, num_prompt_tokens: int, card: ModelCard, default: int
) -> int:
    """Raises PromptTooLong, or InvalidRequest if prompt and answer together do not fit."""
    context = card.max_context_tokens
    room = context - num_prompt_tokens
    if room < 1:
        raise PromptTooLong(
            f"the prompt has {num_prompt_tokens} tokens; this model's context of {context} "
            "must hold it and at least one more",
            param="messages",
        )
    if generation.max_tokens is None:
        return max(min(default, room), min(generation.min_tokens, room))
    if generation.max_tokens > room:
        raise InvalidRequest(
            f"{num_prompt_tokens} prompt tokens and max_tokens={generation.max_tokens} exceed "
            f"this model's context of {context}",
            param="max_tokens",
        )
    return generation.max_tokens


def check_payload(num_prompt_tokens: int, max_tokens: int, card: ModelCard, limit: int) -> None:
    """The request must fit in one bus message now, and later with all its output.

    Raises PromptTooLong.
    """
    num_bytes = (num_prompt_tokens + max_tokens) * TOKEN_ID_BYTES + ENVELOPE_BYTES
    num_bytes += num_prompt_tokens // card.block_size * BLOCK_HASH_BYTES
    if num_bytes > limit:
        raise PromptTooLong(
            f"the request would take {num_bytes} bytes inside the system; it carries at most "
            f"{limit}",
            param="messages",
        )


def build_request(
    generation: Generation,
    prompt_token_ids: list[int],
    max_tokens: int,
    card: ModelCard,
    defaults: GenerationDefaults,
    origin: Origin,
) -> Request:
    """Raises InvalidRequest for sampling that contradicts itself or the vocabulary."""
    root = root_hash(origin.tenant_id, card.revision, cache_salt=generation.cache_salt)
    hashes = extend_chain(root, prompt_token_ids, card.block_size)
    return Request(
        request_id=origin.request_id,
        tenant_id=origin.tenant_id,
        gateway_id=origin.gateway_id,
        model=card.name,
        revision=card.revision,
        cache_root=root,
        prompt_token_ids=pack_token_ids(prompt_token_ids),
        block_hashes=pack_hashes(hashes),
        sampling=_sampling(generation, max_tokens, card, defaults, origin.drawn_seed),
        choices=(Choice(choice_index=0),),
        deadline_s=origin.timeout_s,
    )


def _sampling(
    generation: Generation,
    max_tokens: int,
    card: ModelCard,
    defaults: GenerationDefaults,
    drawn_seed: int,
) -> SamplingParams:
    if generation.min_tokens > max_tokens:
        raise InvalidRequest(
            f"min_tokens={generation.min_tokens} is more than max_tokens={max_tokens}",
            param="min_tokens",
        )
    for token_id in generation.stop_token_ids:
        if not 0 <= token_id < card.vocab_size:
            raise InvalidRequest(
                f"stop_token_ids: {token_id} is not in this model's vocabulary",
                param="stop_token_ids",
            )
    eos = () if generation.ignore_eos else defaults.eos_token_ids
    given = generation
    return SamplingParams(
        seed=(drawn_seed if given.seed is None else given.seed) & (2**64 - 1),
        max_tokens=max_tokens,
        temperature=defaults.temperature if given.temperature is None else given.temperature,
        top_k=max(defaults.top_k if given.top_k is None else given.top_k, 0),
        top_p=defaults.top_p if given.top_p is None else given.top_p,
        min_p=0.0 if given.min_p is None else given.min_p,
        min_tokens=given.min_tokens,
        ignore_eos=given.ignore_eos,
        stop_token_ids=tuple(dict.fromkeys((*given.stop_token_ids, *eos))),
    )
