"""The limit reservation of one response, which ends with the last of its outputs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence

from services.gateway.request.request_output import RequestOutput
from services.gateway.tenancy.request_cost import LimitLease
from shared.tenancy.tenant import UsageKind


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
    """open ──no more submissions, and every output has ended──▶ closed, `on_close` called once."""

    def __init__(
        self,
        lease: LimitLease,
        on_close: Callable[[Reservation, LimitLease, Sequence[RequestOutput]], None],
    ) -> None:
        self._lease = lease
        self._on_close = on_close
        self._num_open = 0
        self._is_closing = False
        self._is_closed = False
        self._outputs: list[RequestOutput] = []
        self._counted: Counter[UsageKind] = Counter()

    @property
    def headers(self) -> Mapping[str, str]:
        return self._lease.headers

    @property
    def tenant_id(self) -> str:
        return self._lease.tenant.tenant_id

    def opened(self, output: RequestOutput) -> None:
        self._num_open += 1
        self._outputs.append(output)

    def ended(self, output: RequestOutput) -> None:
        self._num_open -= 1
        self._close_if_due()

    def take_usage(self) -> dict[UsageKind, int]:
        """Returns the usage since the last call. Cached tokens come with the end of the response:
        their number changes if the request moves to another worker.
        """
        delivered = delivered_of(self._outputs)
        if not self._is_closed:
            delivered["cached_tokens"] = 0
        fresh = {kind: number - self._counted[kind] for kind, number in delivered.items()}
        self._counted.update(fresh)
        return fresh

    def close_submissions(self) -> None:
        """No more outputs will be opened."""
        self._is_closing = True
        self._close_if_due()

    def _close_if_due(self) -> None:
        if self._is_closing and not self._num_open and not self._is_closed:
            self._is_closed = True
            self._on_close(self, self._lease, self._outputs)
