"""Names, values and whole parts for the schemas of `json_schemas.py`."""

from __future__ import annotations

from typing import Any

Schema = dict[str, Any]

NAMES = (
    "id", "name", "city", "unit", "limit", "tags", "enabled", "created_at", "user", "email",
    "price", "currency", "status", "path", "retries", "timeout_s", "query", "options", "labels",
    "latitude", "parent", "größe", "content-type", "a b", "$value", "version", "metadata",
)  # fmt: skip
WORDS = (
    "celsius", "fahrenheit", "open", "closed", "pending", "eur", "usd", "low", "high", "red",
    "über", "two words", "x", "GET", "POST", "東京", "with \"quotes\"", "back\\slash", "file",
)  # fmt: skip
PHRASES = (
    "The city and its country, such as Paris, France.",
    "ISO 8601, in UTC.",
    'May be null. "Empty" means all.',
    "Größe in Metern, höchstens 3.",
)
# (pattern, most bytes; None: without a limit)
PATTERNS: tuple[tuple[str, int | None], ...] = (
    ("^[a-z][a-z0-9_]{0,15}$", 16),
    ("^[A-Z]{2}-[0-9]{4}$", 7),
    (r"^\d{3}-\d{2}-\d{4}$", 11),
    ("^#[0-9a-fA-F]{6}$", 7),
    (r"^(\d{1,3}\.){3}\d{1,3}$", 15),
    (r"^v\d+(\.\d+){0,2}$", None),
    (r"^[^\s@]+@[^\s@]+$", None),
    ("[0-9]", None),
)
# (keyword that is not enforced, schema with it)
UNSUPPORTED: tuple[tuple[str, Schema], ...] = (
    ("not", {"type": "string", "not": {"const": "none"}}),
    ("if", {"type": "object", "if": {"required": ["b"]}, "then": {"required": ["a"]}}),
    ("dependentSchemas", {"type": "object", "dependentSchemas": {"a": {"required": ["b"]}}}),
    ("dependentRequired", {"type": "object", "dependentRequired": {"a": ["b"]}}),
    ("unevaluatedProperties", {"type": "object", "unevaluatedProperties": False}),
    ("unevaluatedItems", {"prefixItems": [{"type": "boolean"}], "unevaluatedItems": False}),
    ("uniqueItems", {"type": "array", "items": {"enum": ["a", "b", "c"]}, "uniqueItems": True}),
    ("contains", {"type": "array", "items": {"type": "integer"}, "contains": {"minimum": 5}}),
    ("propertyNames", {"type": "object", "propertyNames": {"pattern": "^[a-z]+$"}}),
    (
        "$dynamicRef",
        {"$dynamicAnchor": "extra", "properties": {"a": {"$dynamicRef": "#extra"}}},
    ),
    ("format", {"type": "string", "format": "uri-reference"}),
    ("oneOf", {"oneOf": [{"type": "integer"}, {"type": "integer", "minimum": 5}]}),
)
UNREADABLE: tuple[Schema, ...] = (
    {"type": "string", "pattern": "^(?=.*[0-9])[a-z0-9]{8,}$"},
    {"type": "string", "pattern": r"\bid\b"},
    {"$ref": "https://example.com/schemas/address.json"},
)
# (name, most characters; None: without a limit)
FORMATS: tuple[tuple[str, int | None], ...] = (
    ("date", 10),
    ("uuid", 36),
    ("ipv4", 15),
    ("ipv6", 45),
    ("date-time", None),
    ("time", None),
    ("email", None),
    ("hostname", None),
    ("uri", None),
    ("duration", None),
)
