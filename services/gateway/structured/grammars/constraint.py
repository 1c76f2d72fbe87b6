"""A request's constraint of its output, independent of dialects."""

from __future__ import annotations

from typing import Literal

import msgspec

ConstraintKind = Literal["json_object", "json_schema", "regex", "choice", "lark", "gbnf"]


class OutputConstraint(msgspec.Struct, frozen=True, kw_only=True):
    """The constraint of an output. `source` is the schema as JSON, the expression, the choices as a
    JSON array, or the grammar; it is empty for any JSON object. `is_strict` makes keywords that
    cannot be enforced an error instead of a warning. `whitespace_pattern` matches the whitespace
    between tokens of JSON; None allows at most 4 characters. `param` is the request field, for
    errors.
    """

    kind: ConstraintKind
    source: str = ""
    is_strict: bool = False
    whitespace_pattern: str | None = None
    param: str = "response_format"
