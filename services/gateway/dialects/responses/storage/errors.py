"""Errors of stored responses, in addition to those of all requests."""

from __future__ import annotations

from shared.errors import InvalidRequest


class UnknownResponse(InvalidRequest):
    """The tenant has no such response: one of another tenant looks the same."""

    code = "response_not_found"
    http_status = 404
