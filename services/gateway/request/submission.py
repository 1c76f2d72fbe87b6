"""Submits a tenant's requests, of any endpoint and over any transport.

    reserve ──▶ read ──▶ decode ──▶ open: prepare ──▶ charge ──▶ send ──every output ended──▶ settle
                 └──large──▶ decode, render and tokenize in a preparation process

The `Reservation` is made before any work and settled after it, also if the request is rejected on
the way. `open` returns what writes the response: an encoder of the endpoint's dialect, and an
`OutputMerger` with the events to encode.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import msgspec

from services.gateway.models.gateway_models import GatewayModels
from services.gateway.models.served_text import ServedModel
from services.gateway.observability.metrics.gateway_metrics import GatewayMetrics
from services.gateway.observability.telemetry.request_record import RequestRecord
from services.gateway.observability.telemetry.span_attributes import span_attributes
from services.gateway.observability.telemetry.telemetry import RequestTelemetry
from services.gateway.output.encoder import Encoder
from services.gateway.output.framing import SSE, Framing
from services.gateway.receipts.options import NO_OPTIONS, NUM_SEEDS, RECEIPT_URL, ReceiptOptions
from services.gateway.receipts.receipts import Receipts
from services.gateway.request.endpoint import EndpointState, GeneratingEndpoint, ResponseContext
from services.gateway.request.generation_request import GenerationRequest, scoped_affinity_key
from services.gateway.request.images.open_pixels import OpenPixels
from services.gateway.request.output_merger import OutputMerger
from services.gateway.request.prepared_bodies import is_small, with_prompts
from services.gateway.request.preparer import Preparer
from services.gateway.request.request_builder import PreparedRequest, assembler_of, check_logprobs
from services.gateway.request.request_output import ClientDisconnected, RequestOutput
from services.gateway.request.reservation import Reservation
from services.gateway.request.unsent_output import UnsentOutput
from services.gateway.streams.queued_openings import Opening
from services.gateway.streams.stream_driver import StreamDriver
from services.gateway.tenancy.permissions import check_regions
from services.gateway.tenancy.request_cost import RequestCost
from services.gateway.tenancy.tenancy import Tenancy
from services.gateway.text.process_jobs import PreparedBody, TokenizedPrompt
from shared.background import failing_alone
from shared.clock import Clock
from shared.config import GatewayConfig
from shared.errors import HearthError, Overloaded
from shared.messages import Request
from shared.pixels.pixel_holder import PixelHolder
from shared.randomness import Randomness
from shared.tenancy.tenant import TenantRecord

MAX_PROMPTS = 16_384  # prompts of a tenant's responses: each takes up to 4 KB until they close
MAX_KEY_CHARS = 256  # characters of an affinity key


@dataclass(frozen=True, slots=True)
class OpenResponse:
    """A submitted request and its encoder. `headers`: those of the response, whether it succeeds or
    fails. `cancel`: ends the request; does nothing for an ended one. `receipt_hash`: returns the
    hash of the receipt once all outputs have ended; empty without one. `shows_receipt`: whether a
    stream has it as a comment.
    """

    merger: OutputMerger
    encoder: Encoder
    is_streamed: bool
    headers: dict[str, str]
    cancel: Callable[[HearthError | None], None]
    receipt_hash: Callable[[], str] = lambda: ""
    shows_receipt: bool = False


class Submission:
    """`wall_clock`: seconds since 1970. `states`: the states of endpoints, by their names."""

    def __init__(
        self,
        config: GatewayConfig,
        preparer: Preparer,
        tenancy: Tenancy,
        models: GatewayModels,
        driver: StreamDriver,
        *,
        metrics: GatewayMetrics,
        telemetry: RequestTelemetry,
        pixels: PixelHolder,
        states: Mapping[str, EndpointState],
        receipts: Receipts,
        clock: Clock,
        wall_clock: Callable[[], float],
        randomness: Randomness,
    ) -> None:
        self._receipts = receipts
        self._randomness = randomness
        self._capacity = preparer.capacity
        self._preparer = preparer
        self._limits = tenancy.limits
        self._usage = tenancy.usage
        self._models = models.served
        self._names = models.names
        self._driver = driver
        self._metrics = metrics
        self._clock = clock
        self._wall_clock = wall_clock
        self._pixels = OpenPixels(pixels)
        self._unsent = UnsentOutput(config.max_unsent_bytes, config.max_tenant_unsent_bytes)
        self._telemetry = telemetry
        self.begin = telemetry.begin  # call when a request arrives
        self._states = states
        self._num_prompts: Counter[str] = Counter()  # by tenant
        self._reservations: set[Reservation] = set()

    async def reserve(self, tenant: TenantRecord, record: RequestRecord) -> Reservation:
        """Charges one request and takes its place under `concurrency`, before its body is read.

        The caller closes the reservation. Raises LimitIsZero or RateLimited.
        """
        self._telemetry.assign(record, tenant)
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

    async def read(
        self,
        reservation: Reservation,
        kind: str,
        data: bytes,
        hold: Callable[[int], None],
        model_of: Callable[[], str] | None = None,
    ) -> PreparedBody:
        """Returns the body to decode, and the prompts that a large one then lacks.

        `kind`: the name of an endpoint. `hold`: called with the bytes of stored state before it
        is read; what it raises is raised. `model_of`: reads the model where bodies name none.
        Raises the HearthError that rejects a large body, or what a body refers to.
        """

        async def prepared(job: str, read: Callable[[], Awaitable[bytes]] | None) -> PreparedBody:
            tenant = reservation.tenant
            named = None
            if model_of is None:
                named = await self._preparer.named_model(tenant.tenant_id, kind, data)
            model = named or (self._models.default_name if model_of is None else model_of())
            chosen = await self.choose(reservation, model)
            return await self._preparer.prepare_body(tenant, chosen, job, data, read, named=named)

        async def scan(job: str) -> bytes | None:
            return None if is_small(data) else (await prepared(job, None)).body

        state, referred = self._states.get(kind), None
        if state is not None and state.referred is not None:
            referred = await state.referred(reservation.tenant, data, scan)
        read = None if referred is None else partial(referred.read, hold)
        if referred is not None and read is not None and is_small(data, referred.num_bytes):
            given, data = data, referred.merge(data, await read())
            hold(max(0, len(data) - len(given) - referred.num_bytes))  # an item put in twice
            read = None
        if read is None and is_small(data):
            return PreparedBody(data, [])
        return await prepared(kind, read)

    async def open(
        self,
        endpoint: GeneratingEndpoint,
        body: Any,
        reservation: Reservation,
        *,
        model: str | None = None,
        prompts: Sequence[TokenizedPrompt] = (),
        framing: Framing = SSE,
        affinity_key: str | None = None,
        session_key: str | None = None,
        timeout_s: float | None = None,
        receipt: ReceiptOptions = NO_OPTIONS,
    ) -> OpenResponse:
        """Submits the request of a body. `model`: for a body that names none (default: the
        gateway's). `affinity_key` overrides the body's, `session_key` is for a body without one;
        `timeout_s` shortens the gateway's. Raises the HearthError that rejects the request.
        """
        record = reservation.record
        record.is_streamed = is_streamed = endpoint.is_streamed(body)
        if endpoint.response_id is not None:
            record.response_id = endpoint.response_id(record.request_id)
        default_model = self._models.default_name if model is None else model
        generations = endpoint.generations(body, default_model)
        named = generations[0].model
        chosen = await self.choose(reservation, named)
        files = chosen.text.files
        generations = endpoint.for_model(body, generations, files)
        if prompts:
            generations = with_prompts(generations, prompts)
        generations = _with_options(
            generations,
            warnings=endpoint.fields.warnings(body),
            affinity_key=affinity_key,
            session_key=session_key,
            timeout_s=timeout_s,
        )
        if len(generations) > 1 or receipt.replayed is not None:
            generations = self._seeded(generations, receipt)
        reservation.receipt = self._receipts.draft(reservation.tenant, endpoint.name, receipt)
        merger = await self.submit(reservation, generations, chosen)
        state = self._states.get(endpoint.name)
        context = ResponseContext(
            merger,
            files.tokens.token_bytes,
            request_id=reservation.request_id,
            model=named,
            created=int(self._wall_clock()),
            framing=framing,
            ranking=None if files.ranking is None else files.ranking.tokens,
            pooling=generations[0].pooling,
            now=self._wall_clock,
            state=None if state is None else state.of_tenant(reservation.tenant),
        )
        return OpenResponse(
            merger,
            endpoint.encoder(body, context),
            is_streamed=is_streamed,
            headers={
                "x-request-id": reservation.request_id,
                **merger.headers,
                **_receipt_headers(reservation, is_streamed=is_streamed),
            },
            cancel=partial(self._cancel, merger.outputs),
            receipt_hash=partial(_receipt_hash, reservation),
            shows_receipt=bool(receipt.is_wanted),
        )

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
        tenant = reservation.tenant
        prepared: list[PreparedRequest] = []
        for index, generation in enumerate(generations):
            if index:
                await asyncio.sleep(0)
            request_id = reservation.request_id
            own_id = f"{request_id}-{index}" if index else request_id
            prepared.append(
                await self._preparer.prepare(tenant, own_id, generation, model, reservation.record)
            )
        reservation.record.begin("submit", self._clock.now())
        prepared = _traced(reservation.record, prepared)
        check_logprobs(prepared)
        await self._charge(reservation, prepared)
        self._pixels.hold(prepared)
        outputs: dict[RequestOutput, PreparedRequest] = {}
        for each in prepared:
            if outputs:
                await asyncio.sleep(0)
            outputs[self._output_of(each, reservation, len(outputs))] = each
        try:
            self._send(outputs, reservation)
        except BaseException:
            for each in prepared:
                self._pixels.forget(each.request.request_id)
            raise
        reservation.close_submissions(has_response=True)
        return OutputMerger(
            tuple(outputs),
            num_choices=generations[0].num_choices,
            headers=reservation.headers,
            unsent=self._unsent.open(reservation.tenant.tenant_id),
            on_close=reservation.close,
            on_send=reservation.record.record_send,
        )

    def _seeded(
        self, generations: Sequence[GenerationRequest], receipt: ReceiptOptions
    ) -> list[GenerationRequest]:
        """Returns the requests with consecutive seeds, unless the body has one: a replay needs the
        first alone.
        """
        if receipt.replayed is None:
            first = int.from_bytes(self._randomness.bytes(8), "little")
        else:
            first = receipt.replayed.seed
        return [_with_seed(each, first + index) for index, each in enumerate(generations)]

    def _hold_prompts(self, reservation: Reservation, num_prompts: int) -> None:
        """Counts the prompts until the response has closed. Raises Overloaded."""
        tenant_id = reservation.tenant.tenant_id
        if self._num_prompts[tenant_id] + num_prompts > MAX_PROMPTS:
            raise Overloaded("this tenant has too many prompts under way", retry_after_s=1.0)
        reservation.num_prompts = num_prompts
        self._num_prompts[tenant_id] += num_prompts

    async def choose(self, reservation: Reservation, name: str) -> ServedModel:
        """Returns the model of all prompts of the response. `name` may be an alias. Raises
        UnknownModel, ModelNotAllowed, NoRegionAllowed, DependencyUnavailable if the name cannot be
        checked, and NoCapacity if the model cannot be served now.
        """
        if reservation.model is None:
            self._capacity.check()
            resolved = await self._names.resolve(reservation.tenant.tenant_id, name)
            self._models.check(reservation.tenant, resolved)
            check_regions(reservation.tenant)
            with self._capacity.preparing():  # it may wait for files that are read
                reservation.model = await self._models.choose(resolved)
        return reservation.model

    async def _charge(self, reservation: Reservation, prepared: Sequence[PreparedRequest]) -> None:
        """Charges the tokens of all prompts of one response. Raises the error that rejects it."""
        request_cost = RequestCost(
            num_input_tokens=sum(len(each.prompt_token_ids) for each in prepared),
            num_output_tokens=sum(each.max_output_tokens for each in prepared),
            input_param=prepared[0].generation.prompt.param,
        )
        self._capacity.check()
        with self._capacity.preparing(len(prepared)):
            reservation.lease = await self._limits.charge(reservation.lease, request_cost)

    async def charge_input(self, reservation: Reservation, num_tokens: int) -> None:
        """Charges tokens that are computed without an output. Raises ExceedsLimit, RateLimited."""
        reservation.lease = await self._limits.charge(reservation.lease, RequestCost(num_tokens, 0))

    def _output_of(
        self, prepared: PreparedRequest, reservation: Reservation, index: int
    ) -> RequestOutput:
        on_end: Callable[[RequestOutput], None] = reservation.ended
        if reservation.receipt is not None:
            stop = prepared.generation.sampling.stop_strings
            on_end = partial(_prompt_ended, reservation, index, prepared.request, stop)
        return RequestOutput(
            prepared,
            [assembler_of(prepared, each.choice_index) for each in prepared.request.choices],
            self._metrics,
            self._clock,
            dialect=reservation.record.dialect,
            on_end=partial(self._end, on_end),
        )

    def _end(self, on_end: Callable[[RequestOutput], None], output: RequestOutput) -> None:
        self._pixels.forget(output.request_id)
        on_end(output)

    def _send(
        self, outputs: Mapping[RequestOutput, PreparedRequest], reservation: Reservation
    ) -> None:
        """Sends the requests of one response to schedulers, some at once, the others as those end.
        Raises the HearthError that rejects them.
        """
        self._capacity.check()
        openings = [_opening(prepared, output) for output, prepared in outputs.items()]
        self._driver.open(openings)
        for output in outputs:  # last: it waits for the end of what was opened
            reservation.opened(output)

    def _cancel(self, outputs: Sequence[RequestOutput], error: HearthError | None = None) -> None:
        error = error or ClientDisconnected("the client closed the connection")
        for output in outputs:
            self._driver.close(output.request_id, "client_gone", error)

    def count_usage(self) -> None:
        """Counts what running responses have delivered since the last count."""
        for reservation in self._reservations:
            self._count_usage(reservation)

    def _count_last_usage(self, reservation: Reservation) -> None:
        """Counts usage after every prompt of a response has ended."""
        self._reservations.discard(reservation)
        self._count_usage(reservation)
        self._telemetry.ended(reservation.record, reservation.model_name, reservation.outputs)
        if reservation.receipt is not None and reservation.model is not None:
            weights = self._models.weights_of(reservation.model.card)
            record = reservation.record
            with failing_alone("receipt_lost", request=record.request_id):
                self._receipts.store(
                    reservation.receipt, record.request_id, weights, record.arrived_at
                )

    def _count_usage(self, reservation: Reservation) -> None:
        if reservation.model is not None:  # else nothing was generated
            model = reservation.model.card.name
            self._usage.count(reservation.tenant, model, reservation.take_usage())

    def _settle(self, reservation: Reservation) -> None:
        """Settles limits after the last byte of a response has left."""
        outputs, tenant_id = reservation.outputs, reservation.tenant.tenant_id
        self._num_prompts[tenant_id] -= reservation.num_prompts
        if not self._num_prompts[tenant_id]:
            del self._num_prompts[tenant_id]
        self._limits.settle(reservation.lease, sum(each.num_output_tokens for each in outputs))
        self._telemetry.closed(reservation.record, reservation.model_name, outputs)


def _prompt_ended(
    reservation: Reservation,
    index: int,
    request: Request,
    stop: tuple[str, ...],
    output: RequestOutput,
) -> None:
    with failing_alone("receipt_lost", request=request.request_id):
        if reservation.receipt is not None:
            reservation.receipt.prompt_ended(index, request, stop, output)
    reservation.ended(output)


def _receipt_headers(reservation: Reservation, *, is_streamed: bool) -> dict[str, str]:
    """Returns the headers of a stream, whose receipt is not known yet."""
    if reservation.receipt is None or not is_streamed:
        return {}
    return {RECEIPT_URL: f"/v1/requests/{reservation.request_id}/receipt"}


def _receipt_hash(reservation: Reservation) -> str:
    return "" if reservation.receipt is None else reservation.receipt.hash


def _with_options(
    generations: Sequence[GenerationRequest],
    *,
    warnings: tuple[str, ...],
    affinity_key: str | None,
    session_key: str | None,
    timeout_s: float | None,
) -> Sequence[GenerationRequest]:
    """Returns the requests with what their body does not say."""
    changes: dict[str, Any] = {"warnings": warnings}
    if timeout_s is not None:
        changes["timeout_s"] = timeout_s
    if affinity_key or (session_key and not generations[0].affinity_key):
        changes["affinity_key"] = (affinity_key or session_key or "")[:MAX_KEY_CHARS]
    return [msgspec.structs.replace(each, **changes) for each in generations]


def _with_seed(generation: GenerationRequest, seed: int) -> GenerationRequest:
    """Returns the request with a seed in place of a random one."""
    if generation.sampling.seed is not None:
        return generation
    sampling = msgspec.structs.replace(generation.sampling, seed=seed % NUM_SEEDS)
    return msgspec.structs.replace(generation, sampling=sampling)


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
