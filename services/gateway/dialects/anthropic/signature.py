"""Signs thinking, since some clients require a signature: an HMAC of the text with a key of the
tenant, in base64. No server checks it: see `blocks.ThinkingBlock`.
"""

from __future__ import annotations

import base64
import hmac
from collections.abc import Callable
from hashlib import blake2b

from services.gateway.request.endpoint import EndpointState


def signing_state(cluster_key: Callable[[], bytes]) -> EndpointState:
    """Returns a state with the key of each tenant, derived from the cluster's key of now."""
    return EndpointState(
        lambda tenant: blake2b(
            tenant.tenant_id.encode(), key=cluster_key(), person=b"signing"
        ).digest()
    )


class Signature:
    """Signs texts that arrive in parts."""

    def __init__(self, key: bytes) -> None:
        self._key = key
        self._hmac: hmac.HMAC | None = None  # most responses have no thinking

    def add(self, text: str) -> None:
        if self._hmac is None:
            self._hmac = hmac.new(self._key, digestmod="sha256")
        self._hmac.update(text.encode())

    def take(self) -> str:
        """Returns the signature of the texts since the last call."""
        signed, self._hmac = self._hmac, None
        if signed is None:
            signed = hmac.new(self._key, digestmod="sha256")
        return base64.b64encode(signed.digest()).decode()
