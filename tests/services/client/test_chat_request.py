import json
from collections.abc import AsyncIterator, Callable

import httpx
import pytest

from services.client.chat_request import (
    ChatReply,
    first_model,
    gateway_client,
    stream_chat,
    stream_completion,
)
from shared.errors import DependencyUnavailable, HearthError

QUESTION = [{"role": "user", "content": "What is Hearth?"}]


class StepClock:
    """Every call of `now` advances the time by one second."""

    def __init__(self) -> None:
        self._now = 0.0

    def now(self) -> float:
        self._now += 1.0
        return self._now

    async def sleep(self, delay_s: float) -> None:
        self._now += delay_s


def events(*bodies: object, is_done: bool = True) -> str:
    lines = [f"data: {json.dumps(body)}\n\n" for body in bodies]
    return "".join(lines) + ("data: [DONE]\n\n" if is_done else "")


def delta(text: str) -> dict[str, object]:
    return {"choices": [{"index": 0, "delta": {"content": text}}]}


LAST = {
    "choices": [],
    "usage": {"prompt_tokens": 9, "prompt_tokens_details": {"cached_tokens": 4}},
    "hearth": {"decode_worker": "decode-1", "prefill_worker": "prefill-1"},
}

Respond = Callable[[httpx.Request], httpx.Response]


def client(respond: Respond) -> httpx.AsyncClient:
    return httpx.AsyncClient(transport=httpx.MockTransport(respond), base_url="http://gateway")


async def reply_to(body: str, *, status: int = 200) -> tuple[ChatReply, list[str]]:
    deltas: list[str] = []
    async with client(lambda request: httpx.Response(status, text=body)) as gateway:
        reply = await stream_chat(gateway, "demo", QUESTION, StepClock(), deltas.append)
    return reply, deltas


async def test_completion_of_a_prompt_has_its_texts() -> None:
    def respond(request: httpx.Request) -> httpx.Response:
        asked = json.loads(request.content)
        assert (request.url.path, asked["prompt"]) == ("/v1/completions", "Once")
        assert asked["max_tokens"] == 4
        texts = ({"choices": [{"index": 0, "text": each}]} for each in (" upon", " a"))
        return httpx.Response(200, text=events(*texts, LAST))

    async with client(respond) as gateway:
        clock, limit = StepClock(), {"max_tokens": 4}
        reply = await stream_completion(gateway, "m", "Once", clock, lambda text: None, **limit)
    assert (reply.text, reply.num_cached_tokens) == (" upon a", 4)


async def test_text_deltas_are_passed_on_and_timed() -> None:
    role = {"choices": [{"index": 0, "delta": {"role": "assistant"}}]}
    reply, deltas = await reply_to(events(role, delta("Hearth "), delta("is"), delta(" a"), LAST))
    assert deltas == ["Hearth ", "is", " a"]
    assert reply.text == "Hearth is a"
    assert (reply.ttft_s, reply.itl_s, reply.median_itl_s) == (1.0, (1.0, 1.0), 1.0)
    assert reply.num_cached_tokens == 4
    assert reply.hearth == LAST["hearth"]


async def test_empty_reply_is_valid() -> None:
    reply, _ = await reply_to(events({"choices": [], "usage": None}))
    assert (reply.text, reply.itl_s, reply.median_itl_s, reply.num_cached_tokens) == ("", (), 0, 0)


async def test_error_contains_status_and_message_of_the_gateway() -> None:
    body = json.dumps({"error": {"message": "the API key is not valid"}})
    with pytest.raises(HearthError, match="401: the API key is not valid"):
        await reply_to(body, status=401)


async def test_error_event_in_a_stream_raises() -> None:
    with pytest.raises(HearthError, match="no worker"):
        await reply_to(events(delta("He"), {"error": {"message": "no worker"}}))


async def test_stream_without_done_raises() -> None:
    with pytest.raises(DependencyUnavailable, match="ended before its end"):
        await reply_to(events(delta("He"), is_done=False))


async def test_lost_connection_raises() -> None:
    class Broken(httpx.AsyncByteStream):
        async def __aiter__(self) -> AsyncIterator[bytes]:
            yield events(delta("He"), is_done=False).encode()
            raise httpx.ReadError("reset")

    async with client(lambda request: httpx.Response(200, stream=Broken())) as gateway:
        with pytest.raises(DependencyUnavailable, match="connection broke"):
            await stream_chat(gateway, "demo", QUESTION, StepClock(), lambda text: None)


async def test_first_model_is_returned_if_there_is_one() -> None:
    models = {"data": [{"id": "demo"}, {"id": "other"}]}
    async with client(lambda request: httpx.Response(200, json=models)) as gateway:
        assert (await first_model(gateway)).id == "demo"
        assert (await first_model(gateway, "other")).id == "other"
        assert (await first_model(gateway, "not served")).id == "demo"
    async with client(lambda request: httpx.Response(200, json={"data": []})) as gateway:
        with pytest.raises(DependencyUnavailable, match="no model"):
            await first_model(gateway)
    async with client(lambda request: httpx.Response(200, text="<html>")) as gateway:
        with pytest.raises(HearthError):
            await first_model(gateway)


async def test_gateway_url_may_end_with_v1() -> None:
    for url in ("http://a:1", "http://a:1/", "http://a:1/v1", "http://a:1/v1/"):
        async with gateway_client(url, "key") as made:
            assert str(made.base_url) in ("http://a:1", "http://a:1/")
            assert made.headers["authorization"] == "Bearer key"


INVALID = (b"[]", b"5", b'{"choices": 5}', b'{"choices": [{"delta": 7}]}', b'"\xff"', b"[" * 5000)


@pytest.mark.parametrize("body", [*INVALID, b'{"data": [{"name": "x"}]}'])
async def test_invalid_models_response_raises(body: bytes) -> None:
    client = gateway_client("http://x", "key")
    client._transport = httpx.MockTransport(lambda request: httpx.Response(200, content=body))
    with pytest.raises(HearthError):
        await first_model(client)


@pytest.mark.parametrize("body", INVALID)
async def test_invalid_event_raises(body: bytes) -> None:
    content = b"data: " + body + b"\n\n"
    client = gateway_client("http://x", "key")
    client._transport = httpx.MockTransport(lambda request: httpx.Response(200, content=content))
    with pytest.raises(HearthError):
        await stream_chat(client, "m", QUESTION, StepClock(), lambda text: None)
