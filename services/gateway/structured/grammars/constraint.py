"""The constraint that a request puts on its output, without a dialect."""

from __future__ import annotations

from typing import Literal

import msgspec

ConstraintKind = Literal["json_object", "json_schema", "regex", "choice", "lark", "gbnf"]


class OutputConstraint(msgspec.Struct, frozen=True, kw_only=True):
    """`source`: the schema as JSON, the expression, the choices as a JSON array, or the grammar;
    empty for any JSON object. `is_strict`: keywords that cannot be enforced are an error, not a
    warning. `whitespace_pattern`: between the tokens of JSON; None: at most 4 characters. `param`:
    the request field that holds it, for errors.
    """

    kind: ConstraintKind
    source: str = ""
    is_strict: bool = False
    whitespace_pattern: str | None = None
    param: str = "response_format"
