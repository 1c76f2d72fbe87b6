"""Whether a document is valid, by a validator that shares no code with the grammars."""

from __future__ import annotations

import json
import sys
from typing import Any

import jsonschema_rs


def is_valid(document: str | bytes, schema: dict[str, Any] | bool) -> bool:
    """Whether it is JSON in UTF-8 that the schema accepts; formats are annotations."""
    try:
        value = json.loads(document, parse_float=_finite)
    except ValueError:
        return False
    return jsonschema_rs.is_valid(schema, value)


def _finite(text: str) -> float:
    """JSON's numbers have no limit: 1e999 is one, but infinity is none."""
    return max(-sys.float_info.max, min(sys.float_info.max, float(text)))
