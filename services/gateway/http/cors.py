"""Decides which pages of other origins may call the gateway. Keys are sent in a header and never as
cookies, so no response allows credentials.
"""

from __future__ import annotations

from collections.abc import Sequence

from litestar.config.cors import CORSConfig

# A script may read these headers besides the body.
EXPOSED = (
    "retry-after",
    "request-id",
    "x-hearth-receipt",
    "x-hearth-receipt-url",
    "x-request-id",
    *(
        f"x-ratelimit-{state}-{kind}"
        for state in ("limit", "remaining", "reset")
        for kind in ("requests", "tokens", "input-tokens", "output-tokens")
    ),
)


def cors_config(origins: Sequence[str]) -> CORSConfig | None:
    """Returns the configuration for the origins; `*` allows every origin. Returns None, which
    allows no other origin, if there are none.
    """
    if not origins:
        return None
    return CORSConfig(
        allow_origins=list(origins),
        allow_methods=["GET", "POST", "PUT", "DELETE", "HEAD", "OPTIONS"],
        allow_headers=["*"],
        allow_credentials=False,
        expose_headers=list(EXPOSED),
    )
