"""Receipts between the gateways of one site: each holds those of the requests that it served.

gateway ──ReadReceipt──▶ every other gateway of its site
        ◀──ReceiptRead── signed by the one that holds it
"""

from __future__ import annotations

from shared.messages import Message, Name, ProcessId
from shared.receipts.receipt import IssuedReceipt


class ReadReceipt(Message, frozen=True, kw_only=True):
    """`request_id` is the id of a request, or of its response. The receiver checks the tenant by
    its own record.
    """

    gateway_id: ProcessId
    tenant_id: Name
    request_id: Name

    @property
    def sender_id(self) -> str:
        return self.gateway_id


class ReceiptRead(Message, frozen=True, kw_only=True):
    """`receipt` is None for a request that is unknown here, forgotten, or of another tenant."""

    receipt: IssuedReceipt | None = None
