"""The Responses API as an endpoint."""

from __future__ import annotations

from services.gateway.request.endpoint import Endpoint
from services.gateway.responses.encoder import ResponsesEncoder
from services.gateway.responses.fields import RESPONSES_FIELDS
from services.gateway.responses.request import to_generation_request, without_prompt
from services.gateway.responses.storage.record import stored_items

NAME = "responses"

RESPONSES = Endpoint(
    name=NAME,
    fields=RESPONSES_FIELDS,
    generations=lambda body, model: [to_generation_request(body, model)],
    is_streamed=lambda body: bool(body.stream),
    encoder=ResponsesEncoder,
    without_prompts=lambda body, _: without_prompt(body, stored_items(body.items)),
)
