"""Errors of stored responses, in addition to those of all requests."""

from __future__ import annotations

from shared.errors import InvalidRequest


class UnknownResponse(InvalidRequest):
    """Of this tenant: a response of another one looks the same."""

    code = "response_not_found"
    http_status = 404
