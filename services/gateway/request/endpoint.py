"""Declares endpoints: HTTP, NATS, the OpenAPI document and the preparation processes read them."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from services.gateway.output.encoder import Encoder
from services.gateway.output.framing import Framing
from services.gateway.request.generation_request import GenerationRequest
from services.gateway.request.output_merger import OutputMerger
from services.gateway.request.supported_fields import SupportedFields
from services.gateway.text.decoding.token_bytes import TokenBytes
from services.gateway.text.model_files import ModelText, RankingTokens
from shared.messages import Pooling
from shared.tenancy.tenant import TenantRecord

Requests = Sequence[GenerationRequest]
ERRORS = (400, 401, 403, 404, 413, 429, 503, 504)  # statuses that most endpoints have


@dataclass(frozen=True, slots=True)
class ResponseContext:
    """What an encoder needs besides the body. `model`: the name that the client sent. `created`,
    `now`: seconds since 1970. `state`: the tenant's part of the endpoint's `EndpointState`.
    `pooling`: of embeddings.
    """

    merger: OutputMerger
    token_bytes: TokenBytes
    request_id: str
    model: str
    created: int
    framing: Framing
    ranking: RankingTokens | None = None
    pooling: Pooling | None = None
    now: Callable[[], float] = time.time
    state: Any = None


class Referred(Protocol):
    """Stored state that a body refers to. `num_bytes`: the bytes of all of it."""

    @property
    def num_bytes(self) -> int: ...

    async def read(self, hold: Callable[[int], None]) -> bytes:
        """Returns the encoded state. `hold`: is called with its bytes before any is read; what it
        raises is raised. Raises the HearthError that rejects the request.
        """
        ...

    def merge(self, body: bytes, state: bytes) -> bytes:
        """Returns the body with the state. Raises the HearthError that rejects it."""
        ...


# the name of a job → its reply from a preparation process, or None for a body that needs none
Scan = Callable[[str], Awaitable[bytes | None]]


@dataclass(frozen=True, slots=True)
class EndpointState:
    """The state of an endpoint between requests. `of_tenant`: returns the part that the encoders of
    a tenant get. `referred`: returns the stored state that a body refers to; raises the HearthError
    that rejects it.
    """

    of_tenant: Callable[[TenantRecord], Any]
    referred: Callable[[TenantRecord, bytes, Scan], Awaitable[Referred | None]] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoint:
    """Declares an endpoint: its paths over HTTP, and its subject of NATS.

    `name`: names the subject, and the bodies in preparation processes. `paths`: take POST; empty if
    the dialect has a handler of its own. `operation`, `summary`, `description`: in the OpenAPI
    document. `example`: a body that it shows.
    `event`: the type of a streamed event, or several types. `errors`: the statuses of rejections
    over HTTP. `is_free`: a request costs nothing. `takes_images`: its bodies may be as large as
    images are.
    """

    name: str
    operation: str = ""
    summary: str = ""
    description: str = ""
    example: Mapping[str, Any] | None = None
    paths: Sequence[str] = ()
    request: type[Any]
    response: type[Any]
    event: Any = None
    errors: tuple[int, ...] = ERRORS
    is_on_nats: bool = True
    is_free: bool = False
    takes_images: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class GeneratingEndpoint(Endpoint):
    """Declares an endpoint whose bodies become requests, and their output its response.

    `response_id`: makes the id of a response, if it does not end with that of its request.
    `without_prompts`: returns the body with a number of empty prompts. `merge`: returns the body
    with the state that it refers to. `is_for_session`: the session that a client's headers name
    overrides the body's user, who may have several.
    """

    fields: SupportedFields
    # body, default model → one request per prompt; raises InvalidRequest
    generations: Callable[[Any, str], Requests]
    is_streamed: Callable[[Any], bool]
    encoder: Callable[[Any, ResponseContext], Encoder]
    without_prompts: Callable[[Any, int], Any]
    # body, its requests, the model's files → the requests that this model gets
    for_model: Callable[[Any, Requests, ModelText], Requests] = lambda _, generations, __: (
        generations
    )
    merge: Callable[[bytes, bytes], bytes] | None = None
    response_id: Callable[[str], str] | None = None
    is_for_session: bool = False
