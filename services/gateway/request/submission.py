"""Submits a tenant's requests: reserve, prepare, charge, open, cancel.

    reserve ──body read──▶ prepare ──tokens known──▶ charge ──▶ open ──every output ended──▶ settle

The `Reservation` is made before any work and settled after it, also if the request is rejected on
the way. Every dialect submits `GenerationRequest`s here and reads their deltas from the
`OutputMerger`.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import msgspec

from services.gateway.models.served_models import ServedModels
from services.gateway.models.served_text import ServedModel, ServedText
from services.gateway.observability.metrics.gateway_metrics import GatewayMetrics
from services.gateway.observability.telemetry.request_record import RequestRecord
from services.gateway.observability.telemetry.span_attributes import span_attributes
from services.gateway.observability.telemetry.telemetry import RequestTelemetry
from services.gateway.preparation.preparation_pool import MAX_BATCH
from services.gateway.preparation.template_renderer import NO_VARIABLES, Messages
from services.gateway.request.generation_request import (
    GenerationRequest,
    check_constrained,
    check_dimensions,
    scoped_affinity_key,
)
from services.gateway.request.output_merger import OutputMerger
from services.gateway.request.preparation import (
    Preparation,
    PreparedRequest,
    assembler_of,
    check_logprobs,
    check_min_tokens_of,
)
from services.gateway.request.preparation_slots import PreparationSlots, RecentTenants
from services.gateway.request.prepared_bodies import tokenized
from services.gateway.request.prompt import ChatPrompt, naming_field_of
from services.gateway.request.request_output import ClientDisconnected, RequestOutput
from services.gateway.request.reservation import Reservation
from services.gateway.request.unsent_output import UnsentOutput
from services.gateway.streams.queued_openings import Opening, num_at_once
from services.gateway.streams.stream_driver import StreamDriver
from services.gateway.structured.grammars.grammar_request import CheckedPlan
from services.gateway.tenancy.limits import Limits
from services.gateway.tenancy.permissions import check_regions
from services.gateway.tenancy.request_cost import RequestCost
from services.gateway.tenancy.usage_counter import UsageCounter
from services.gateway.text.process_jobs import BodyJob, PreparedBody
from shared.background import start_awaited
from shared.clock import Clock
from shared.errors import HearthError, NoCapacity, Overloaded
from shared.tenancy.tenant import TenantRecord

# Longer prompts are hashed on a thread, so that running streams do not wait.
MAX_INLINE_CHARS = 8192
MAX_PROMPTS = 16_384  # of a tenant, of all its responses: each takes up to 4 KB until they close


class Submission:
    """`max_requests`: limit of the requests open or in preparation at the same time.

    `slots_per_tenant`: limit of one tenant's requests in preparation that take a process or a
    thread for themselves; `timeout_s`: for which the rest waits at most.
    """

    def __init__(
        self,
        *,
        max_requests: int,
        preparation: Preparation,
        limits: Limits,
        usage: UsageCounter,
        models: ServedModels,
        driver: StreamDriver,
        metrics: GatewayMetrics,
        clock: Clock,
        max_payload_bytes: Callable[[], int],
        unsent: UnsentOutput,
        slots_per_tenant: int,
        timeout_s: float,
        telemetry: RequestTelemetry,
    ) -> None:
        self._max_requests = max_requests
        self._preparation = preparation
        self._limits = limits
        self._usage = usage
        self._models = models
        self._driver = driver
        self._metrics = metrics
        self._clock = clock
        self._max_payload_bytes = max_payload_bytes
        self._unsent = unsent
        recent = RecentTenants(clock)
        slots = partial(
            PreparationSlots,
            slots_per_tenant,
            recent,
            max_waiting=max_requests // 2,  # others find room
            max_wait_s=timeout_s,
        )
        self._slots, self._small = slots(), slots(alone=MAX_BATCH)
        self._telemetry = telemetry
        self._num_preparing = 0
        self._num_prompts: Counter[str] = Counter()  # by tenant
        self._num_responses: Counter[str] = Counter()  # that have prompts
        self._reservations: set[Reservation] = set()
        self.is_draining = False

    def begin(
        self, request_id: str, *, dialect: str, traceparent: str | None = None
    ) -> RequestRecord:
        """Call when the request arrives. `traceparent`: the caller's header."""
        return self._telemetry.begin(request_id, dialect=dialect, traceparent=traceparent)

    async def reserve(self, tenant: TenantRecord, record: RequestRecord) -> Reservation:
        """Charges one request and takes its place under `concurrency`, before its body is read.

        The caller closes the reservation. Raises LimitIsZero or RateLimited.
        """
        record.tenant_id = tenant.tenant_id
        try:
            lease = await self._limits.admit(tenant, record.request_id)
        except HearthError as error:
            self._telemetry.refused(record, error)
            raise
        reservation = Reservation(
            record, lease, on_end=self._count_last_usage, on_close=self._settle
        )
        self._reservations.add(reservation)
        return reservation

    async def submit(
        self,
        reservation: Reservation,
        generations: Sequence[GenerationRequest],
        model: ServedModel,
    ) -> OutputMerger:
        """Admits all requests or none: no worker receives part of a list with a bad prompt.

        Yields to running streams between two of the requests. Raises the HearthError with which
        the request is rejected.
        """
        self._hold_prompts(reservation, len(generations))
        prepared: list[PreparedRequest] = []
        for index, generation in enumerate(generations):
            if index:
                await asyncio.sleep(0)
            request_id = reservation.request_id
            own_id = f"{request_id}-{index}" if index else request_id
            prepared.append(
                await self.prepare(
                    reservation.tenant, own_id, generation, model, record=reservation.record
                )
            )
        reservation.record.begin("submit", self._clock.now())
        prepared = _traced(reservation.record, prepared)
        check_logprobs(prepared)
        await self.charge(reservation, prepared)
        outputs: list[RequestOutput] = []
        for each in prepared:
            if outputs:
                await asyncio.sleep(0)
            outputs.append(self.output_of(each, reservation))
        self.open(prepared, outputs, reservation)
        reservation.close_submissions(has_response=True)
        return OutputMerger(
            outputs,
            num_choices=generations[0].num_choices,
            headers=reservation.headers,
            unsent=self._unsent.open(reservation.tenant.tenant_id),
            on_close=reservation.close,
            on_send=reservation.record.record_send,
        )

    def _hold_prompts(self, reservation: Reservation, num_prompts: int) -> None:
        """Until the response has closed. Raises Overloaded."""
        tenant_id = reservation.tenant.tenant_id
        if self._num_prompts[tenant_id] + num_prompts > MAX_PROMPTS:
            raise Overloaded("this tenant has too many prompts under way", retry_after_s=1.0)
        reservation.num_prompts = num_prompts
        self._num_prompts[tenant_id] += num_prompts
        self._num_responses[tenant_id] += num_prompts > 0

    async def choose(self, reservation: Reservation, name: str) -> ServedModel:
        """The model of all prompts of the response. Raises UnknownModel, ModelNotAllowed,
        NoRegionAllowed, and NoCapacity if it cannot be served now.
        """
        if reservation.model is None:
            self._check_admission()
            self._models.check(reservation.tenant, name)
            check_regions(reservation.tenant)
            self._num_preparing += 1  # it may wait for files that are read
            try:
                reservation.model = await self._models.choose(name)
            finally:
                self._num_preparing -= 1
        return reservation.model

    async def prepare(
        self,
        tenant: TenantRecord,
        request_id: str,
        generation: GenerationRequest,
        model: ServedModel,
        record: RequestRecord | None = None,
    ) -> PreparedRequest:
        """Checks, renders and tokenizes. Raises the HearthError that rejects the request."""
        self._check_admission()
        check_dimensions(generation, model.text.files.limits.hidden_size)
        check_min_tokens_of(generation, tenant, model)
        check_constrained(generation)
        async with self._preparing(tenant.tenant_id, self._slots_of(generation)):
            if record is not None:
                record.begin("render", self._clock.now())
            generation, checked = await self._rendered_and_checked(
                generation, tenant.tenant_id, model.text
            )
            if record is not None:
                record.begin("tokenize", self._clock.now())
            generation, bad_words = await tokenized(generation, tenant.tenant_id, model.text)
            prepare = partial(
                self._preparation.prepare,
                generation,
                model,
                tenant=tenant,
                request_id=request_id,
                max_payload_bytes=self._max_payload_bytes(),
                checked=checked,
                bad_words=bad_words,
            )
            if generation.prompt.num_chars > MAX_INLINE_CHARS:
                return await asyncio.to_thread(prepare)
            return prepare()

    async def prepare_body(
        self,
        tenant: TenantRecord,
        model: ServedModel,
        kind: str,
        body: bytes,
        read: Callable[[], Awaitable[bytes]] | None = None,
    ) -> PreparedBody:
        """Decodes, renders and tokenizes a large body in a preparation process. `read`: reads the
        stored state that the body refers to, once the tenant has a slot.
        """
        self._check_admission()
        card = model.card
        async with self._preparing(tenant.tenant_id):
            stored = b"" if read is None else await read()
            job = BodyJob(
                *(kind, body, card.max_context_tokens, tenant.input_tokens_per_min),
                *(card.vocab_size, stored),
            )
            del stored
            return await model.text.renderer.prepare_body(job, tenant_id=tenant.tenant_id)

    async def charge(self, reservation: Reservation, prepared: Sequence[PreparedRequest]) -> None:
        """Charges the tokens of all prompts of one response. Raises the error that rejects it."""
        request_cost = RequestCost(
            num_input_tokens=sum(len(each.prompt_token_ids) for each in prepared),
            num_output_tokens=sum(each.max_output_tokens for each in prepared),
            input_param=prepared[0].generation.prompt.param,
        )
        self._check_admission()
        self._num_preparing += len(prepared)
        try:
            reservation.lease = await self._limits.charge(reservation.lease, request_cost)
        finally:
            self._num_preparing -= len(prepared)

    async def charge_input(self, reservation: Reservation, num_tokens: int) -> None:
        """Charges tokens that are computed without an output. Raises ExceedsLimit, RateLimited."""
        reservation.lease = await self._limits.charge(reservation.lease, RequestCost(num_tokens, 0))

    def output_of(self, prepared: PreparedRequest, reservation: Reservation) -> RequestOutput:
        """The output of a request, which `open` sends."""
        assemblers = [
            assembler_of(prepared, each.choice_index) for each in prepared.request.choices
        ]
        return RequestOutput(
            prepared,
            assemblers,
            self._metrics,
            self._clock,
            dialect=reservation.record.dialect,
            on_end=reservation.ended,
        )

    def open(
        self,
        prepared: Sequence[PreparedRequest],
        outputs: Sequence[RequestOutput],
        reservation: Reservation,
    ) -> None:
        """Sends the requests of one response to schedulers, some at once, the others as those end.
        Raises the HearthError that rejects them.
        """
        self._check_admission()
        openings = [_opening(each, output) for each, output in zip(prepared, outputs, strict=True)]
        self._driver.open(openings, self._num_at_once(reservation))
        for output in outputs:  # last: it waits for the end of what was opened
            reservation.opened(output)

    def _num_at_once(self, reservation: Reservation) -> int:
        """Of the prompts of a response: its share beside others of the tenant, for which the
        gateway has room.
        """
        tenant_id = reservation.tenant.tenant_id
        all_prompts, num_responses = self._num_prompts[tenant_id], self._num_responses[tenant_id]
        share = num_at_once(reservation.num_prompts, all_prompts, num_responses)
        return max(1, min(share, self._num_free()))

    def cancel(self, outputs: Sequence[RequestOutput], error: HearthError | None = None) -> None:
        """Cancels the requests of a lost client. Does nothing for ended requests."""
        if error is None:
            error = ClientDisconnected("the client closed the connection")
        for output in outputs:
            self._driver.close(output.request_id, "client_gone", error)

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
        """Renders and tokenizes a conversation. Counts as one request in preparation meanwhile."""
        async with self._preparing(tenant_id):
            parts = await text.renderer.render(
                messages,
                tools,
                tenant_id=tenant_id,
                add_generation_prompt=add_generation_prompt,
                variables=variables,
            )
            return (await text.renderer.encode([parts], tenant_id=tenant_id)).token_ids[0]

    def count_usage(self) -> None:
        """Counts what running responses have delivered since the last count."""
        for reservation in self._reservations:
            self._count_usage(reservation)

    def _count_last_usage(self, reservation: Reservation) -> None:
        """Counts usage after every prompt of a response has ended."""
        self._reservations.discard(reservation)
        self._count_usage(reservation)
        self._telemetry.ended(reservation.record, reservation.model_name, reservation.outputs)

    def _count_usage(self, reservation: Reservation) -> None:
        if reservation.model is not None:  # else nothing was generated
            tenant_id, model = reservation.tenant.tenant_id, reservation.model.card.name
            self._usage.count(tenant_id, model, reservation.take_usage())

    def _settle(self, reservation: Reservation) -> None:
        """Settles limits after the last byte of a response has left."""
        outputs, tenant_id = reservation.outputs, reservation.tenant.tenant_id
        self._num_prompts[tenant_id] -= reservation.num_prompts
        self._num_responses[tenant_id] -= reservation.num_prompts > 0
        if not self._num_prompts[tenant_id]:
            del self._num_prompts[tenant_id], self._num_responses[tenant_id]
        self._limits.settle(reservation.lease, sum(each.num_output_tokens for each in outputs))
        self._telemetry.closed(reservation.record, reservation.model_name, outputs)

    async def _rendered_and_checked(
        self, generation: GenerationRequest, tenant_id: str, text: ServedText
    ) -> tuple[GenerationRequest, CheckedPlan | None]:
        """Checks the grammar while the conversation is rendered."""
        if generation.output is None and generation.tools is None:
            return await self._rendered(generation, tenant_id, text), None
        check = start_awaited(
            text.grammars.checked_plan(
                generation.output,
                generation.tools,
                tenant_id,
                continues_text=generation.continues_text,
            )
        )
        try:
            return await self._rendered(generation, tenant_id, text), await check
        finally:
            check.cancel()
            await asyncio.gather(check, return_exceptions=True)  # its error was raised, or another

    async def _rendered(
        self, generation: GenerationRequest, tenant_id: str, text: ServedText
    ) -> GenerationRequest:
        prompt = generation.prompt
        if not isinstance(prompt, ChatPrompt):
            return generation
        with naming_field_of(prompt):
            parts = await text.renderer.render(
                prompt.messages, prompt.tools, tenant_id=tenant_id, variables=prompt.variables
            )
        self._check_draining()
        rendered = msgspec.structs.replace(prompt, parts=tuple(parts))
        return msgspec.structs.replace(generation, prompt=rendered)

    @asynccontextmanager
    async def _preparing(
        self, tenant_id: str, slots: PreparationSlots | None = None
    ) -> AsyncIterator[None]:
        """Holds one of the tenant's slots (default: one of a large request). Raises Overloaded."""
        self._num_preparing += 1
        try:
            async with (slots or self._slots).slot(tenant_id):
                yield
        finally:
            self._num_preparing -= 1

    def _slots_of(self, generation: GenerationRequest) -> PreparationSlots:
        is_checked = generation.output is not None or generation.tools is not None
        is_small = generation.prompt.num_chars <= MAX_INLINE_CHARS and not is_checked
        return self._small if is_small else self._slots

    def _check_draining(self) -> None:
        if self.is_draining:
            raise NoCapacity("the gateway is draining", retry_after_s=1.0)

    def _check_admission(self) -> None:
        self._check_draining()
        if self._num_free() <= 0:
            raise Overloaded("too many requests are open at this gateway", retry_after_s=1.0)

    def _num_free(self) -> int:
        return self._max_requests - len(self._driver) - self._num_preparing


def _opening(prepared: PreparedRequest, output: RequestOutput) -> Opening:
    generation, request = prepared.generation, prepared.request
    affinity_key = scoped_affinity_key(request.tenant_id, generation.affinity_key)
    return Opening(request, output, affinity_key, generation.is_queueable)


def _traced(record: RequestRecord, prepared: list[PreparedRequest]) -> list[PreparedRequest]:
    """Adds the trace to the requests, and the request's options to the span."""
    trace = record.trace
    if trace is None:
        return prepared
    if trace.is_sampled:
        generation, request = prepared[0].generation, prepared[0].request
        key = generation.affinity_key
        record.attributes |= span_attributes(
            request,
            is_chat=not generation.continues_text,
            is_json=generation.output is not None,
            affinity_key=scoped_affinity_key(request.tenant_id, key) if key else "",
        )
    return [
        dataclasses.replace(
            each, request=msgspec.structs.replace(each.request, traceparent=trace.encoded)
        )
        for each in prepared
    ]
