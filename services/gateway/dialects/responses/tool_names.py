"""Names the tools of a namespace as the model sees them."""

from __future__ import annotations

from hashlib import blake2b

MAX_NAME_CHARS = 128
SEPARATOR = "__"
DIGEST_BYTES = 4


def flat_name(namespace: str | None, name: str) -> str:
    """Returns `namespace__name`, or if that is too long for a tool, its start and its digest."""
    if not namespace:
        return name
    flat = f"{namespace}{SEPARATOR}{name}"
    if len(flat) <= MAX_NAME_CHARS:
        return flat
    digest = blake2b(flat.encode(), digest_size=DIGEST_BYTES).hexdigest()
    return f"{flat[: MAX_NAME_CHARS - len(digest) - 1]}_{digest}"
