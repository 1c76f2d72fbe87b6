"""Collects what the receipt of one response says, as its prompts end. No I/O."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, Protocol

from services.gateway.receipts.places import Places
from services.gateway.streams.receiver import StreamEnd
from services.gateway.streams.try_record import TryRecord
from shared.messages import Request, Served
from shared.packing import TOKEN_ID_BYTES, pack_token_ids
from shared.receipts.receipt import (
    AnswerReceipt,
    DecodeTry,
    KvHop,
    OutputHash,
    PlacedProcess,
    PromptReceipt,
    ServedWeights,
)
from shared.receipts.salted import ReceiptSalt
from shared.tenancy.tenant import TenantRecord


class ChoiceEnd(NamedTuple):
    """The tokens of a choice up to the end of a stop string, and its finish reason, or "" if the
    request failed before.
    """

    num_tokens: int
    reason: str


class EndedPrompt(Protocol):
    """The output of one prompt, after its end."""

    end: StreamEnd | None
    embedding: bytes | None

    @property
    def choice_ends(self) -> Sequence[ChoiceEnd]: ...

    @property
    def outcome(self) -> str:
        """The finish reason or an error code."""
        ...


class ReceiptDraft:
    """`endpoint` is the name of the request's endpoint."""

    def __init__(
        self, tenant: TenantRecord, endpoint: str, salt: ReceiptSalt, places: Places
    ) -> None:
        self.tenant = tenant
        self.salt = salt
        self.hash = ""  # of the receipt, once it is stored
        self._endpoint = endpoint
        self._places = places
        self._prompts: dict[int, PromptReceipt] = {}
        self._first_token_at: float | None = None

    def prompt_ended(
        self, index: int, request: Request, stop: tuple[str, ...], output: EndedPrompt
    ) -> None:
        """Adds the prompt `index`, which no worker has seen if it has no try."""
        tries = () if output.end is None else output.end.tries
        placed = [each for each in tries if each.placed is not None]
        if not placed:
            return
        self._record_first_token(placed)
        self._prompts[index] = PromptReceipt(
            num_prompt_tokens=len(request.prompt_token_ids) // TOKEN_ID_BYTES,
            num_images=len(request.images),
            prompt=self.salt.prompt(index, request.prompt_token_ids, request.images),
            sampling=self.salt.sampling(index, request.sampling, stop),
            choices=tuple(self._choices(index, output)),
            tries=tuple(_decode_try(each, self._places) for each in placed),
        )

    def receipt(
        self,
        request_id: str,
        model: ServedWeights,
        *,
        release: str,
        received_at: float,
        finished_at: float,
        unix_time: Callable[[float], float],
    ) -> AnswerReceipt | None:
        """Returns the receipt, or None if no worker has seen any prompt. `unix_time` converts the
        gateway's monotonic times.
        """
        if not self._prompts:
            return None
        first, tenant = self._first_token_at, self.tenant
        return AnswerReceipt(
            request_id=request_id,
            tenant=tenant.tenant_id,
            gateway=self._places.own,
            release=release,
            endpoint=self._endpoint,
            model=model,
            retention="zero" if tenant.is_zero_retention else "standard",
            region_class=tenant.region_class,
            allowed_regions=tenant.allowed_regions,
            received_at=unix_time(received_at),
            first_token_at=None if first is None else unix_time(first),
            finished_at=unix_time(finished_at),
            salt=self.salt.commitment,
            prompts=tuple(self._prompts[index] for index in sorted(self._prompts)),
        )

    def _record_first_token(self, tries: Sequence[TryRecord]) -> None:
        firsts = [each.first_token_at for each in tries if each.first_token_at is not None]
        if firsts:
            known = self._first_token_at
            self._first_token_at = firsts[0] if known is None else min(known, firsts[0])

    def _choices(self, index: int, output: EndedPrompt) -> Iterator[OutputHash]:
        assert output.end is not None
        ends = output.choice_ends
        for choice, (end, token_ids) in enumerate(zip(ends, output.end.outputs, strict=True)):
            data = output.embedding
            if data is None:
                data = pack_token_ids(token_ids[: end.num_tokens])
            yield OutputHash(
                num_tokens=end.num_tokens,
                tokens=self.salt.output(index, choice, data),
                outcome=end.reason or output.outcome,
            )


def _decode_try(each: TryRecord, places: Places) -> DecodeTry:
    assert each.placed is not None
    decode, served = places.of(each.placed.worker_id), each.served
    if served is None:
        return DecodeTry(decode=decode, num_tokens=each.num_tokens, outcome=each.outcome)
    prefill_id = served.prefill_worker_id
    prefill = None if prefill_id is None else places.of(prefill_id, decode.site)
    return DecodeTry(
        decode=decode,
        prefill=prefill,
        kv_hops=tuple(_kv_hops(served, prefill, decode.site, places)),
        numerics="" if served.numerics is None else str(served.numerics),
        num_tokens=each.num_tokens,
        num_cached_tokens=served.num_cached_tokens,
        outcome=each.outcome,
    )


def _kv_hops(
    served: Served, prefill: PlacedProcess | None, site: str, places: Places
) -> Iterator[KvHop]:
    num_partial = 0
    for push in served.partial_pushes:
        num_partial += push.num_tokens
        yield KvHop(source=places.of(push.worker_id, site), num_tokens=push.num_tokens)
    if prefill is not None:
        yield KvHop(source=prefill, num_tokens=max(0, served.num_pushed_tokens - num_partial))
