"""The limit reservation of one response, which ends when its last byte has left."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence

from services.gateway.models.served_text import ServedModel
from services.gateway.observability.telemetry.request_record import RequestRecord
from services.gateway.receipts.draft import ReceiptDraft
from services.gateway.request.request_output import RequestOutput
from services.gateway.tenancy.request_cost import LimitLease
from shared.tenancy.tenant import TenantRecord, UsageKind


def delivered_of(outputs: Sequence[RequestOutput]) -> dict[UsageKind, int]:
    """Returns the usage of a response; outputs that failed before their first token count zero."""
    delivered = [each for each in outputs if each.has_delivered]
    return {
        "requests": 1 if delivered else 0,
        "input_tokens": sum(each.num_prompt_tokens for each in delivered),
        "cached_tokens": sum(each.num_cached_tokens or 0 for each in delivered),
        "output_tokens": sum(each.num_output_tokens for each in delivered),
    }


class Reservation:
    """Made before the body is read, so that rejected requests are charged, too.

    open ──no more submissions, and every output has ended──▶ ended, `on_end` called once
         ──response closed─▶ closed, `on_close` called once

    A response that never began is closed with its last output.
    """

    def __init__(
        self,
        record: RequestRecord,
        lease: LimitLease,
        on_end: Callable[[Reservation], None],
        on_close: Callable[[Reservation], None],
    ) -> None:
        self.record = record
        self.request_id = record.request_id
        self.model: ServedModel | None = None  # of all prompts of the response, once it is chosen
        self.receipt: ReceiptDraft | None = None  # set before the requests are sent, if wanted
        self.lease = lease  # replaced when the tokens are charged
        self.num_prompts = 0  # the prompts that the gateway holds until the response has closed
        self._on_end = on_end
        self._on_close = on_close
        self._num_open = 0
        self._is_submitting = True
        self._is_responding = False
        self._is_ended = False
        self._is_closed = False
        self._outputs: list[RequestOutput] = []
        self._counted: Counter[UsageKind] = Counter()

    @property
    def tenant(self) -> TenantRecord:
        return self.lease.tenant

    @property
    def outputs(self) -> Sequence[RequestOutput]:
        return self._outputs

    @property
    def model_name(self) -> str:
        """Empty until the model is chosen."""
        return "" if self.model is None else self.model.card.name

    @property
    def headers(self) -> Mapping[str, str]:
        """The state of the tenant's limits as response headers."""
        return self.lease.headers

    def opened(self, output: RequestOutput) -> None:
        self._num_open += 1
        self._outputs.append(output)

    def ended(self, output: RequestOutput) -> None:
        self._num_open -= 1
        self._advance()

    def take_usage(self) -> dict[UsageKind, int]:
        """Returns the usage since the last call. Cached tokens come with the end of the outputs:
        their number changes if the request moves to another worker.
        """
        delivered = delivered_of(self._outputs)
        if not self._is_ended:
            delivered["cached_tokens"] = 0
        fresh = {kind: number - self._counted[kind] for kind, number in delivered.items()}
        self._counted.update(fresh)
        return fresh

    def close_submissions(self, *, has_response: bool = False) -> None:
        """Ends the opening of outputs. With `has_response`, `close` follows, or this without it.
        Idempotent.
        """
        self._is_submitting = False
        self._is_responding = has_response
        self._advance()

    def close(self) -> None:
        """Closes the response: its last byte has left, or its client has. Its outputs may still be
        ending.
        """
        self._is_responding = False
        self._advance()

    def _advance(self) -> None:
        if self._is_submitting or self._num_open:
            return
        if not self._is_ended:
            self._is_ended = True
            self._on_end(self)
        if not self._is_responding and not self._is_closed:
            self._is_closed = True
            self._on_close(self)
