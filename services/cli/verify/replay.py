"""Has a gateway compute a request again, with the seed and under the salt of a receipt."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from urllib.parse import quote

import httpx
import msgspec

from services.client.chat_request import gateway_client
from shared.errors import ConfigError, DependencyUnavailable
from shared.receipts.jws import JwkSet, parsed_jws
from shared.receipts.receipt import AnswerReceipt, IssuedReceipt, payload_hash, receipt_of
from shared.receipts.salted import ReceiptSalt
from shared.transport.wire_errors import UNREADABLE, one_line

PATHS = {
    "chat": "/v1/chat/completions",
    "completions": "/v1/completions",
    "embeddings": "/v1/embeddings",
    "messages": "/v1/messages",
    "responses": "/v1/responses",
    "rerank": "/v1/rerank",
    "score": "/v1/score",
    "workers_ai": "/client/v4/accounts/{account}/ai/run/{model}",
}
KEYS_PATH = "/v1/receipts/keys"
RECEIPT_HEADER, REPLAY_HEADER = "x-hearth-receipt", "x-hearth-replay"


class ReceiptClient:
    """Reads receipts and keys of one gateway, over one connection: behind a balancer another
    gateway would not know the request. Methods raise DependencyUnavailable.
    """

    def __init__(self, url: str, api_key: str, certificate: str = "") -> None:
        """Raises ConfigError for a certificate that cannot be read."""
        self._http = gateway_client(url, api_key, certificate)

    async def close(self) -> None:
        await self._http.aclose()

    async def keys(self) -> JwkSet:
        response = await self._sent("GET", KEYS_PATH)
        try:
            return msgspec.json.decode(response.content, type=JwkSet)
        except UNREADABLE as error:
            raise DependencyUnavailable(f"{KEYS_PATH} has no keys: {one_line(error)}") from None

    async def receipt(self, request_id: str) -> IssuedReceipt:
        path = f"/v1/requests/{quote(request_id, safe='')}/receipt"
        response = await self._sent("GET", path)
        try:
            return msgspec.json.decode(response.content, type=IssuedReceipt)
        except UNREADABLE as error:
            raise DependencyUnavailable(f"{path} has no receipt: {one_line(error)}") from None

    async def replay(
        self, receipt: AnswerReceipt, salt: ReceiptSalt, body: Mapping[str, Any]
    ) -> AnswerReceipt:
        """Sends the request again. Returns its receipt, whose hashes are under the same salt.
        Raises ConfigError for an endpoint of another release.
        """
        response = await self._sent(
            "POST",
            _path_of(receipt),
            json=_body_of(receipt, body),
            headers={
                RECEIPT_HEADER: "on",
                REPLAY_HEADER: f"seed={receipt.prompts[0].sampling.seed}; salt={salt.text}",
            },
        )
        promised = response.headers.get(RECEIPT_HEADER)
        if promised is None:
            raise DependencyUnavailable(f"{self._http.base_url} issues no receipts")
        issued = await self.receipt(response.headers["x-request-id"])
        payload = parsed_jws(issued.receipt).payload
        if payload_hash(payload) != promised:
            raise DependencyUnavailable(
                "the receipt of the replay is not the one that was promised"
            )
        return receipt_of(payload)

    async def _sent(self, method: str, path: str, **options: Any) -> httpx.Response:
        try:
            response = await self._http.request(method, path, **options)
        except httpx.HTTPError as error:
            raise DependencyUnavailable(f"cannot reach {self._http.base_url}: {error}") from None
        if response.status_code != 200:
            text = " ".join(response.text.split())[:200]
            raise DependencyUnavailable(f"{path}: {response.status_code} {text}")
        return response


def _path_of(receipt: AnswerReceipt) -> str:
    path = PATHS.get(receipt.endpoint)
    if path is None:
        raise ConfigError(f"this release cannot replay the endpoint {receipt.endpoint!r}")
    account, model = quote(receipt.tenant, safe=""), quote(receipt.model.name)
    return path.format(account=account, model=model)


def _body_of(receipt: AnswerReceipt, body: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the body without a stream, and so that nothing of it is stored."""
    kept = {key: value for key, value in body.items() if not key.startswith("stream")}
    return {**kept, "store": False} if receipt.endpoint == "responses" else kept
