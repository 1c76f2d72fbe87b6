"""OpenAI's Responses as a dialect; `routes.py` has the paths of stored responses."""

from __future__ import annotations

from services.gateway.dialect import Dialect
from services.gateway.openai.errors import ErrorEnvelope, encode_error
from services.gateway.paths import openai_paths
from services.gateway.request.endpoint import GeneratingEndpoint
from services.gateway.responses.encoder import ResponsesEncoder
from services.gateway.responses.fields import RESPONSES_FIELDS, ResponsesRequest
from services.gateway.responses.object import ResponseEvent, ResponseObject
from services.gateway.responses.request import to_generation_request, without_prompt
from services.gateway.responses.storage import references
from services.gateway.responses.storage.record import stored_items
from services.gateway.text.process_jobs import PreparedBody

CREATE = GeneratingEndpoint(
    name="responses",
    operation="create",
    description="With `stream`, server-sent events that end with `response.completed`.",
    paths=openai_paths("/responses"),
    request=ResponsesRequest,
    response=ResponseObject,
    event=ResponseEvent,
    fields=RESPONSES_FIELDS,
    generations=lambda body, model: [to_generation_request(body, model)],
    is_streamed=lambda body: bool(body.stream),
    encoder=ResponsesEncoder,
    without_prompts=lambda body, _: without_prompt(body, stored_items(body.items)),
    merge=references.merged,
)
DIALECT = Dialect(
    name="openai",
    endpoints=(CREATE,),
    encode_error=encode_error,
    error=ErrorEnvelope,
    jobs={
        references.KIND: lambda job, *_: PreparedBody(references.encoded_references(job.body), [])
    },
)
