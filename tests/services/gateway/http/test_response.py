"""The body messages that GenerationResponse sends to the web server."""

from __future__ import annotations

from typing import Any

from services.gateway.http.dialect import ChoiceResult
from services.gateway.http.response import GenerationResponse
from services.gateway.openai.errors import OpenAIDialect
from services.gateway.request.output_merger import OutputMerger
from services.gateway.request.request_output import OutputDelta
from services.gateway.streams.stream import StreamEnd
from services.gateway.text.model_files import ModelFiles
from shared.config import GatewayConfig
from shared.errors import HearthError
from tests.services.gateway.request.test_request_output import LENGTH, delivery_of

BODY = "http.response.body"


class ShortDialect(OpenAIDialect):
    """Each delta's text in parentheses."""

    def event(self, delta: OutputDelta) -> bytes:
        return f"({delta.text})".encode()

    def closing(self) -> bytes:
        return b"(closing)"

    def body(self, results: list[ChoiceResult]) -> Any:
        return [each.text for each in results]


async def bodies_of(
    config: GatewayConfig, files: ModelFiles, error: HearthError | None
) -> list[Any]:
    """Body messages of a response whose last token and stream end arrive together."""
    output = delivery_of(config, files, max_tokens=8)
    response = GenerationResponse(
        OutputMerger([output]), ShortDialect(), is_streamed=True, headers={}, cancel=lambda: None
    )
    messages: list[Any] = []

    async def receive() -> Any:
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        messages.append(message)

    output.on_tokens(0, files.tokenizer.encode(["a"]), ())
    if error is None:
        output.on_finish(0, LENGTH)
    output.on_end(StreamEnd(error, "w", 0))
    await response({}, receive, send)  # type: ignore[typeddict-item, arg-type]
    return [(each["body"], each["more_body"]) for each in messages if each["type"] == BODY]


async def test_closing_is_sent_with_the_last_delta(
    gateway_config: GatewayConfig, model_files: ModelFiles
) -> None:
    bodies = await bodies_of(gateway_config, model_files, None)
    assert bodies == [(b"(a)(closing)", False)]


async def test_text_before_a_failure_is_sent_before_the_error(
    gateway_config: GatewayConfig, model_files: ModelFiles
) -> None:
    bodies = await bodies_of(gateway_config, model_files, HearthError("broken"))
    assert bodies[0] == (b"(a)", True)
    assert b"broken" in bodies[1][0] and b"[DONE]" not in bodies[1][0]
