"""Renders, checks and tokenizes requests, and large bodies, in slots of their tenants."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import Any, Self

import msgspec

from services.gateway.body_budget import BodyBudget
from services.gateway.models.served_text import ServedModel, ServedText
from services.gateway.observability.telemetry.request_record import RequestRecord
from services.gateway.preparation.preparation_pool import MAX_BATCH, PreparationPool
from services.gateway.preparation.template_renderer import (
    NO_VARIABLES,
    Messages,
    model_in_body,
)
from services.gateway.request.generation_request import (
    GenerationRequest,
    check_constrained,
    check_dimensions,
)
from services.gateway.request.images.image_preparation import ImagePreparation, has_images
from services.gateway.request.preparation_slots import (
    PreparationSlots,
    RecentTenants,
    RequestCapacity,
)
from services.gateway.request.prepared_bodies import packed_prompt, tokenized
from services.gateway.request.prompt import (
    ChatPrompt,
    PackedPrompt,
    TokenPrompt,
    naming_field_of,
)
from services.gateway.request.request_builder import (
    PreparedRequest,
    RequestBuilder,
    check_min_tokens_of,
)
from services.gateway.structured.grammars.grammar_request import CheckedPlan
from services.gateway.text.named_model import model_at_an_edge, named_model
from services.gateway.text.process_jobs import (
    BodyJob,
    PreparedBody,
    TokenizedPrompt,
)
from shared.background import start_awaited
from shared.clock import Clock
from shared.config import GatewayConfig
from shared.packing import unpack_token_ids
from shared.randomness import Randomness
from shared.tenancy.prefixes.public_prefixes import PublicPrefixes
from shared.tenancy.tenant import TenantRecord

MAX_INLINE_NAMED_BYTES = 64 * 1024  # bytes of a body that is read for its model, in up to 0.6 ms
MAX_INLINE_CHARS = 8192  # characters of a small request, before it is tokenized
# Longer prompts are hashed on a thread, so that running streams do not wait.
MAX_INLINE_TOKENS = 2048
MAX_INLINE_ECHO = 64  # tokens that are converted to text, of 16 to 70 µs each


class Preparer:
    """`slots_per_tenant`: limit of one tenant's requests that use a process or a thread alone.
    Others wait: at most `max_waiting` of a tenant, each for `max_wait_s`.
    """

    def __init__(
        self,
        builder: RequestBuilder,
        pool: PreparationPool,
        capacity: RequestCapacity,
        clock: Clock,
        *,
        max_payload_bytes: Callable[[], int],
        images: ImagePreparation,
        slots_per_tenant: int,
        max_waiting: int,
        max_wait_s: float,
    ) -> None:
        self._builder = builder
        self._images = images
        self._pool = pool
        self.capacity = capacity
        self._clock = clock
        self.max_payload_bytes = max_payload_bytes
        slots = partial(
            PreparationSlots,
            slots_per_tenant,
            RecentTenants(clock),
            max_waiting=max_waiting,
            max_wait_s=max_wait_s,
        )
        self._slots, self._small = slots(), slots(alone=MAX_BATCH)

    @property
    def public(self) -> PublicPrefixes:
        return self._builder.public

    @classmethod
    def of(
        cls,
        config: GatewayConfig,
        pool: PreparationPool,
        num_open: Callable[[], int],
        clock: Clock,
        randomness: Randomness,
        *,
        max_payload_bytes: Callable[[], int],
        budget: BodyBudget,
    ) -> Self:
        """Makes a Preparer with its capacity. `num_open`: returns the number of requests that run.
        `max_payload_bytes`: returns the bytes that one message on the bus may have. `budget`: of
        bodies, and of images that are fetched.
        """
        return cls(
            RequestBuilder(config, randomness),
            pool,
            RequestCapacity(config.max_requests, num_open),
            clock,
            max_payload_bytes=max_payload_bytes,
            images=ImagePreparation.of(config, budget),
            slots_per_tenant=config.preparations_per_tenant,
            max_waiting=config.max_requests // 2,  # others find room
            max_wait_s=config.request_timeout_s,
        )

    async def prepare(
        self,
        tenant: TenantRecord,
        request_id: str,
        generation: GenerationRequest,
        model: ServedModel,
        record: RequestRecord | None = None,
    ) -> PreparedRequest:
        """Checks, renders and tokenizes. Raises the HearthError that rejects the request."""
        check_dimensions(generation, model.text.files.limits.hidden_size)
        check_min_tokens_of(generation, tenant, model)
        check_constrained(generation)
        self._images.check(generation.prompt, model.text)
        async with self._preparing(tenant.tenant_id, self._slots_of(generation)):
            if record is not None:
                record.begin("render", self._clock.now())
            generation, checked = await self._rendered_and_checked(generation, tenant, model)
            if record is not None:
                record.begin("tokenize", self._clock.now())
            generation, bad_words = await tokenized(generation, tenant.tenant_id, model.text)
            build = partial(
                self._builder.build,
                generation,
                model,
                tenant=tenant,
                request_id=request_id,
                max_payload_bytes=self.max_payload_bytes(),
                checked=checked,
                bad_words=bad_words,
            )
            return build() if _is_short(generation) else await asyncio.to_thread(build)

    async def named_model(self, tenant_id: str, kind: str, body: bytes) -> str | None:
        """Returns the model that a body of this kind names, or None for a body that names none or
        is invalid.
        """
        if len(body) <= MAX_INLINE_NAMED_BYTES:
            return named_model(body, kind)
        if (model := model_at_an_edge(body, kind)) is not None:
            return model
        async with self._preparing(tenant_id):
            return await model_in_body(self._pool, body, kind, tenant_id=tenant_id)

    async def prepare_body(
        self,
        tenant: TenantRecord,
        model: ServedModel,
        kind: str,
        body: bytes,
        read: Callable[[], Awaitable[bytes]] | None = None,
        *,
        named: str | None = None,
        has_pixels: bool = True,
        max_text_bytes: int | None = None,
    ) -> PreparedBody:
        """Decodes, renders and tokenizes a large body in a preparation process. `read`: reads the
        stored state that the body refers to, once the tenant has a slot. `named`: the model that
        the body was found to name. `has_pixels`: whether the prompts get the pixels of images.
        `max_text_bytes`: of the body without its images, where it is less than that of others.
        """
        card = model.card
        async with self._preparing(tenant.tenant_id):
            stored = b"" if read is None else await read()
            job = BodyJob(
                kind,
                body,
                card.max_context_tokens,
                tenant.input_tokens_per_min,
                card.vocab_size,
                stored,
                named,
                images=self._images.of_body(model, max_text_bytes),
                has_pixels=has_pixels,
            )
            del stored
            return await model.text.renderer.prepare_body(job, tenant_id=tenant.tenant_id)

    async def tokenize_chat(
        self,
        model: ServedModel,
        tenant_id: str,
        prompt: ChatPrompt,
        *,
        add_generation_prompt: bool = True,
    ) -> list[int]:
        """Renders and tokenizes a conversation, also with images. Raises as `tokenize` does."""
        if not prompt.images:
            return await self.tokenize(
                model.text,
                tenant_id,
                prompt.messages,
                prompt.tools,
                add_generation_prompt=add_generation_prompt,
                variables=prompt.variables,
            )
        (found,) = await self.prompts_with_images(
            model,
            tenant_id,
            [prompt],
            add_generation_prompt=add_generation_prompt,
            has_pixels=False,
        )
        return unpack_token_ids(found.token_ids)

    async def prompts_with_images(
        self,
        model: ServedModel,
        tenant_id: str,
        prompts: Sequence[ChatPrompt],
        *,
        add_generation_prompt: bool = True,
        has_pixels: bool = True,
    ) -> list[TokenizedPrompt]:
        """Renders and tokenizes conversations with the same images, and reads these once. Raises
        as `tokenize` does.
        """
        self._images.check(prompts[0], model.text)
        async with self._preparing(tenant_id):
            return await self._images.tokenized(
                prompts,
                tenant_id,
                model,
                add_generation_prompt=add_generation_prompt,
                has_pixels=has_pixels,
            )

    async def tokenize(
        self,
        text: ServedText,
        tenant_id: str,
        messages: Messages,
        tools: Messages,
        *,
        add_generation_prompt: bool = True,
        variables: Mapping[str, Any] = NO_VARIABLES,
    ) -> list[int]:
        """Renders and tokenizes a conversation. Raises the HearthError that rejects it."""
        async with self._preparing(tenant_id):
            parts = await text.renderer.render(
                messages,
                tools,
                tenant_id=tenant_id,
                add_generation_prompt=add_generation_prompt,
                variables=variables,
            )
            return (await text.renderer.encode([parts], tenant_id=tenant_id)).token_ids[0]

    async def tokenize_text(
        self, text: ServedText, tenant_id: str, prompt: str, *, adds_special_tokens: bool
    ) -> list[int]:
        """Tokenizes a small text. Raises as `tokenize` does."""
        async with self._preparing(tenant_id, self._small):
            found = await text.renderer.encode(
                [[prompt]], tenant_id=tenant_id, adds_special_tokens=adds_special_tokens
            )
            return found.token_ids[0]

    def check_capacity(self) -> None:
        """Checks work that needs no slot. Raises Overloaded, and NoCapacity if the gateway is
        draining.
        """
        self.capacity.check()

    async def _rendered_and_checked(
        self, generation: GenerationRequest, tenant: TenantRecord, model: ServedModel
    ) -> tuple[GenerationRequest, CheckedPlan | None]:
        """Checks the grammar while the conversation is rendered."""
        tenant_id = tenant.tenant_id
        if generation.output is None and generation.tools is None:
            return await self._rendered(generation, tenant_id, model), None
        check = start_awaited(
            model.text.grammars.checked_plan(
                generation.output,
                generation.tools,
                tenant_id,
                continues_text=generation.continues_text,
                is_retained=not tenant.is_zero_retention,
            )
        )
        try:
            return await self._rendered(generation, tenant_id, model), await check
        finally:
            check.cancel()
            await asyncio.gather(check, return_exceptions=True)  # its error was raised, or another

    async def _rendered(
        self, generation: GenerationRequest, tenant_id: str, model: ServedModel
    ) -> GenerationRequest:
        prompt = generation.prompt
        if not isinstance(prompt, ChatPrompt):
            return generation
        if prompt.images:
            (found,) = await self._images.tokenized([prompt], tenant_id, model)
            self.capacity.check_draining()
            return msgspec.structs.replace(generation, prompt=packed_prompt(found))
        with naming_field_of(prompt):
            parts = await model.text.renderer.render(
                prompt.messages, prompt.tools, tenant_id=tenant_id, variables=prompt.variables
            )
        self.capacity.check_draining()
        rendered = msgspec.structs.replace(prompt, parts=tuple(parts))
        return msgspec.structs.replace(generation, prompt=rendered)

    @asynccontextmanager
    async def _preparing(
        self, tenant_id: str, slots: PreparationSlots | None = None
    ) -> AsyncIterator[None]:
        """Holds one of the tenant's slots (default: one of a large request). Counts as one request
        in preparation meanwhile. Raises Overloaded, and NoCapacity if the gateway is draining.
        """
        self.capacity.check()
        with self.capacity.preparing():
            async with (slots or self._slots).slot(tenant_id):
                yield

    def _slots_of(self, generation: GenerationRequest) -> PreparationSlots:
        is_checked = generation.output is not None or generation.tools is not None
        needs_process = is_checked or has_images(generation.prompt)
        return self._small if _is_short(generation) and not needs_process else self._slots


def _is_short(generation: GenerationRequest) -> bool:
    """Whether the prompt is prepared without a thread and without a process of its own."""
    prompt = generation.prompt
    match prompt:
        case TokenPrompt() if generation.has_echo:
            return prompt.num_chars <= MAX_INLINE_ECHO
        case TokenPrompt() | PackedPrompt():
            return prompt.num_chars <= MAX_INLINE_TOKENS
    return prompt.num_chars <= MAX_INLINE_CHARS
