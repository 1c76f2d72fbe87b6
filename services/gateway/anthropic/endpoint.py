"""`/v1/messages` as an endpoint."""

from __future__ import annotations

from services.gateway.anthropic.request import (
    MESSAGES_FIELDS,
    to_generation_requests,
    without_prompts,
)
from services.gateway.anthropic.response import MessageEncoder
from services.gateway.request.endpoint import Endpoint

MESSAGES = Endpoint(
    name="messages",
    fields=MESSAGES_FIELDS,
    generations=to_generation_requests,
    is_streamed=lambda body: bool(body.stream),
    encoder=MessageEncoder.of,
    without_prompts=without_prompts,
)
