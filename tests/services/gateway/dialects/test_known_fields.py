"""Every request field that clients of other servers send: none that changes an answer is ignored.

Each is sent to each dialect with a value that changes something. The dialect takes it over into the
request, or refuses it by name; all others are listed here, with why they change no answer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import pytest

from services.gateway.dialects.anthropic.request import MESSAGES_FIELDS, MessagesRequest
from services.gateway.dialects.anthropic.request import to_generation_requests as messages_of
from services.gateway.dialects.openai.chat import (
    CHAT_FIELDS,
    ChatCompletionRequest,
    to_generation_request,
)
from services.gateway.dialects.openai.completions import COMPLETION_FIELDS, CompletionRequest
from services.gateway.dialects.openai.completions import to_generation_requests as completions_of
from services.gateway.dialects.openai.embeddings import EmbeddingRequest
from services.gateway.dialects.ranking.bodies import RerankRequest, ScoreRequest
from services.gateway.dialects.responses.fields import RESPONSES_FIELDS, ResponsesRequest
from services.gateway.dialects.responses.request import to_generation_request as response_of
from services.gateway.dialects.tokenization.bodies import TokenizeRequest
from services.gateway.dialects.workers_ai.run_request import RUN_FIELDS, RunRequest
from services.gateway.dialects.workers_ai.run_request import to_generation_requests as runs_of
from services.gateway.request.generation_request import GenerationRequest
from services.gateway.request.supported_fields import IGNORED
from shared.errors import InvalidRequest

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
TOOL = {"type": "function", "function": {"name": "f", "parameters": SCHEMA}}

OPENAI: dict[str, Any] = {
    "audio": {"voice": "alloy", "format": "mp3"},
    "best_of": 3,
    "echo": True,
    "frequency_penalty": 1,
    "function_call": "auto",
    "functions": [{"name": "f"}],
    "logit_bias": {"7": 5},
    "logprobs": True,
    "max_completion_tokens": 5,
    "max_tokens": 6,
    "metadata": {"a": "b"},
    "modalities": ["text", "audio"],
    "moderation": {"model": "m"},
    "n": 2,
    "parallel_tool_calls": False,
    "prediction": {"type": "content", "content": "x"},
    "presence_penalty": 1,
    "prompt_cache_key": "k",
    "prompt_cache_retention": "24h",
    "reasoning_effort": "high",
    "response_format": {"type": "json_object"},
    "safety_identifier": "s",
    "seed": 3,
    "service_tier": "flex",
    "stop": ["x"],
    "store": True,
    "stream": True,
    "suffix": "x",
    "temperature": 0.3,
    "tool_choice": "required",
    "tools": [TOOL],
    "top_logprobs": 2,
    "top_p": 0.5,
    "user": "u",
    "verbosity": "low",
    "web_search_options": {"user_location": None},
}
VLLM: dict[str, Any] = {
    "add_generation_prompt": False,
    "add_special_tokens": False,
    "allowed_token_ids": [1],
    "bad_words": ["x"],
    "cache_salt": "s",
    "chat_template": "x",
    "chat_template_kwargs": {"enable_thinking": False},
    "continue_final_message": True,
    "documents": [{"title": "t", "text": "x"}],
    "early_stopping": True,
    "ec_transfer_params": {"a": 1},
    "guided_choice": ["a"],
    "guided_decoding_backend": "xgrammar",
    "guided_grammar": 'start: "a"',
    "guided_json": SCHEMA,
    "guided_regex": "a",
    "guided_whitespace_pattern": " ?",
    "ignore_eos": True,
    "include_reasoning": False,
    "include_stop_str_in_output": True,
    "kv_transfer_params": {"a": 1},
    "length_penalty": 2,
    "logits_processors": ["x"],
    "logprob_token_ids": [1],
    "media_io_kwargs": {"image": {}},
    "min_p": 0.1,
    "min_tokens": 2,
    "mm_processor_kwargs": {"a": 1},
    "priority": 1,
    "prompt_embeds": "AAAA",
    "prompt_logprobs": 1,
    "repetition_detection": {"max_pattern_size": 3},
    "repetition_penalty": 1.5,
    "request_id": "r",
    "return_mm_kwargs": False,
    "return_prompt_text": True,
    "return_token_ids": True,
    "return_token_offsets": True,
    "return_tokens_as_token_ids": True,
    "routed_experts_prompt_start": 3,
    "session_id": "s",
    "skip_special_tokens": False,
    "spaces_between_special_tokens": False,
    "stop_token_ids": [4],
    "stream_interval": 4,
    "structural_tag": {"type": "structural_tag"},
    "structured_outputs": {"choice": ["a"]},
    "thinking_token_budget": 9,
    "top_k": 4,
    "truncate_prompt_tokens": 5,
    "truncation_side": "left",
    "use_beam_search": True,
    "vllm_xargs": {"a": 1},
    "watermarking": True,
}
SGLANG: dict[str, Any] = {
    "bootstrap_host": "h",
    "bootstrap_port": 1,
    "bootstrap_room": 1,
    "custom_logit_processor": "x",
    "custom_params": {"a": 1},
    "data_parallel_rank": 1,
    "disagg_prefill_dp_rank": 1,
    "ebnf": 'root ::= "a"',
    "extra_key": "k",
    "images_config": {"a": 1},
    "input_ids": [1, 2],
    "json_schema": '{"type": "object"}',
    "lora_path": "x",
    "max_dynamic_patch": 2,
    "min_dynamic_patch": 1,
    "ngram_corpus_id": "c",
    "no_stop_trim": True,
    "regex": "a",
    "return_cached_tokens_details": True,
    "return_hidden_states": True,
    "return_meta_info": True,
    "return_prompt_token_ids": True,
    "return_routed_experts": True,
    "rid": "r",
    "routed_dp_rank": 1,
    "routed_experts_start_len": 1,
    "separate_reasoning": False,
    "session_params": {"id": "s"},
    "stop_regex": "a+",
    "stream_reasoning": False,
    "task": "title",
    "use_audio_in_video": True,
}
TGI: dict[str, Any] = {
    "adapter_id": "x",
    "decoder_input_details": True,
    "details": True,
    "do_sample": False,
    "grammar": {"type": "json", "value": SCHEMA},
    "guideline": "x",
    "inputs": "x",
    "max_new_tokens": 5,
    "parameters": {"top_k": 3},
    "return_full_text": True,
    "tool_prompt": "x",
    "top_n_tokens": 2,
    "truncate": 3,
    "typical_p": 0.5,
    "watermark": True,
}
WORKERS_AI: dict[str, Any] = {
    "contexts": [{"text": "c"}],
    "image": [1],
    "image_b64": "AA",
    "input": "x",
    "input_text": "x",
    "lora": "x",
    "max_length": 3,
    "query": "q",
    "raw": True,
    "reasoning": {"effort": "high"},
    "requests": [{}],
    "source_lang": "en",
    "target_lang": "de",
}
LLAMA_CPP: dict[str, Any] = {
    "cache_prompt": False,
    "dry_multiplier": 1,
    "dynatemp_range": 1,
    "format": "json",
    "id_slot": 1,
    "keep_alive": "5m",
    "mirostat": 2,
    "n_predict": 5,
    "n_probs": 5,
    "num_predict": 5,
    "options": {"num_ctx": 5},
    "repeat_penalty": 1.5,
    "samplers": ["top_k"],
    "tfs_z": 0.5,
    "think": True,
    "enable_thinking": False,
    "xtc_probability": 0.5,
}
KNOWN = {**OPENAI, **VLLM, **SGLANG, **TGI, **WORKERS_AI, **LLAMA_CPP}

# Fields that change no answer, and why.
HARMLESS = {
    **dict.fromkeys(("metadata", "user", "safety_identifier", "store"), "for the provider's logs"),
    **dict.fromkeys(("moderation", "service_tier"), "of the provider's business"),
    **dict.fromkeys(("prediction", "ngram_corpus_id"), "a hint for speed"),
    **dict.fromkeys(("prompt_cache_retention", "cache_prompt", "keep_alive"), "of the cache"),
    **dict.fromkeys(("request_id", "rid", "extra_key", "session_id", "id_slot"), "names"),
    **dict.fromkeys(("kv_transfer_params", "ec_transfer_params"), "between servers"),
    **dict.fromkeys(("bootstrap_host", "bootstrap_port", "bootstrap_room"), "between servers"),
    **dict.fromkeys(("data_parallel_rank", "routed_dp_rank", "disagg_prefill_dp_rank"), "routing"),
    **dict.fromkeys(("media_io_kwargs", "mm_processor_kwargs", "images_config"), "of media"),
    **dict.fromkeys(("max_dynamic_patch", "min_dynamic_patch", "use_audio_in_video"), "of media"),
    **dict.fromkeys(("return_mm_kwargs", "return_token_offsets"), "of another endpoint"),
    **dict.fromkeys(("routed_experts_prompt_start", "routed_experts_start_len"), "of a field"),
    **dict.fromkeys(("stream_interval", "stream_reasoning"), "the sizes of a stream's events"),
    "guided_decoding_backend": "a library",
    "custom_params": "of custom_logit_processor, which is refused",
    "truncation_side": "of truncate_prompt_tokens, which is refused",
    "return_cached_tokens_details": "about the cache",
}
# Of one dialect.
HARMLESS_IN: dict[str, dict[str, str]] = {
    "chat": {
        "add_special_tokens": "the template writes them",
        **dict.fromkeys(
            ("image", "image_b64", "input", "input_text", "contexts", "query", "requests"),
            "of models and bodies of another API",
        ),
        **dict.fromkeys(("max_length", "source_lang", "target_lang", "raw", "lora"), "another API"),
        "suffix": "of text completions",
    },
    "completions": {
        **dict.fromkeys(
            ("image", "image_b64", "input", "input_text", "contexts", "query", "requests"),
            "of models and bodies of another API",
        ),
        **dict.fromkeys(("max_length", "source_lang", "target_lang", "raw", "lora"), "another API"),
        **dict.fromkeys(("parallel_tool_calls", "include_reasoning"), "of chats"),
    },
    "responses": {
        "add_special_tokens": "the template writes them",
        **dict.fromkeys(
            ("image", "image_b64", "input_text", "contexts", "query", "requests"),
            "of models and bodies of another API",
        ),
        **dict.fromkeys(("max_length", "source_lang", "target_lang", "raw", "lora"), "another API"),
        "suffix": "of text completions",
    },
    "run": {
        **dict.fromkeys(("prompt_cache_key", "cache_salt"), "of the cache"),
        "priority": "the turn of a request",
    },
    "messages": {
        "add_special_tokens": "the template writes them",
        **dict.fromkeys(
            ("image", "image_b64", "input", "input_text", "contexts", "query", "requests"),
            "of models and bodies of another API",
        ),
        **dict.fromkeys(("max_length", "source_lang", "target_lang", "raw", "lora"), "another API"),
        **dict.fromkeys(("prompt_cache_key", "cache_salt"), "of the cache"),
        **dict.fromkeys(("priority", "options"), "of another API"),
        "stream": "the form of the response",
        "logprobs_mode": "of logprobs",
    },
}

NOT_NULL = {"add_special_tokens"}

Convert = Callable[[dict[str, Any]], Sequence[GenerationRequest]]
MESSAGES = [{"role": "user", "content": "x"}]


def chat(fields: dict[str, Any]) -> Sequence[GenerationRequest]:
    body = CHAT_FIELDS.decode(msgspec.json.encode({"messages": MESSAGES, **fields}))
    return [to_generation_request(body, "m")]


def completions(fields: dict[str, Any]) -> Sequence[GenerationRequest]:
    body = COMPLETION_FIELDS.decode(msgspec.json.encode({"prompt": "x", **fields}))
    return completions_of(body, "m")


def run(fields: dict[str, Any]) -> Sequence[GenerationRequest]:
    return runs_of(RUN_FIELDS.decode(msgspec.json.encode({"messages": MESSAGES, **fields})), "m")


def messages(fields: dict[str, Any]) -> Sequence[GenerationRequest]:
    if fields.get("tools"):
        fields = {**fields, "tools": [{"name": "f", "input_schema": SCHEMA}]}
    if fields.get("tool_choice"):
        fields = {**fields, "tool_choice": {"type": "any"}}
    required = {"model": "m", "max_tokens": 9, "messages": MESSAGES}
    given = {name: each for name, each in fields.items() if each or name not in required}
    body = MESSAGES_FIELDS.decode(msgspec.json.encode({**required, **given}))
    return messages_of(body, "m")


def responses(fields: dict[str, Any]) -> Sequence[GenerationRequest]:
    fields = {**fields, "input": fields.get("input") or "y"}
    body = RESPONSES_FIELDS.decode(msgspec.json.encode(fields))
    return [response_of(body, "m")]


DIALECTS: dict[str, Convert] = {
    "chat": chat,
    "completions": completions,
    "run": run,
    "messages": messages,
    "responses": responses,
}
NEEDED_WITH = {
    "top_logprobs": {"logprobs": True},
    "tool_choice": {"tools": [TOOL]},
    "parallel_tool_calls": {"tools": [TOOL]},
}


@pytest.mark.parametrize("dialect", DIALECTS)
def test_each_field_is_honoured_or_refused_or_harmless(dialect: str) -> None:
    assert [field for field in KNOWN if not is_known(dialect, field)] == []


def is_known(dialect: str, field: str) -> bool:
    """Whether it is honoured, refused by its name, or harmless."""
    convert, value = DIALECTS[dialect], KNOWN[field]
    if dialect == "completions" and field == "logprobs":
        value = 1
    others = NEEDED_WITH.get(field, {}) if dialect in ("chat", "messages", "responses") else {}
    if dialect == "messages" and field == "top_logprobs":
        others = {}
    if dialect == "responses":
        others = {name: each for name, each in others.items() if name != "logprobs"}
    harmless = {**HARMLESS, **HARMLESS_IN[dialect]}
    try:
        is_honoured = plain(convert({**others, field: value})) != plain(convert(others))
    except InvalidRequest as error:
        return error.param is not None and error.param.startswith(field)
    return is_honoured or field in harmless


def plain(generations: Sequence[GenerationRequest]) -> list[GenerationRequest]:
    """Without the names of unknown fields, which change no answer."""
    return [
        msgspec.structs.replace(each, sampling=without_names(each.sampling)) for each in generations
    ]


def without_names(body: Any) -> Any:
    if IGNORED not in body.__struct_fields__:
        return body
    base = type(body).__mro__[1]
    return base(**{name: getattr(body, name) for name in base.__struct_fields__})


@pytest.mark.parametrize("dialect", DIALECTS)
def test_null_is_as_a_missing_field(dialect: str) -> None:
    assert DIALECTS[dialect](dict.fromkeys({*KNOWN} - NOT_NULL)) == DIALECTS[dialect]({})


@pytest.mark.parametrize(
    "body",
    [
        *(ChatCompletionRequest, CompletionRequest, EmbeddingRequest, MessagesRequest),
        *(ResponsesRequest, RunRequest, RerankRequest, ScoreRequest, TokenizeRequest),
    ],
)
def test_null_is_as_good_as_a_missing_field(body: type[msgspec.Struct]) -> None:
    """Many clients write all fields that they know."""
    for field in msgspec.structs.fields(body):
        if not field.required and not field.name.startswith("hearth_"):
            assert msgspec.convert(None, field.type) is None, field.name
