"""Declares the endpoint of new responses: `routes.py` has the paths of stored ones."""

from __future__ import annotations

from services.gateway.dialects.paths import openai_paths
from services.gateway.dialects.responses.encoder import ResponsesEncoder
from services.gateway.dialects.responses.fields import (
    RESPONSES_FIELDS,
    CompleteRequest,
    ResponsesRequest,
)
from services.gateway.dialects.responses.ids import response_id
from services.gateway.dialects.responses.object import ResponseEvent, ResponseObject
from services.gateway.dialects.responses.request import to_generation_request, without_prompt
from services.gateway.dialects.responses.storage import references
from services.gateway.dialects.responses.storage.record import stored_items
from services.gateway.request.endpoint import GeneratingEndpoint


def _stored_input(body: CompleteRequest) -> bytes:
    """Returns the items to store: none for a client that stores nothing, such as one that sends
    megabytes of images in each request.
    """
    return b"[]" if body.store is False else stored_items(body.items)


CREATE = GeneratingEndpoint(
    name="responses",
    operation="create",
    summary="Creates a response",
    description=(
        "With `stream`, the response is server-sent events, of which the last is "
        "`response.completed`, `response.incomplete` or `response.failed`."
    ),
    example={"input": "What is the KV cache?", "max_output_tokens": 100},
    paths=openai_paths("/responses"),
    request=ResponsesRequest,
    response=ResponseObject,
    event=ResponseEvent,
    takes_images=True,
    fields=RESPONSES_FIELDS,
    generations=lambda body, model: [to_generation_request(body, model)],
    is_streamed=lambda body: bool(body.stream),
    encoder=ResponsesEncoder,
    without_prompts=lambda body, _: without_prompt(body, _stored_input(body)),
    merge=references.merged,
    response_id=response_id,
)
