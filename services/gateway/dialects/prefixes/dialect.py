"""`/v1/prefixes` as a dialect: `routes.py` has its paths."""

from __future__ import annotations

from services.gateway.dialects.dialect import Dialect
from services.gateway.dialects.openai.errors import ErrorEnvelope, encode_error
from services.gateway.dialects.prefixes.large_bodies import DRY_RUN, PREFIX, check_prefix_body

DIALECT = Dialect(
    name="openai",
    endpoints=(),
    encode_error=encode_error,
    error=ErrorEnvelope,
    jobs=dict.fromkeys((PREFIX, DRY_RUN), check_prefix_body),
)
