"""Opens requests for any endpoint and any transport: the one way into the gateway's core.

read (a large body: in a preparation process) ──▶ decode ──▶ open ──▶ OpenResponse
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import msgspec

from services.gateway.models.model_names import ModelNames
from services.gateway.models.named_model import named_model
from services.gateway.models.served_text import ServedModel
from services.gateway.output.encoder import Encoder
from services.gateway.output.framing import SSE, Framing
from services.gateway.request.endpoint import (
    EndpointState,
    GeneratingEndpoint,
    ResponseContext,
)
from services.gateway.request.output_merger import OutputMerger
from services.gateway.request.prepared_bodies import with_prompts
from services.gateway.request.reservation import Reservation
from services.gateway.request.submission import Submission
from services.gateway.text.process_jobs import PreparedBody, TokenizedPrompt
from shared.errors import HearthError

# Larger bodies are decoded, rendered and tokenized in another process. A thread would not do: the
# decoder holds the interpreter's lock.
MAX_INLINE_BYTES = 256 * 1024
MAX_INLINE_VALUES = 2048  # some 600 messages: 2 to 5 ms of the event loop
FEW_VALUES_BYTES = 8 * 1024  # of a body whose values are not counted
MAX_KEY_CHARS = 256  # of an affinity key


def is_small(data: bytes, num_stored_bytes: int = 0) -> bool:
    if len(data) + num_stored_bytes > MAX_INLINE_BYTES:
        return False
    return len(data) <= FEW_VALUES_BYTES or num_values(data) <= MAX_INLINE_VALUES


def num_values(data: bytes) -> int:
    """About as many as the body has, and never much less, whatever spaces are between its parts:
    each costs about 1 µs to decode and convert, a text or a list of numbers of the same size a
    hundredth of that.
    """
    return data.count(b":") + data.count(b"{") + data.count(b"[") + data.count(b",") // 16


@dataclass(frozen=True, slots=True)
class ReadBody:
    """`data`: the body to decode. `prompts`: those of a large body, which `data` lacks."""

    data: bytes
    prompts: Sequence[TokenizedPrompt] | None = None


@dataclass(frozen=True, slots=True)
class OpenResponse:
    """A submitted request and what writes its response. `headers`: of the response, whether it
    succeeds or fails. `cancel`: ends the request; does nothing for an ended one.
    """

    merger: OutputMerger
    encoder: Encoder
    is_streamed: bool
    headers: dict[str, str]
    cancel: Callable[[HearthError | None], None]


class Opener:
    """`wall_clock`: seconds since 1970. `states`: of the endpoints that have one, by name."""

    def __init__(
        self,
        submission: Submission,
        names: ModelNames,
        default_model: str,
        wall_clock: Callable[[], float],
        states: Mapping[str, EndpointState] | None = None,
    ) -> None:
        self._submission = submission
        self._names = names
        self._default_model = default_model
        self._wall_clock = wall_clock
        self._states = {} if states is None else states

    async def read(
        self,
        reservation: Reservation,
        kind: str,
        data: bytes,
        hold: Callable[[int], None],
        model_of: Callable[[], str] | None = None,
    ) -> ReadBody:
        """`kind`: the name of an endpoint. `hold`: called with the bytes of stored state before it
        is read; what it raises is raised. `model_of`: reads the model where bodies name none.
        Raises the HearthError that rejects a large body, or what a body refers to.
        """

        async def prepared(job: str, read: Callable[[], Awaitable[bytes]] | None) -> PreparedBody:
            named = named_model(data, kind) if model_of is None else model_of()
            chosen = await self._chosen(reservation, named or self._default_model)
            return await self._submission.prepare_body(reservation.tenant, chosen, job, data, read)

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
            return ReadBody(data)
        body = await prepared(kind, read)
        return ReadBody(body.body, body.prompts or None)

    async def open(
        self,
        endpoint: GeneratingEndpoint,
        body: Any,
        reservation: Reservation,
        *,
        model: str | None = None,
        prompts: Sequence[TokenizedPrompt] | None = None,
        framing: Framing = SSE,
        affinity_key: str | None = None,
        session_key: str | None = None,
        timeout_s: float | None = None,
    ) -> OpenResponse:
        """`model`: of a body that names none (default: the gateway's). `affinity_key` overrides the
        body's, `session_key` is for a body without one; `timeout_s` shortens the gateway's.
        Raises the HearthError that rejects the request.
        """
        reservation.record.is_streamed = is_streamed = endpoint.is_streamed(body)
        default_model = self._default_model if model is None else model
        generations = endpoint.generations(body, default_model)
        named = generations[0].model
        chosen = await self._chosen(reservation, named)
        files = chosen.text.files
        generations = endpoint.for_model(body, generations, files)
        if prompts is not None:
            generations = with_prompts(generations, prompts)
        changes: dict[str, Any] = {} if timeout_s is None else {"timeout_s": timeout_s}
        if affinity_key or (session_key and not generations[0].affinity_key):
            changes["affinity_key"] = (affinity_key or session_key or "")[:MAX_KEY_CHARS]
        if changes:
            generations = [msgspec.structs.replace(each, **changes) for each in generations]
        merger = await self._submission.submit(reservation, generations, chosen)
        state = self._states.get(endpoint.name)
        context = ResponseContext(
            merger,
            files.tokens.token_bytes,
            request_id=reservation.request_id,
            model=named,
            created=int(self._wall_clock()),
            framing=framing,
            ranking=None if files.ranking is None else files.ranking.tokens,
            now=self._wall_clock,
            state=None if state is None else state.of_tenant(reservation.tenant),
        )
        return OpenResponse(
            merger,
            endpoint.encoder(body, context),
            is_streamed=is_streamed,
            headers={"x-request-id": reservation.request_id, **merger.headers},
            cancel=partial(self._submission.cancel, merger.outputs),
        )

    async def _chosen(self, reservation: Reservation, name: str) -> ServedModel:
        resolved = await self._names.resolve(reservation.tenant.tenant_id, name)
        return await self._submission.choose(reservation, resolved)
