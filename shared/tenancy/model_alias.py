"""Aliases of models: `hearth model` writes them, gateways read them.

    hearth:model:aliases           hash: alias → its ModelAlias as JSON, for all tenants
    hearth:model:aliases:{tenant}  hash: the same for one tenant, whose own aliases take precedence

An alias stands for a model, never for another alias: its model is not looked up again. A gateway's
own model takes precedence over an alias of the same name.
"""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from shared.errors import ConfigError

ALIASES = "hearth:model:aliases"
MAX_ALIASES = 256  # aliases of one hash
MAX_ID_CHARS = 256
EXAMPLES = "'@cf/meta/llama-4-scout-17b-16e-instruct' or 'hearth-demo'"


class ModelAlias(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """An alias of a model. `created_at` is in unix seconds."""

    model: Annotated[str, Meta(min_length=1, max_length=MAX_ID_CHARS)]
    created_at: Annotated[float, Meta(ge=0)] = 0.0


def aliases_of(tenant_id: str | None) -> str:
    """Returns the key of one tenant's aliases; None: of the aliases for all tenants."""
    return ALIASES if tenant_id is None else f"{ALIASES}:{tenant_id}"


def is_model_id(text: str) -> bool:
    return _problem_of(text) is None


def check_model_id(text: str, what: str) -> str:
    """Returns a valid id unchanged. `what` is the word for it in the ConfigError that it raises."""
    problem = _problem_of(text)
    if problem is not None:
        raise ConfigError(f"invalid {what} {text[:64]!r}: {problem}; valid is {EXAMPLES}")
    return text


def _problem_of(text: str) -> str | None:
    """Returns the problem of an id, if any. An id is also part of a URL's path, which must not be
    normalised to another one.
    """
    if not 0 < len(text) <= MAX_ID_CHARS:
        return f"{len(text)} characters are not from 1 to {MAX_ID_CHARS}"
    if not text.isprintable() or " " in text:
        return "it has a space or a character that cannot be printed"
    if any(part in ("", ".", "..") for part in text.split("/")):
        return "it has '.', '..' or nothing between two '/' or at an end"
    return None
