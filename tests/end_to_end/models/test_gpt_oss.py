"""A small random gpt-oss on split workers: windows and sinks over the network, and Harmony."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer

from tests.services.cli.cluster.chat_checkpoint import write_byte_tokenizer
from tests.support.cluster.model_cluster import ModelCluster, run_model
from tests.support.engine.families import FAMILIES

WORKERS = ("prefill-1", "decode-1")
MARKS = [f"<|{each}|>" for each in ("start", "end", "message", "channel", "constrain", "return")]
# What published templates do, in short: no analysis of earlier turns; calls and their results.
TEMPLATE = """
{%- if reasoning_effort %}
{{- '<|start|>system<|message|>Reasoning: ' ~ reasoning_effort ~ '<|end|>' }}
{%- endif %}
{%- for tool in tools or [] %}
{{- '<|start|>developer<|message|>type ' ~ tool.function.name ~ ' = (_: ' }}
{{- tool.function.parameters | tojson }}{{ ') => any;<|end|>' }}
{%- endfor %}
{%- for message in messages %}
{%- if message.role == 'assistant' and message.tool_calls %}
{%- set call = message.tool_calls[0].function %}
{{- '<|start|>assistant to=functions.' ~ call.name ~ '<|channel|>commentary json<|message|>' }}
{{- call.arguments | tojson }}{{ '<|call|>' }}
{%- elif message.role == 'assistant' %}
{{- '<|start|>assistant<|channel|>final<|message|>' ~ message.content ~ '<|end|>' }}
{%- elif message.role == 'tool' %}
{{- '<|start|>functions to=assistant<|channel|>commentary<|message|>' ~ message.content }}
{{- '<|end|>' }}
{%- else %}
{{- '<|start|>' ~ message.role ~ '<|message|>' ~ message.content ~ '<|end|>' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|start|>assistant' }}{% endif %}
"""
QUESTION = "Where do the weights go that no key takes?"
SCHEMA = {
    "type": "object",
    "properties": {"sink": {"enum": ["first", "last"]}, "head": {"enum": [1, 2, 3]}},
    "required": ["sink", "head"],
    "additionalProperties": False,
}
TOOL = {"type": "function", "function": {"name": "drain", "parameters": SCHEMA}}


def write_gpt_oss(folder: Path) -> Path:
    """Returns `folder`. Both ends of a turn end an answer, as in generation_config."""
    write_byte_tokenizer(folder, TEMPLATE)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    marks = [*MARKS, "<|call|>"]
    tokenizer.add_special_tokens([AddedToken(each, special=True) for each in marks])
    tokenizer.save(str(folder / "tokenizer.json"))
    ends = [tokenizer.token_to_id(each) for each in ("<|return|>", "<|call|>")]
    FAMILIES["gpt-oss"].write(
        folder,
        vocab_size=tokenizer.get_vocab_size(),
        eos_token_id=ends,
        max_position_embeddings=2048,
    )
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": ends}))
    return folder


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ModelCluster]:
    folder = tmp_path_factory.mktemp("gpt-oss")
    model = write_gpt_oss(folder / "tiny")
    with run_model(folder, model, WORKERS, {"dtype": "float32"}) as running:
        yield running


def test_schema_is_followed_in_the_final_channel(cluster: ModelCluster) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "n", "strict": True, "schema": SCHEMA}}
    options = {"max_tokens": 200, "thinking_token_budget": 8, "response_format": form}
    answer = cluster.complete(QUESTION, **options)
    (choice,) = answer["choices"]
    assert json.loads(choice["message"]["content"]).keys() == {"sink", "head"}
    assert choice["finish_reason"] == "stop"
    assert answer["hearth"]["num_pushed_tokens"] > 0
    again = cluster.complete(QUESTION, **options)
    assert again["choices"] == answer["choices"]
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] > 0


def test_call_ends_with_its_own_token_and_its_result_is_read(cluster: ModelCluster) -> None:
    options: dict[str, Any] = {"tools": [TOOL], "max_tokens": 200, "temperature": 1, "seed": 5}
    answer = cluster.complete(QUESTION, tool_choice="required", **options)
    (choice,) = answer["choices"]
    (call,) = choice["message"]["tool_calls"]
    assert (choice["finish_reason"], call["function"]["name"]) == ("tool_calls", "drain")
    assert json.loads(call["function"]["arguments"]).keys() == {"sink", "head"}
    assert not choice["message"]["content"]
    turns = [
        {"role": "user", "content": QUESTION},
        {"role": "assistant", "content": None, "tool_calls": [call], "reasoning_content": "hm"},
        {"role": "tool", "tool_call_id": call["id"], "content": "It is gone."},
    ]
    body = {"model": cluster.model, "messages": turns, "max_tokens": 12, "reasoning_effort": "low"}
    following = cluster.client.post("/v1/chat/completions", json=body)
    assert following.status_code == 200, following.text


def test_responses_have_items_of_both_channels(cluster: ModelCluster) -> None:
    tool = {"type": "function", "name": "drain", "parameters": SCHEMA}
    body = {
        "model": cluster.model,
        "input": QUESTION,
        "tools": [tool],
        "tool_choice": "required",
        "reasoning": {"effort": "low"},
        "max_output_tokens": 200,
    }
    answer = cluster.client.post("/v1/responses", json=body)
    assert answer.status_code == 200, answer.text
    items = answer.json()["output"]
    (call,) = [item for item in items if item["type"] == "function_call"]
    assert call["name"] == "drain"
    assert json.loads(call["arguments"]).keys() == {"sink", "head"}


def test_free_text_of_a_random_model_is_never_lost_or_an_error(cluster: ModelCluster) -> None:
    """Markers come in any order, and the end in the middle of one."""
    for seed in range(6):
        options = {"max_tokens": 40, "temperature": 2, "seed": seed, "tools": [TOOL]}
        answer = cluster.complete(QUESTION, **options)
        (choice,) = answer["choices"]
        message = choice["message"]
        parts = (message["content"], message.get("reasoning_content"), message.get("tool_calls"))
        assert any(parts) or answer["usage"]["completion_tokens"] <= 3
