"""Receipts as a dialect: over HTTP and over NATS."""

from __future__ import annotations

from services.gateway.dialects.dialect import Dialect, DialectParts, OpenDialect
from services.gateway.dialects.openai.errors import ErrorEnvelope, encode_error
from services.gateway.dialects.receipts.issued import ReceiptRequest, TenantReceipts
from services.gateway.dialects.receipts.routes import ReceiptRoutes
from services.gateway.request.endpoint import Endpoint
from shared.receipts.receipt import IssuedReceipt

RECEIPT = Endpoint(name="receipt", request=ReceiptRequest, response=IssuedReceipt, is_free=True)


def _open(parts: DialectParts) -> OpenDialect:
    store = parts.tenancy.stores.slow
    receipts = TenantReceipts(parts.receipts, parts.site_receipts, store, parts.clock)
    return OpenDialect(
        answers={RECEIPT.name: receipts.answer}, handlers=ReceiptRoutes(receipts).handlers
    )


DIALECT = Dialect(
    name="openai",
    title="Receipts",
    about="Signed statements of where, and with which weights, responses were computed.",
    endpoints=(RECEIPT,),
    encode_error=encode_error,
    error=ErrorEnvelope,
    open=_open,
)
