"""Reports the cached tokens of a request and where two prompts diverge, without running them."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Hashable, Mapping, Sequence
from itertools import takewhile
from typing import NamedTuple

import msgspec

from services.gateway.dialects.openai import chat, completions
from services.gateway.dialects.prefixes.bodies import (
    NULL,
    Divergence,
    DryRun,
    DryRunReport,
    DryRunRequest,
    WorkerPrefix,
)
from services.gateway.dialects.prefixes.store import PrefixStore
from services.gateway.models.served_text import ServedModel
from services.gateway.request.generation_request import GenerationRequest
from services.gateway.request.request_builder import PreparedRequest
from services.gateway.text.decoding.token_table import TokenTable
from shared.errors import InvalidRequest
from shared.messages import ImagePart, ModelCard
from shared.transport.wire_errors import UNREADABLE

CONTEXT_TOKENS = 8  # returned as text before the divergence

Prepare = Callable[[GenerationRequest, ServedModel], Awaitable[PreparedRequest]]
Choose = Callable[[str], Awaitable[ServedModel]]


class _Peek(msgspec.Struct, frozen=True):
    """Decodes only what distinguishes a chat from a completion."""

    messages: msgspec.Raw = NULL


def to_generation_request(data: msgspec.Raw, param: str, default_model: str) -> GenerationRequest:
    """Converts the body as its own route does. Raises the same InvalidRequest."""
    try:
        is_chat = msgspec.json.decode(data, type=_Peek).messages is not NULL
    except UNREADABLE as error:
        raise InvalidRequest(f"{param}: {error}", param=param) from error
    if is_chat:
        return chat.to_generation_request(chat.CHAT_FIELDS.decode(data), default_model)
    completion = completions.COMPLETION_FIELDS.decode(data)
    generations = completions.to_generation_requests(completion, default_model)
    if len(generations) != 1:
        raise InvalidRequest(f"{param}: a dry run takes exactly one prompt", param=param)
    return generations[0]


async def dry_run(
    body: DryRunRequest,
    tenant_id: str,
    *,
    choose: Choose,
    prepare: Prepare,
    prefix_store: PrefixStore,
    default_model: str,
) -> DryRunReport:
    """Compares two prompts in the tokens of one model, which `choose` returns. Raises the
    HearthError that would reject the request itself.
    """
    runs, prompts = [], []
    generations = {p: to_generation_request(given, p, default_model) for p, given in body.named}
    _check_same_model(generations)
    model = await choose(next(iter(generations.values())).model)
    for generation in generations.values():
        prepared = await prepare(generation, model)
        runs.append(await _run(prepared, tenant_id, prefix_store, model.card))
        prompts.append(_Prompt(prepared.prompt_token_ids, prepared.request.images))
    if len(runs) == 1:
        return DryRunReport(request=runs[0])
    tokens = model.text.files.tokens
    divergence = _divergence(prompts[0], prompts[1], tokens, model.card.block_size)
    return DryRunReport(request=runs[0], other=runs[1], divergence=divergence)


def _check_same_model(generations: Mapping[str, GenerationRequest]) -> None:
    (_, first), *others = generations.items()
    for param, other in others:
        if other.model != first.model:
            raise InvalidRequest(
                f"{param}.model: {other.model!r} is not {first.model!r}: a dry run compares "
                "prompts of one model",
                param=f"{param}.model",
            )


async def _run(
    prepared: PreparedRequest, tenant_id: str, prefix_store: PrefixStore, card: ModelCard
) -> DryRun:
    request, num_tokens = prepared.request, len(prepared.prompt_token_ids)
    found = await prefix_store.held(
        tenant_id,
        card,
        request.block_hashes,
        region_class=request.region_class,
        regions=request.allowed_regions or None,
        num_public_blocks=request.num_public_blocks,
    )
    # the last token is never a hit: sampling needs its logits
    workers = [
        WorkerPrefix(
            worker=each.worker_id,
            cached_tokens=min(each.num_blocks * card.block_size, num_tokens - 1),
        )
        for each in (() if found is None else found.matches)
    ]
    workers.sort(key=lambda each: (-each.cached_tokens, each.worker))
    return DryRun(
        prompt_tokens=num_tokens,
        cached_tokens=workers[0].cached_tokens if workers else 0,
        public_tokens=request.num_public_blocks * card.block_size,
        index_state="unknown" if found is None else found.state,
        workers=workers,
    )


class _Prompt(NamedTuple):
    token_ids: list[int]
    images: Sequence[ImagePart]

    @property
    def keys(self) -> list[Hashable]:
        """What two prompts share: of an image, its pixels."""
        keys: list[Hashable] = [*self.token_ids]
        for image in self.images:
            places = slice(image.first_token, image.first_token + image.num_tokens)
            keys[places] = [(image.image_hash, each) for each in keys[places]]
        return keys


def _divergence(
    one: _Prompt, other: _Prompt, tokens: TokenTable, block_size: int
) -> Divergence | None:
    if one.keys == other.keys:
        return None
    first, second = one.token_ids, other.token_ids
    same = takewhile(lambda pair: pair[0] == pair[1], zip(one.keys, other.keys, strict=False))
    index = sum(1 for _ in same)

    def text(token_ids: Sequence[int]) -> str:
        return tokens.decode(token_ids)

    def token_text(token_ids: Sequence[int]) -> str | None:
        return text(token_ids[index : index + 1]) if index < len(token_ids) else None

    return Divergence(
        token_index=index,
        common_blocks=index // block_size,
        text_before=text(first[max(0, index - CONTEXT_TOKENS) : index]),
        request_text=token_text(first),
        other_text=token_text(second),
    )
