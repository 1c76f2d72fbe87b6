"""The endpoints of the API over NATS: what each does with a body, and how INFO describes it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from services.gateway.anthropic.endpoint import MESSAGES
from services.gateway.anthropic.errors import envelope, type_of
from services.gateway.anthropic.request import MessagesRequest
from services.gateway.anthropic.response_types import MessageResponse, StreamEvent
from services.gateway.model_list import ModelList
from services.gateway.nats_api.discovery import EndpointInfo, schema_of
from services.gateway.nats_api.reply import EncodeError, openai_error
from services.gateway.openai.chat import ChatCompletion, ChatCompletionChunk, ChatCompletionRequest
from services.gateway.openai.completions import Completion, CompletionChunk, CompletionRequest
from services.gateway.openai.embeddings import EmbeddingList, EmbeddingRequest
from services.gateway.openai.endpoints import CHAT, COMPLETIONS, EMBEDDINGS
from services.gateway.request.endpoint import Endpoint
from services.gateway.reranking.bodies import RerankRequest, RerankResponse
from services.gateway.reranking.endpoints import RERANK
from services.gateway.responses.endpoint import NAME as RESPONSES_NAME
from services.gateway.responses.endpoint import RESPONSES
from services.gateway.responses.fields import ResponsesRequest
from services.gateway.responses.object import ResponseEvent, ResponseObject
from services.gateway.tokenization.bodies import (
    DetokenizeRequest,
    DetokenizeResponse,
    TokenizeRequest,
    TokenizeResponse,
)
from services.gateway.tokenization.large_bodies import DETOKENIZE, TOKENIZE
from shared.subjects import API_GROUP, CANCEL, api_request

MODELS = "models"


class CancelRequest(msgspec.Struct, frozen=True):
    """`request`: the header `Hearth-Request` of its messages."""

    request: str


class Cancelled(msgspec.Struct, frozen=True):
    """`cancelled`: False if the gateway does not run this request of this client."""

    request: str
    cancelled: bool


class NoFields(msgspec.Struct, frozen=True):
    """An empty body, or any: it is not read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ApiEndpoint:
    """`encode_error`: in the form of its dialect. `event`: of a streamed response.
    `generates`: None for an endpoint that answers at once. `is_free`: a request costs nothing.
    """

    name: str
    request: type[Any]
    response: type[Any]
    event: Any = None  # a type, or several
    generates: Endpoint | None = None
    is_free: bool = False
    encode_error: EncodeError = openai_error

    @property
    def info(self) -> EndpointInfo:
        metadata = {
            "request_schema": schema_of(self.request),
            "response_schema": schema_of(self.response),
        }
        if self.event is not None:
            metadata |= {"streams": "true", "event_schema": schema_of(self.event)}
        return EndpointInfo(
            name=self.name,
            subject=api_request(self.name, "*"),
            queue_group=API_GROUP,
            metadata=metadata,
        )


_ALL = (
    ApiEndpoint(
        name="chat",
        request=ChatCompletionRequest,
        response=ChatCompletion,
        event=ChatCompletionChunk,
        generates=CHAT,
    ),
    ApiEndpoint(
        name="completions",
        request=CompletionRequest,
        response=Completion,
        event=CompletionChunk,
        generates=COMPLETIONS,
    ),
    ApiEndpoint(
        name="embeddings", request=EmbeddingRequest, response=EmbeddingList, generates=EMBEDDINGS
    ),
    ApiEndpoint(name=RERANK.name, request=RerankRequest, response=RerankResponse, generates=RERANK),
    ApiEndpoint(
        name=MESSAGES.name,
        request=MessagesRequest,
        response=MessageResponse,
        event=StreamEvent,
        generates=MESSAGES,
        encode_error=lambda error, request_id: (type_of(error).status, envelope(error, request_id)),
    ),
    ApiEndpoint(
        name=RESPONSES_NAME,
        request=ResponsesRequest,
        response=ResponseObject,
        event=ResponseEvent,
        generates=RESPONSES,
    ),
    ApiEndpoint(name=TOKENIZE, request=TokenizeRequest, response=TokenizeResponse),
    ApiEndpoint(name=DETOKENIZE, request=DetokenizeRequest, response=DetokenizeResponse),
    ApiEndpoint(name=MODELS, request=NoFields, response=ModelList, is_free=True),
    ApiEndpoint(name=CANCEL, request=CancelRequest, response=Cancelled, is_free=True),
)
API_ENDPOINTS: Mapping[str, ApiEndpoint] = {each.name: each for each in _ALL}


def error_encoder_of(name: str) -> EncodeError:
    """Of an endpoint that may not exist."""
    endpoint = API_ENDPOINTS.get(name)
    return openai_error if endpoint is None else endpoint.encode_error
