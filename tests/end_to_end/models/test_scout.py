"""A small random Llama 4 Scout answers the call that Cloudflare documents for it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from tokenizers import Tokenizer
from transformers import PreTrainedModel

from tests.services.cli.cluster.chat_checkpoint import write_byte_tokenizer
from tests.services.cli.in_process import call_hearth
from tests.support.cluster.chaos_cluster import TENANT
from tests.support.cluster.model_cluster import ModelCluster, run_model
from tests.support.engine.families import LLAMA4, LLAMA4_EXPERTS, MultimodalLlama4
from tests.support.waiting import wait_until

SCOUT = "@cf/meta/llama-4-scout-17b-16e-instruct"
MESSAGES = [
    {"role": "system", "content": "You are a friendly assistant"},
    {"role": "user", "content": "Why is pizza so good"},
]
TEMPLATE = (
    "{% for message in messages %}<|header_start|>{{ message['role'] }}<|header_end|>\n\n"
    "{{ message['content'] }}<|eot|>{% endfor %}"
    "{% if add_generation_prompt %}<|header_start|>assistant<|header_end|>\n\n{% endif %}"
)
PROMPT = (
    "<|header_start|>system<|header_end|>\n\nYou are a friendly assistant<|eot|>"
    "<|header_start|>user<|header_end|>\n\nWhy is pizza so good<|eot|>"
    "<|header_start|>assistant<|header_end|>\n\n"
)


@pytest.fixture(scope="module")
def scout(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, PreTrainedModel]:
    folder = tmp_path_factory.mktemp("scout")
    vocab_size = write_byte_tokenizer(folder, TEMPLATE)
    fields = {**LLAMA4, **LLAMA4_EXPERTS, "vocab_size": vocab_size}
    return folder, MultimodalLlama4("Llama4ForConditionalGeneration", fields).write(folder)


@pytest.fixture(scope="module")
def cluster(
    tmp_path_factory: pytest.TempPathFactory, scout: tuple[Path, PreTrainedModel]
) -> Iterator[ModelCluster]:
    """A worker, and the alias."""
    state = tmp_path_factory.mktemp("cluster")
    with run_model(state, scout[0], ("worker-1",), {"dtype": "float32"}) as running:
        url = ("--redis-url", running.state.redis_url)
        shown = call_hearth(("model", "alias", SCOUT, running.model, *url), {})
        assert shown.returncode == 0, shown.stderr
        yield running


def call(cluster: ModelCluster, messages: list[Any] = MESSAGES, **options: Any) -> httpx.Response:
    """Waits until the gateway knows the alias."""
    path = f"/client/v4/accounts/{TENANT}/ai/run/{SCOUT}"

    def known() -> httpx.Response | None:
        response = cluster.client.post(path, json={"messages": messages, **options})
        return None if "does not exist" in response.text else response

    answered: httpx.Response | None = wait_until(known, poll_s=0.02)
    assert answered is not None
    return answered


def test_documented_call_is_answered(
    cluster: ModelCluster, scout: tuple[Path, PreTrainedModel]
) -> None:
    answer = call(cluster, temperature=0, max_tokens=12)
    assert answer.status_code == 200, answer.text
    body = answer.json()
    assert (body["success"], body["errors"], body["messages"]) == (True, [], [])
    assert body["result"]["usage"]["prompt_tokens"] == len(PROMPT)
    assert body["result"]["usage"]["completion_tokens"] == 12
    assert body["result"]["response"] == text_of(greedy(*scout, num_tokens=12), scout[0])
    streamed = call(cluster, temperature=0, max_tokens=12, stream=True)
    lines = [line.removeprefix("data: ") for line in streamed.text.splitlines() if line]
    assert lines.pop() == "[DONE]"
    texts = [json.loads(line)["response"] for line in lines]
    assert "".join(texts) == body["result"]["response"]


def test_openai_route_of_the_account_gives_the_same_text(cluster: ModelCluster) -> None:
    options = {"temperature": 0, "max_tokens": 12}
    chat = cluster.client.post(
        f"/client/v4/accounts/{TENANT}/ai/v1/chat/completions",
        json={"model": SCOUT, "messages": MESSAGES, **options},
    )
    text = call(cluster, **options).json()["result"]["response"]
    assert chat.json()["choices"][0]["message"]["content"] == text


def test_image_for_a_text_model_is_refused_by_its_part(cluster: ModelCluster) -> None:
    url = {"url": "data:image/png;base64,AA=="}
    parts = [{"type": "text", "text": "What is it?"}, {"type": "image_url", "image_url": url}]
    refused = call(cluster, [{"role": "user", "content": parts}])
    assert refused.status_code == 400
    assert "messages[0].content" in refused.text
    assert "this model takes no images" in refused.text


def greedy(folder: Path, model: PreTrainedModel, num_tokens: int) -> list[int]:
    """By transformers, whose choices are far from equal."""
    tokens = json.loads((folder / "tokenizer.json").read_text())["model"]["vocab"]
    ids = [tokens[{" ": "Ġ", "\n": "Ċ"}.get(each, each)] for each in PROMPT]
    first = len(ids)
    for _ in range(num_tokens):
        with torch.inference_mode():
            logits = model(torch.tensor([ids])).logits[0, -1]
        best, second = logits.topk(2).values.tolist()
        assert best - second > 1e-4
        ids.append(int(logits.argmax()))
    return ids[first:]


def text_of(token_ids: list[int], folder: Path) -> str:
    return Tokenizer.from_file(str(folder / "tokenizer.json")).decode(token_ids)
