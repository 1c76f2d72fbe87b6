"""One question over every API of the gateway, and how its answer is read."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import httpx

MODEL = "hearth-demo"
TEXT = "What is the KV cache?"
MESSAGES = [{"role": "user", "content": TEXT}]
TIMEOUT_S = 120.0


class Question(NamedTuple):
    path: str
    body: dict[str, Any]
    read: Callable[[Any], object]


QUESTIONS = (
    Question(
        "/v1/chat/completions",
        {"model": MODEL, "messages": MESSAGES},
        lambda answer: answer["choices"][0]["message"]["content"],
    ),
    Question(
        "/v1/completions",
        {"model": MODEL, "prompt": "Hearth is", "max_tokens": 8},
        lambda answer: answer["choices"][0]["text"],
    ),
    Question(
        "/v1/responses",
        {"model": MODEL, "input": TEXT},
        lambda answer: answer["output"][0]["content"][0]["text"],
    ),
    Question(
        "/v1/messages",
        {"model": MODEL, "messages": MESSAGES, "max_tokens": 64},
        lambda answer: answer["content"][0]["text"],
    ),
    Question(
        f"/client/v4/accounts/default/ai/run/{MODEL}",
        {"messages": MESSAGES},
        lambda answer: answer["result"]["response"],
    ),
    Question(
        "/v1/embeddings",
        {"model": MODEL, "input": TEXT},
        lambda answer: answer["data"][0]["embedding"][0],
    ),
    Question(
        "/v1/rerank",
        {"model": MODEL, "query": TEXT, "documents": ["a cache of keys and values", "a tree"]},
        lambda answer: answer["results"][0]["relevance_score"],
    ),
    Question("/tokenize", {"model": MODEL, "prompt": TEXT}, lambda answer: answer["count"]),
)


class Api:
    def __init__(self, url: str, key: str) -> None:
        self._client = httpx.Client(
            base_url=url,
            headers={"Authorization": f"Bearer {key}", "anthropic-version": "2023-06-01"},
            timeout=TIMEOUT_S,
            trust_env=False,
        )

    def ask(self, question: Question) -> object:
        """Returns what the answer says. Raises httpx.HTTPError."""
        response = self._client.post(question.path, json=question.body)
        response.raise_for_status()
        found = question.read(response.json())
        assert found, f"{question.path}: an empty answer: {response.text[:500]}"
        return found

    def stream(self, text: str = TEXT) -> Iterator[str]:
        """Yields the pieces of a streamed answer."""
        body = {
            "model": MODEL,
            "messages": [{"role": "user", "content": text}],
            "stream": True,
            "temperature": 0,
        }
        with self._client.stream("POST", "/v1/chat/completions", json=body) as response:
            response.raise_for_status()
            for line in response.iter_lines():
                if line.startswith("data: {"):
                    piece = json.loads(line.removeprefix("data: "))
                    assert "error" not in piece, piece
                    yield piece["choices"][0]["delta"].get("content") or ""

    def get(self, path: str, token: str = "") -> httpx.Response:
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        return self._client.get(path, headers=headers)
