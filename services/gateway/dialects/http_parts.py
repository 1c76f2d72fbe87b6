"""The parts of a gateway that the HTTP handlers of its dialects share."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from litestar import Request

from services.gateway.http.affinity import AFFINITY_HEADER, session_key_of
from services.gateway.http.response import GenerationResponse
from services.gateway.receipts.options import RECEIPT, REPLAY, receipt_options
from services.gateway.request.endpoint import GeneratingEndpoint
from services.gateway.request.submission import Submission
from shared.clock import Clock

MOVES_HEADER = "x-hearth-moves"  # requests comments about moves to other workers in a stream
HttpRequest = Request[Any, Any, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpParts:
    """Opens responses. `keep_alive_s`: seconds after which a silent stream sends something that
    keeps its connection open. `options`: of each handler whose requests have an API key.
    """

    submission: Submission
    clock: Clock
    keep_alive_s: float
    options: Mapping[str, Any]

    async def respond(
        self,
        endpoint: GeneratingEndpoint,
        request: HttpRequest,
        body: Any,
        *,
        model: str | None = None,
        request_id_headers: tuple[str, ...] = (),
    ) -> GenerationResponse:
        """Submits the request of a body and returns its response. `model`: for a body that names
        none (default: the gateway's). Raises the HearthError that rejects the request.
        """
        affinity_key = request.headers.get(AFFINITY_HEADER)
        session_key = session_key_of(request.headers)
        if endpoint.is_for_session:
            affinity_key = affinity_key or session_key
        opened = await self.submission.open(
            endpoint,
            body,
            request.state.reservation,
            model=model,
            prompts=request.state.prompts,
            affinity_key=affinity_key,
            session_key=session_key,
            receipt=receipt_options(request.headers.get(RECEIPT), request.headers.get(REPLAY)),
        )
        ids = dict.fromkeys(request_id_headers, request.state.request_id)
        opened = dataclasses.replace(opened, headers={**opened.headers, **ids})
        return GenerationResponse(
            opened,
            clock=self.clock,
            keep_alive_s=self.keep_alive_s,
            shows_moves=MOVES_HEADER in request.headers,
        )
