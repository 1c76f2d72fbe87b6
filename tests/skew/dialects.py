"""The requests of 32 clients in all dialects, and how the answer of each is read."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any, NamedTuple

import msgspec

from services.cli.cluster.service_options import DEMO_MODEL_NAME
from tests.chaos.world.constrained import constrained_requests
from tests.chaos.world.workload import requests
from tests.support.cluster.chaos_cluster import TENANT
from tests.support.cluster.clients import Exchange

Body = dict[str, Any]
WORDS = "worker token prefix cache block gateway queue lease site model".split()  # noqa: SIM905
NUM_WORDS = range(40, 120)


class Answer(NamedTuple):
    """What a client received. `content` is equal in every run of a request."""

    content: object
    is_complete: bool
    response_id: str = ""  # of a stored response


class Asked(NamedTuple):
    """A request of one dialect. `salted`: its body takes `cache_salt`, so that no run finds the KV
    of an earlier one.
    """

    name: str
    path: str
    body: Body
    read: Callable[[Exchange], Answer]
    salted: bool = True
    is_nats: bool = False


def all_requests() -> list[Asked]:
    """Returns 32 requests, the same in every run."""
    chats = [Asked("openai", path, body, _openai) for path, body in requests(8)]
    constrained = [Asked("grammar", path, body, _openai) for path, body in constrained_requests(8)]
    over_nats = [
        Asked("nats", path, body, _openai, is_nats=True) for path, body in requests(10)[8:]
    ]
    others = [
        make(index)
        for index in range(3)
        for make in (_responses, _answered_response, _messages, _ai_run)
    ]
    return [*chats, *constrained, *over_nats, *others, _embedding(0), _ranking(0)]


# ── requests ─────────────────────────────────────────────────────────────────────────────────────


def _text(kind: str, index: int) -> str:
    rng = random.Random(f"{kind} {index}")
    words = " ".join(rng.choice(WORDS) for _ in range(rng.choice(NUM_WORDS)))
    return f"What is the KV cache? {words}"


def _responses(index: int) -> Asked:
    body = {"input": _text("responses", index), "stream": True, "store": True, **_greedy(90)}
    return Asked("responses", "/v1/responses", body, _read_responses)


def _answered_response(index: int) -> Asked:
    body = {"input": _text("whole", index), "store": True, **_greedy(60)}
    return Asked("responses at once", "/v1/responses", body, _read_response)


def _greedy(max_tokens: int) -> Body:
    return {"model": DEMO_MODEL_NAME, "temperature": 0, "max_output_tokens": max_tokens}


def _messages(index: int) -> Asked:
    body = {
        "model": DEMO_MODEL_NAME,
        "messages": [{"role": "user", "content": _text("messages", index)}],
        "max_tokens": 90,
        "temperature": 0,
        "stream": True,
    }
    return Asked("messages", "/v1/messages", body, _read_messages, salted=False)


def _ai_run(index: int) -> Asked:
    body = {
        "messages": [{"role": "user", "content": _text("run", index)}],
        "max_tokens": 90,
        "temperature": 0,
        "stream": True,
    }
    path = f"/client/v4/accounts/{TENANT}/ai/run/{DEMO_MODEL_NAME}"
    return Asked("workers_ai", path, body, _read_run)


def _embedding(index: int) -> Asked:
    body = {"model": DEMO_MODEL_NAME, "input": _text("embedding", index)}
    return Asked("embeddings", "/v1/embeddings", body, _whole("data"), salted=False)


def _ranking(index: int) -> Asked:
    documents = [_text("documents", each) for each in range(3)]
    body = {"model": DEMO_MODEL_NAME, "query": _text("query", index), "documents": documents}
    return Asked("rerank", "/v1/rerank", body, _whole("results"))


# ── answers ──────────────────────────────────────────────────────────────────────────────────────


def events_of(exchange: Exchange) -> list[Any]:
    """Returns the JSON of the answer's events, or of the answer."""
    found = []
    for event in exchange.events:
        _, mark, data = event.partition(b"data:")
        data = (data if mark else event).strip()
        if data.startswith((b"{", b"[")) and not event.startswith(b":"):
            found.append(msgspec.json.decode(data))
    return found


def _openai(exchange: Exchange) -> Answer:
    output = {
        number: (each.text, [*each.calls.values()], each.finish_reasons, repr(each.logprobs))
        for number, each in exchange.output.items()
    }
    return Answer((output, exchange.usage), exchange.is_successful)


def _read_responses(exchange: Exchange) -> Answer:
    events = events_of(exchange)
    text = "".join(e["delta"] for e in events if e["type"] == "response.output_text.delta")
    last = events[-1] if events else {"type": ""}
    is_complete = last["type"] in ("response.completed", "response.incomplete")
    response = last.get("response", {"id": ""})
    return Answer(
        (text, last["type"]), is_complete and text == output_text(response), response["id"]
    )


def _read_response(exchange: Exchange) -> Answer:
    (response,) = events_of(exchange)
    is_complete = response["status"] in ("completed", "incomplete")
    return Answer((output_text(response), response["status"]), is_complete, response["id"])


def output_text(response: Any) -> str:
    """Returns the text of a response of the Responses API."""
    parts = [part for item in response["output"] for part in item.get("content") or ()]
    return "".join(part["text"] for part in parts)


def _read_messages(exchange: Exchange) -> Answer:
    events = events_of(exchange)
    deltas = [e["delta"] for e in events if e["type"] == "content_block_delta"]
    reasons = [e["delta"]["stop_reason"] for e in events if e["type"] == "message_delta"]
    is_complete = bool(events) and events[-1]["type"] == "message_stop"
    return Answer(("".join(each["text"] for each in deltas), reasons), is_complete)


def _read_run(exchange: Exchange) -> Answer:
    text = "".join(e.get("response") or "" for e in events_of(exchange))
    return Answer(text, exchange.is_successful)


def _whole(field: str) -> Callable[[Exchange], Answer]:
    def read(exchange: Exchange) -> Answer:
        (answer,) = events_of(exchange)
        return Answer(answer[field], exchange.status == 200)

    return read
