"""A small random gpt-oss in MXFP4 on split workers: windows and sinks over the network, the texts
of the dequantized checkpoint, and Harmony.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import AddedToken, Tokenizer

from tests.services.cli.cluster.chat_checkpoint import write_byte_tokenizer
from tests.support.cluster.greedy_texts import check_greedy_texts, greedy_texts
from tests.support.cluster.model_cluster import ModelCluster, run_model
from tests.support.engine.families import FAMILIES
from tests.support.engine.quantized import dequantize_folder, quantize

WORKERS = ("prefill-1", "decode-1")
OPTIONS = {"dtype": "float32"}
# Blocks of 32 columns, as MXFP4 has them; sizes are no powers of two.
SIZES = {
    "hidden_size": 96,
    "intermediate_size": 160,
    "num_attention_heads": 6,
    "num_hidden_layers": 2,  # one with a window
}
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
        dtype=torch.bfloat16,
        **SIZES,
    )
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": ends}))
    return folder


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("checkpoints")
    return quantize(write_gpt_oss(folder / "plain"), folder / "tiny", "mxfp4")


@pytest.fixture(scope="module")
def cluster(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ModelCluster]:
    with run_model(tmp_path_factory.mktemp("gpt-oss"), checkpoint, WORKERS, OPTIONS) as running:
        yield running


@pytest.fixture(scope="module")
def dense(checkpoint: Path) -> Path:
    return dequantize_folder(checkpoint, checkpoint.parent / "dense", torch.bfloat16)


def test_tokens_are_those_of_transformers(cluster: ModelCluster, dense: Path) -> None:
    tokenizer = dense / "tokenizer.json"
    vocab_size = Tokenizer.from_file(str(tokenizer)).get_vocab_size(with_added_tokens=False)
    check_greedy_texts(cluster, greedy_texts(dense, tokenizer, vocab_size))


def texts_of(cluster: ModelCluster) -> list[str]:
    """Returns greedy and sampled texts: of each prompt alone, then of all at once, all cached."""

    def complete(number: int) -> str:
        body = {
            "model": cluster.model,
            "prompt": QUESTION[number:],
            "max_tokens": 24,
            "temperature": number % 2,
            "seed": number,
        }
        response = cluster.client.post("/v1/completions", json=body)
        assert response.status_code == 200, response.text
        answer = response.json()
        assert answer["hearth"]["prefill_worker"] != answer["hearth"]["decode_worker"]
        return answer["choices"][0]["text"]

    alone = [complete(number) for number in range(8)]
    with ThreadPoolExecutor(8) as clients:
        assert list(clients.map(complete, range(8))) == alone
    return alone


@pytest.mark.long
def test_texts_are_those_of_the_dequantized_checkpoint(
    cluster: ModelCluster, dense: Path, tmp_path: Path
) -> None:
    """The same in every bit, so sampled texts, too."""
    with run_model(tmp_path, dense, WORKERS, OPTIONS) as other:
        expected = texts_of(other)
    assert len(set(expected)) == len(expected)
    assert texts_of(cluster) == expected


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
    options: dict[str, Any] = {"tools": [TOOL], "max_tokens": 200, "temperature": 1, "seed": 3}
    answer = cluster.complete(QUESTION, tool_choice="required", **options)
    (choice,) = answer["choices"]
    (call,) = choice["message"]["tool_calls"]
    assert (choice["finish_reason"], call["function"]["name"]) == ("tool_calls", "drain")
    assert json.loads(call["function"]["arguments"]).keys() == {"sink", "head"}
    assert not choice["message"]["content"]
    assert "<|call|>" not in json.dumps(answer)
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
        "seed": 3,  # others may think until the end
    }
    answer = cluster.client.post("/v1/responses", json=body)
    assert answer.status_code == 200, answer.text
    items = answer.json()["output"]
    (call,) = [item for item in items if item["type"] == "function_call"]
    assert call["name"] == "drain"
    assert json.loads(call["arguments"]).keys() == {"sink", "head"}


@pytest.mark.long
def test_free_text_of_a_random_model_is_never_lost_or_an_error(cluster: ModelCluster) -> None:
    """Markers come in any order, and the end in the middle of one."""
    for seed in range(6):
        options = {"max_tokens": 40, "temperature": 2, "seed": seed, "tools": [TOOL]}
        answer = cluster.complete(QUESTION, **options)
        (choice,) = answer["choices"]
        message = choice["message"]
        parts = (message["content"], message.get("reasoning_content"), message.get("tool_calls"))
        assert any(parts) or answer["usage"]["completion_tokens"] <= 3
