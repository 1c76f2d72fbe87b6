"""The dialect of a path, which decides the form of its errors, and its name in metrics."""

from __future__ import annotations

from typing import Literal

from services.gateway.workers_ai.paths import has_own_envelope

Dialect = Literal["anthropic", "openai", "workers_ai"]
MESSAGES_PATH = "/v1/messages"


def dialect_of(path: str) -> Dialect:
    if path == MESSAGES_PATH or path.startswith(f"{MESSAGES_PATH}/"):
        return "anthropic"
    return "workers_ai" if has_own_envelope(path) else "openai"
