"""Writes a client's schema for the grammars of outputs and of tools' arguments in JSON."""

from __future__ import annotations

from typing import Any

from services.gateway.schemas.disjoint import without_disjoint_one_of
from services.gateway.schemas.endless import without_endless
from services.gateway.schemas.enforceable import enforceable


def written_schema(schema: Any, *, is_strict: bool) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Returns the schema without endless and unenforceable parts, and warnings about the latter.
    Raises InvalidRequest if a strict schema has an unenforceable part.
    """
    finite = {} if schema is True else without_endless(schema)
    if is_strict:
        finite = without_disjoint_one_of(finite)
    return enforceable(finite, is_strict=is_strict)
