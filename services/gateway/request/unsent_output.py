"""Counts the output that clients have not taken, by response and tenant, and bounds both. No I/O.

    open ──bound exceeded──▶ exceeded ──close──▶ closed
      └──close──────────────────────────────────▶ closed

A streamed response is bounded by itself. All responses of a tenant are bounded together: beyond
that, its largest response ends.
"""

from __future__ import annotations

from collections.abc import Callable

MAX_RESPONSE_BYTES = 8 * 1024 * 1024
MAX_TENANT_BYTES = 128 * 1024 * 1024


class _TenantOutput:
    def __init__(self) -> None:
        self.num_bytes = 0
        self.responses: set[UnsentResponse] = set()


class UnsentOutput:
    """Counts the responses of one gateway. The limits are bytes of text and packed logprobs."""

    def __init__(
        self,
        max_response_bytes: int = MAX_RESPONSE_BYTES,
        max_tenant_bytes: int = MAX_TENANT_BYTES,
    ) -> None:
        self.max_response_bytes = max_response_bytes
        self.max_tenant_bytes = max_tenant_bytes
        self._tenants: dict[str, _TenantOutput] = {}

    def num_bytes(self, tenant_id: str) -> int:
        tenant = self._tenants.get(tenant_id)
        return 0 if tenant is None else tenant.num_bytes

    def open(self, tenant_id: str) -> UnsentResponse:
        tenant = self._tenants.setdefault(tenant_id, _TenantOutput())
        response = UnsentResponse(self, tenant_id)
        tenant.responses.add(response)
        return response

    def count(self, response: UnsentResponse, num_bytes: int) -> None:
        """Adds bytes to a response. Raises KeyError for a response that is not open."""
        tenant = self._tenants[response.tenant_id]
        tenant.num_bytes += num_bytes
        if response.is_streamed and response.num_bytes > self.max_response_bytes:
            response.exceed()
        elif tenant.num_bytes > self.max_tenant_bytes:
            max(tenant.responses, key=lambda each: each.num_bytes).exceed()

    def forget(self, response: UnsentResponse) -> None:
        """Removes a response. Idempotent."""
        tenant = self._tenants.get(response.tenant_id)
        if tenant is None or response not in tenant.responses:
            return
        tenant.responses.remove(response)
        tenant.num_bytes -= response.num_bytes
        if not tenant.responses:
            del self._tenants[response.tenant_id]


class UnsentResponse:
    def __init__(self, unsent: UnsentOutput, tenant_id: str) -> None:
        self.tenant_id = tenant_id
        self.num_bytes = 0
        self.is_streamed = False
        self._unsent = unsent
        self._is_open = True
        self._is_exceeded = False
        self._on_exceeded: Callable[[], None] | None = None

    def watch(self, on_exceeded: Callable[[], None], *, is_streamed: bool) -> None:
        """Calls `on_exceeded` once when a bound is exceeded, at once if it already was."""
        self.is_streamed = is_streamed
        self._on_exceeded = on_exceeded
        if self._is_exceeded:
            on_exceeded()

    def add(self, num_bytes: int) -> None:
        """Counts bytes; a negative number after the client took some. Does nothing once a bound was
        exceeded.
        """
        if self._is_open:
            self.num_bytes += num_bytes
            self._unsent.count(self, num_bytes)

    def exceed(self) -> None:
        """Stops counting this response: its owner is about to end it."""
        self._is_exceeded = True
        on_exceeded = self._on_exceeded
        self.close()
        if on_exceeded is not None:
            on_exceeded()

    def close(self) -> None:
        """Removes the response from the counts. Idempotent."""
        self._is_open = False
        self._on_exceeded = None  # it refers to the response
        self._unsent.forget(self)
