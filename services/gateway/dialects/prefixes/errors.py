"""Errors of prefixes, in addition to those of all requests."""

from __future__ import annotations

from shared.errors import InvalidRequest


class UnknownPrefix(InvalidRequest):
    code = "prefix_not_found"
    http_status = 404


class PrefixTooShort(InvalidRequest):
    code = "prefix_too_short"


class PrefixTooLarge(InvalidRequest):
    code = "prefix_too_large"
    http_status = 413
