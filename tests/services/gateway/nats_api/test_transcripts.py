"""The messages of an answer of each endpoint, beside their record: `tests/surface/transcripts`."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.services.gateway.nats_api.conftest import Api, all_of, next_of
from tests.surface.recording import check_record
from tests.surface.transcript import answer_text

CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 5}
TEXT = {"model": "tiny", "prompt": "hello", "max_tokens": 5}
BODIES: dict[str, dict[str, Any]] = {
    "chat": CHAT,
    "completions": TEXT,
    "responses": {"model": "tiny", "input": "hello", "max_output_tokens": 5},
    "messages": CHAT,
    "embeddings": {"model": "tiny", "input": ["hello"]},
    "rerank": {"model": "tiny", "query": "hello", "documents": ["a"]},
    "tokenize": {"model": "tiny", "prompt": "hello"},
    "detokenize": {"model": "tiny", "tokens": [1, 2]},
    "models": {},
    "nothing": {},
}


@pytest.mark.parametrize("endpoint", BODIES)
async def test_surface_transcript(api: Api, endpoint: str) -> None:
    exchanges, names = [], dict[str, str]()
    bodies = [BODIES[endpoint], {"model": 3}]
    if "max_tokens" in str(bodies[0]) or endpoint == "responses":
        bodies.append({**BODIES[endpoint], "stream": True})
    for body in bodies:
        received = await api.send(endpoint, body)
        replies = await all_of(received) if "stream" in body else [await next_of(received)]
        headers = {k: v for each in replies for k, v in (each.headers or {}).items()}
        headers.pop("Hearth-Seq")  # chunks share messages by the time at which they are ready
        text = b"".join(each.data for each in replies).decode()
        answer = answer_text(headers, text, names)
        exchanges.append(f"──── {endpoint}\n{json.dumps(body)}\n\n{answer}\n")
    check_record(f"transcripts/nats_{endpoint}.txt", "\n".join(exchanges))
