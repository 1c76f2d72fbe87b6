"""Errors of tenant permissions and limits, each with a separate code.

PermissionDenied          403  a retry does not help
├── UnknownTenant              the API key exists, its tenant does not
├── TenantCopyStale            the tenant's home is another site, which is silent
├── LimitIsZero
├── ModelNotAllowed
├── ZeroRetentionRejected
├── NoRegionAllowed
└── ForeignAccount             the path names another account than that of the key
ExceedsLimit              400  this request alone exceeds the limit
RateLimited               429  retry later
├── RequestsExhausted, InputTokensExhausted, OutputTokensExhausted
└── ConcurrencyExhausted
"""

from __future__ import annotations

from collections.abc import Mapping

from shared.errors import HearthError, InvalidRequest


class PermissionDenied(HearthError):
    code = "permission_denied"
    http_status = 403
    openai_type = "permission_error"


class UnknownTenant(PermissionDenied):
    code = "unknown_tenant"


class TenantCopyStale(PermissionDenied):
    code = "tenant_copy_stale"


class LimitIsZero(PermissionDenied):
    code = "limit_is_zero"


class ModelNotAllowed(PermissionDenied):
    code = "model_not_allowed"


class ZeroRetentionRejected(PermissionDenied):
    code = "zero_retention"


class NoRegionAllowed(PermissionDenied):
    code = "no_region_allowed"


class ForeignAccount(PermissionDenied):
    code = "foreign_account"


class ExceedsLimit(InvalidRequest):
    code = "exceeds_limit"


class RateLimited(HearthError):
    """A limit is reached. `headers` describe the state of the limits, under OpenAI's names."""

    code = "rate_limit_exceeded"
    http_status = 429
    openai_type = "rate_limit_error"

    def __init__(self, message: str, *, retry_after_s: float, headers: Mapping[str, str]) -> None:
        super().__init__(message, retry_after_s=retry_after_s)
        self.headers = headers


class RequestsExhausted(RateLimited):
    code = "requests_per_min_exceeded"


class InputTokensExhausted(RateLimited):
    code = "input_tokens_per_min_exceeded"


class OutputTokensExhausted(RateLimited):
    code = "output_tokens_per_min_exceeded"


class ConcurrencyExhausted(RateLimited):
    code = "concurrency_exceeded"


EXHAUSTED: dict[str, type[RateLimited]] = {
    "requests_per_min": RequestsExhausted,
    "input_tokens_per_min": InputTokensExhausted,
    "output_tokens_per_min": OutputTokensExhausted,
    "concurrency": ConcurrencyExhausted,
}
