"""The bytes of an answer of each endpoint, beside their record: `tests/surface/transcripts`."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from tests.services.gateway.conftest import Cluster
from tests.surface.recording import check_record
from tests.surface.transcript import answer_text

Call = tuple[str, str, Any]  # method, path, JSON body or None
ID = re.compile(r'"id": ?"((?:resp|chatcmpl)[^"]+)"')  # of a response, for later paths
AI = "/client/v4/accounts/tenant-1/ai"
CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 5}
TEXT = {"model": "tiny", "prompt": "hello", "max_tokens": 5}
INPUT = {"model": "tiny", "input": "hello", "max_output_tokens": 5}
RANKED = {"model": "tiny", "query": "hello", "documents": ["a", "b"]}
STREAMED = {"stream": True}
USAGE = {"stream_options": {"include_usage": True}}
TOOLS = {"tools": [{"type": "function", "function": {"name": "f", "parameters": {}}}]}

TRANSCRIPTS: dict[str, list[Call]] = {
    "openai_chat": [
        ("POST", "/v1/chat/completions", CHAT),
        ("POST", "/v1/chat/completions", {**CHAT, **STREAMED, **USAGE}),
        ("POST", "/v1/chat/completions", {**CHAT, "n": 2, "logprobs": True, "top_logprobs": 1}),
        ("POST", "/v1/chat/completions", {**CHAT, "max_tokens": -1}),
        ("POST", "/v1/chat/completions", {**CHAT, "model": "other"}),
        ("POST", "/v1/chat/completions", {**CHAT, "messages": []}),
    ],
    "openai_completions": [
        ("POST", "/v1/completions", TEXT),
        ("POST", "/v1/completions", {**TEXT, **STREAMED, **USAGE}),
        ("POST", "/v1/completions", {**TEXT, "echo": True, "logprobs": 1}),
        ("POST", "/v1/completions", {**TEXT, "prompt": [[1, 2], [3]]}),
        ("POST", "/v1/completions", {**TEXT, "prompt": 3}),
    ],
    "openai_models": [
        ("GET", "/v1/models", None),
        ("GET", "/v1/models/tiny", None),
        ("GET", "/v1/models/other", None),
        ("DELETE", "/v1/models", None),
        ("GET", "/v1/nothing", None),
    ],
    "openai_embeddings": [
        ("POST", "/v1/embeddings", {"model": "tiny", "input": ["hello", "you"]}),
        ("POST", "/v1/embeddings", {"model": "tiny", "input": "a", "encoding_format": "base64"}),
        ("POST", "/v1/embeddings", {"model": "tiny"}),
    ],
    "responses": [
        ("POST", "/v1/responses", INPUT),
        ("GET", "/v1/responses/{id}", None),
        ("GET", "/v1/responses/{id}/input_items", None),
        ("DELETE", "/v1/responses/{id}", None),
        ("GET", "/v1/responses/{id}", None),
        ("POST", "/v1/responses", {**INPUT, **STREAMED}),
        ("POST", "/v1/responses/input_tokens", {"model": "tiny", "input": "hello"}),
        ("POST", "/v1/responses", {**INPUT, "input": 3}),
    ],
    "anthropic": [
        ("POST", "/v1/messages", CHAT),
        ("POST", "/v1/messages", {**CHAT, **STREAMED}),
        ("POST", "/v1/messages/count_tokens", {**CHAT, "max_tokens": None}),
        ("POST", "/v1/messages", {**CHAT, "max_tokens": 0}),
    ],
    "ranking": [
        ("POST", "/v1/rerank", RANKED),
        ("POST", "/v2/rerank", {**RANKED, "top_n": 1}),
        ("POST", "/v1/score", {"model": "tiny", "text_1": "a", "text_2": ["b"]}),
        ("POST", "/v1/rerank", {**RANKED, "documents": []}),
    ],
    "tokenization": [
        ("POST", "/tokenize", {"model": "tiny", "prompt": "hello", "return_token_strs": True}),
        ("POST", "/detokenize", {"model": "tiny", "tokens": [1, 2, 3]}),
        ("POST", "/detokenize", {"model": "tiny", "tokens": [-1]}),
    ],
    "workers_ai": [
        ("POST", f"{AI}/run/tiny", {"prompt": "hello", "max_tokens": 5}),
        ("POST", f"{AI}/run/tiny", {"messages": CHAT["messages"], "max_tokens": 5, **STREAMED}),
        ("POST", f"{AI}/run/tiny", {"text": ["hello"]}),
        ("POST", f"{AI}/run/tiny", {}),
        ("GET", f"{AI}/models/search", None),
        ("GET", f"{AI}/models/schema?model=tiny", None),
        ("GET", f"{AI}/tasks/search", None),
        ("POST", f"{AI}/v1/chat/completions", CHAT),
        ("GET", f"{AI.replace('tenant-1', 'tenant-2')}/models/search", None),
    ],
    "prefixes": [
        ("PUT", "/v1/prefixes/p", {"model": "tiny", "prompt": "hello " * 40}),
        ("GET", "/v1/prefixes/p", None),
        ("POST", "/v1/prefixes/dry_run", {"model": "tiny", "prompt": "hello " * 40}),
        ("DELETE", "/v1/prefixes/p", None),
        ("GET", "/v1/prefixes/p", None),
    ],
    "requests": [
        ("POST", "/v1/chat/completions", CHAT),
        ("GET", "/v1/requests/{id}/timeline", None),
        ("GET", "/v1/requests/{id}/receipt", None),
        ("GET", "/v1/requests/none/timeline", None),
        ("GET", "/v1/requests/none/receipt", None),
        ("GET", "/v1/receipts/keys", None),
    ],
    "state": [
        ("GET", "/health", None),
        ("HEAD", "/health", None),
        ("GET", "/ready", None),
        ("OPTIONS", "/v1/models", None),
    ],
}


@pytest.mark.parametrize("name", TRANSCRIPTS)
async def test_surface_transcript(cluster: Cluster, name: str) -> None:
    exchanges, names, response_id = [], dict[str, str](), ""
    for method, path, body in TRANSCRIPTS[name]:
        response = await cluster.http.request(method, path.replace("{id}", response_id), json=body)
        if found := ID.search(response.text):
            response_id = response_id or found[1]
        answer = answer_text(response.headers, response.text, names)
        sent = "" if body is None else "\n" + json.dumps(body)
        exchanges.append(f"──── {method} {path}{sent}\n\n{response.status_code}\n{answer}\n")
    check_record(f"transcripts/{name}.txt", "\n".join(exchanges))
