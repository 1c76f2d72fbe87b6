"""The routes of the Responses API that generate nothing."""

from __future__ import annotations

from functools import partial
from typing import Annotated, Any, Literal

import msgspec
from litestar import Request, Response, delete, get, post
from litestar.params import Body

from services.gateway.dialects.dialect import Handlers
from services.gateway.dialects.http_parts import HttpParts
from services.gateway.dialects.openai.errors import ErrorEnvelope
from services.gateway.dialects.paths import check_account, openai_paths
from services.gateway.dialects.responses.endpoints import CREATE
from services.gateway.dialects.responses.fields import ResponsesRequest
from services.gateway.dialects.responses.object import ResponseObject
from services.gateway.dialects.responses.request import to_generation_request
from services.gateway.dialects.responses.storage.record import (
    NamedItem,
    ResponseRecord,
    input_items_of,
)
from services.gateway.dialects.responses.storage.store import ResponseStore
from services.gateway.dialects.route_options import BODY_KIND, TAKES_IMAGES
from services.gateway.http.body import StrictBody
from services.gateway.http.openapi import QUERY, described
from services.gateway.models.gateway_models import GatewayModels
from services.gateway.request.preparer import Preparer
from services.gateway.request.prompt import ChatPrompt
from shared.errors import InvalidRequest
from shared.packing import TOKEN_ID_BYTES

STORED = (401, 403, 404, 429, 503)  # statuses of the routes of a stored response
MAX_LISTED = 100
DEFAULT_LISTED = 20
ITEMS_QUERY = {
    "limit": f"Most items, from 1 to {MAX_LISTED}; by default {DEFAULT_LISTED}.",
    "order": "`desc`, which is the default, or `asc`.",
    "after": "The id of the item after which the list begins.",
}


class ResponsesBody(StrictBody):
    fields = CREATE.fields


class InputTokens(msgspec.Struct, frozen=True, kw_only=True):
    object: Literal["response.input_tokens"] = "response.input_tokens"
    input_tokens: int
    """Tokens of the prompt."""


class DeletedResponse(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    object: Literal["response"] = "response"
    deleted: bool = True
    """Always true."""


class ItemList(msgspec.Struct, frozen=True, kw_only=True):
    object: Literal["list"] = "list"
    data: list[Any]  # encoded items
    first_id: str | None
    """The id of the first item; null if there is none."""
    last_id: str | None
    """The id of the last item, after which the next page begins; null if there is none."""
    has_more: bool
    """Whether there is a next page."""


class ResponsesRoutes:
    """The handlers of one gateway."""

    def __init__(self, store: ResponseStore, preparer: Preparer, models: GatewayModels) -> None:
        self._store = store
        self._preparer = preparer
        self._models = models

    def handlers(self, http: HttpParts) -> Handlers:
        options = {"guards": [check_account], "return_dto": None, **http.options}
        one = openai_paths("/responses/{response_id:str}")
        hidden = partial(post, status_code=200, include_in_schema=False, **options)
        count = post(
            openai_paths("/responses/input_tokens"),
            dto=ResponsesBody,
            opt={BODY_KIND: CREATE.name, TAKES_IMAGES: True},
            request_max_body_size=None,  # the admission has limited it
            status_code=200,
            summary="Counts the tokens of a prompt",
            responses=described(InputTokens, ErrorEnvelope, *CREATE.errors),
            **options,
        )
        read = get(
            one,
            summary="Returns a stored response",
            responses=described(ResponseObject, ErrorEnvelope, *STORED, 400),
            **options,
        )
        removal = delete(
            one,
            status_code=200,
            summary="Deletes a stored response",
            description="Responses that continue it can no longer be continued.",
            responses=described(DeletedResponse, ErrorEnvelope, *STORED),
            **options,
        )
        items = get(
            openai_paths("/responses/{response_id:str}/input_items"),
            summary="Lists the input of a stored response",
            opt={QUERY: ITEMS_QUERY},
            responses=described(ItemList, ErrorEnvelope, *STORED, 400),
            **options,
        )
        return [
            count(self.input_tokens),
            read(self.get),
            removal(self.delete),
            items(self.input_items),
            hidden(path=openai_paths("/responses/{response_id:str}/cancel"))(self.cancel),
            hidden(path=openai_paths("/responses/compact"))(self.compact),
            hidden(path=openai_paths("/conversations"))(self.conversations),
        ]

    async def input_tokens(
        self, request: Request[Any, Any, Any], data: Annotated[ResponsesRequest, Body()]
    ) -> Response[InputTokens]:
        """Counts the tokens of the prompt that the same request would have."""
        prompts = request.state.prompts
        if prompts:
            return self._response(
                request, InputTokens(input_tokens=len(prompts[0].token_ids) // TOKEN_ID_BYTES)
            )
        tenant = request.state.tenant
        generation = to_generation_request(data, self._models.served.default_name)  # type: ignore[arg-type]  # as decoded
        model = await self._models.names.main(tenant, generation.model)
        prompt = generation.prompt
        assert isinstance(prompt, ChatPrompt), "of a conversation"
        token_ids = await self._preparer.tokenize_chat(model, tenant.tenant_id, prompt)
        return self._response(request, InputTokens(input_tokens=len(token_ids)))

    async def get(self, request: Request[Any, Any, Any]) -> Response[bytes]:
        """Returns a stored response; 404 for an unknown one. Only responses in the background could
        be streamed again.
        """
        if request.query_params.get("stream", "false").lower() not in ("false", "0", ""):
            raise InvalidRequest("stream: only a response in the background has it", param="stream")
        record = await self._read(request)
        return Response(record.response, media_type="application/json", headers=_headers(request))

    async def delete(self, request: Request[Any, Any, Any]) -> Response[DeletedResponse]:
        response_id = _id_of(request)
        await self._store.delete(request.state.tenant, response_id)
        return self._response(request, DeletedResponse(id=response_id))

    async def cancel(self, request: Request[Any, Any, Any]) -> Response[Any]:
        """Returns 400 for a known response: only one in the background can be cancelled. The others
        end when their connection does.
        """
        await self._store.sizes(request.state.tenant, {_id_of(request): "response_id"})
        raise InvalidRequest(
            "only a response in the background can be cancelled: close the connection of others",
            param="response_id",
        )

    async def input_items(self, request: Request[Any, Any, Any]) -> Response[ItemList]:
        """The items of the response's own input, without those of the responses before it."""
        query = request.query_params
        items = input_items_of(await self._read(request))
        order = query.get("order", "desc")
        if order not in ("asc", "desc"):
            raise InvalidRequest("order: use asc or desc", param="order")
        if order == "desc":
            items.reverse()
        items = _after(items, query.get("after"))
        limit = _limit(query.get("limit"))
        data = items[:limit]
        return self._response(
            request,
            ItemList(
                data=[item for _, item in data],
                first_id=data[0][0] if data else None,
                last_id=data[-1][0] if data else None,
                has_more=len(items) > limit,
            ),
        )

    async def compact(self, request: Request[Any, Any, Any]) -> Response[Any]:
        raise InvalidRequest("compact: responses are not compacted here", param="compact")

    async def conversations(self, request: Request[Any, Any, Any]) -> Response[Any]:
        raise InvalidRequest(
            "conversation: conversations are not kept: send previous_response_id",
            param="conversation",
        )

    async def _read(self, request: Request[Any, Any, Any]) -> ResponseRecord:
        state = request.state
        return await self._store.get(state.tenant, _id_of(request), state.hold)

    def _response(self, request: Request[Any, Any, Any], body: Any) -> Response[Any]:
        return Response(body, headers=_headers(request))


def _headers(request: Request[Any, Any, Any]) -> dict[str, str]:
    return {"x-request-id": request.state.request_id, **request.state.reservation.headers}


def _id_of(request: Request[Any, Any, Any]) -> str:
    return str(request.path_params["response_id"])


def _limit(given: str | None) -> int:
    """Returns the most items to list. Raises InvalidRequest."""
    if given is None:
        return DEFAULT_LISTED
    is_short = given.isascii() and given.isdigit() and len(given) <= len(str(MAX_LISTED))
    if not (is_short and 1 <= int(given) <= MAX_LISTED):
        raise InvalidRequest(f"limit: must be from 1 to {MAX_LISTED}", param="limit")
    return int(given)


def _after(items: list[NamedItem], item_id: str | None) -> list[NamedItem]:
    """Returns the items after the one with this id. Raises InvalidRequest."""
    if item_id is None:
        return items
    for index, (name, _) in enumerate(items):
        if name == item_id:
            return items[index + 1 :]
    raise InvalidRequest("after: no item of this response has this id", param="after")
