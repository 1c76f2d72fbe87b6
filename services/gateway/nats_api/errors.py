"""Errors of the API over NATS.

RequestCancelled    499  the client has cancelled the request
"""

from __future__ import annotations

from services.gateway.request.request_output import ClientDisconnected


class RequestCancelled(ClientDisconnected):
    """The client has cancelled the request. Unlike a disconnected client, it may still receive the
    end of the stream.
    """

    code = "request_cancelled"
