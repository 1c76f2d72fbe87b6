"""Bodies of `ai/run`: what they mean, and which are rejected."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.gateway.dialects.workers_ai.errors import LoraNotSupported
from services.gateway.dialects.workers_ai.messages import MAX_MESSAGES
from services.gateway.dialects.workers_ai.run_request import (
    DEFAULT_MAX_TOKENS,
    NEUTRAL_VALUES,
    RUN_FIELDS,
    RunRequest,
    to_generation_requests,
    without_prompts,
)
from services.gateway.request.generation_request import GenerationRequest
from services.gateway.request.prompt import ChatPrompt, TextPrompt
from shared.errors import InvalidRequest, PayloadTooLarge
from tests.support.grids import in_one_test

USER = {"role": "user", "content": "x"}
CHAT = {"messages": [USER]}
IMAGE = {"type": "image_url", "image_url": {"url": "ftp://example.com/a.png"}}


def decoded(**fields: Any) -> RunRequest:
    body = RUN_FIELDS.decode(msgspec.json.encode(fields))
    assert isinstance(body, RunRequest)
    return body


def generations(**fields: Any) -> list[GenerationRequest]:
    return to_generation_requests(decoded(**fields), "tiny")


@pytest.mark.parametrize(
    ("image", "data", "address"),
    [
        ("YQ==", b"YQ==", ""),
        ("DATA:image/png;base64,YQ==", b"YQ==", ""),
        ("https://example.com/a.png", b"", "https://example.com/a.png"),
    ],
)
def test_an_image_is_base64_or_a_url(image: str, data: bytes, address: str) -> None:
    (generation,) = generations(prompt="x", image=image)
    assert isinstance(generation.prompt, ChatPrompt)
    (found,) = generation.prompt.images
    assert (found.data, found.address) == (data, address)


def test_conversation() -> None:
    messages = [
        {"role": "developer", "content": "be short"},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {"role": "assistant", "content": None, "tool_calls": []},
        {"role": "user", "content": {"type": "text", "text": "c"}, "name": "ann"},
    ]
    (generation,) = generations(messages=messages, seed=9_999_999_999, stop="END", max_tokens=7)
    assert generation.prompt == ChatPrompt(
        (
            {"role": "system", "content": "be short"},
            {"role": "user", "content": "a\nb"},
            {"role": "assistant", "content": ""},
            {"role": "user", "content": "c", "name": "ann"},
        )
    )
    assert (generation.model, generation.max_tokens) == ("tiny", 7)
    assert generation.sampling.seed == 9_999_999_999
    assert generation.sampling.stop_strings == ("END",)
    assert generation.is_queueable


def test_prompt_is_the_message_of_a_user_or_raw_text() -> None:
    (templated,) = generations(prompt="hi")
    assert templated.prompt == ChatPrompt(({"role": "user", "content": "hi"},))
    (raw,) = generations(prompt="hi", raw=True)
    assert raw.prompt == TextPrompt("hi", "prompt")
    assert (raw.max_tokens, raw.default_max_tokens) == (None, DEFAULT_MAX_TOKENS)


def test_texts_are_embedded() -> None:
    assert [each.prompt for each in generations(text="a")] == [TextPrompt("a", "text")]
    first, second = generations(text=["a", "b"], pooling="last")
    assert (first.prompt, second.prompt) == (TextPrompt("a", "text[0]"), TextPrompt("b", "text[1]"))
    assert (first.pooling, first.max_tokens, first.shows_output) == ("last", 1, False)
    assert generations(text="a")[0].pooling == "mean"
    assert len(generations(text=["a"] * 100)) == 100


def test_wide_bounds() -> None:
    (hot,) = generations(**CHAT, temperature=5, top_p=2)
    assert (hot.sampling.temperature, hot.sampling.top_p) == (5.0, 1.0)
    (cold,) = generations(**CHAT, temperature=0, top_p=0.5)
    assert (cold.sampling.temperature, cold.sampling.top_p) == (0.0, 0.5)


def test_reject_if_busy() -> None:
    for body in (CHAT, {"prompt": "x"}, {"text": "x"}):
        assert not generations(**body, options={"rejectIfBusy": True})[0].is_queueable
        assert generations(**body, options={"rejectIfBusy": False})[0].is_queueable
        assert generations(**body, options={"other": 1})[0].is_queueable


def test_neutral_values_and_unknown_keys_are_accepted() -> None:
    neutral = {name: values[-1] for name, values in NEUTRAL_VALUES.items()}
    assert len(generations(**CHAT, **neutral, lora="", gateway={"id": "x"})) == 1
    assert len(generations(**CHAT, **dict.fromkeys([*NEUTRAL_VALUES, "prompt", "text"]))) == 1


@in_one_test(
    ("fields", "param"),
    [
        ({}, None),
        ({"messages": None}, None),
        ({"messages": []}, "messages"),
        ({"messages": "hi"}, "messages"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"messages": [{"role": "tool", "content": "x", "tool_call_id": "a"}]},
         "messages[0].tool_call_id"),
        ({"messages": [USER, {**USER, "tool_calls": [{"name": "f"}]}]}, "messages[1].tool_calls"),
        ({"messages": [{"role": "user", "content": [IMAGE]}]}, "messages[0].content[0]"),
        ({**CHAT, "prompt": "x"}, "prompt"),
        ({"prompt": "x", "text": "x"}, "text"),
        ({**CHAT, "raw": True}, "raw"),
        ({"text": "x", "raw": True}, "raw"),
        ({"text": "x", "stream": True}, "stream"),
        ({"text": ["x"] * 101}, "text"),
        ({"text": []}, "text"),
        ({"text": [1]}, "text[0]"),
        ({"text": "x", "pooling": "cls"}, "pooling"),
        ({"prompt": 3}, "prompt"),
        ({**CHAT, "temperature": 5.1}, "temperature"),
        ({**CHAT, "temperature": -0.1}, "temperature"),
        ({**CHAT, "top_p": 2.1}, "top_p"),
        ({**CHAT, "top_k": "many"}, "top_k"),
        ({**CHAT, "max_tokens": 0}, "max_tokens"),
        ({**CHAT, "seed": 1.5}, "seed"),
        ({**CHAT, "frequency_penalty": 2.5}, "frequency_penalty"),
        ({**CHAT, "stream": "yes"}, "stream"),
        ({**CHAT, "options": True}, "options"),
        ({**CHAT, "options": {"rejectIfBusy": "yes"}}, "options.rejectIfBusy"),
        ({"query": "q", "contexts": []}, "contexts"),
        ({**CHAT, "query": "q"}, "query"),
        ({"requests": [{"prompt": "x"}]}, "requests"),
        ({"request_id": "r"}, "request_id"),
        ({**CHAT, "tools": [{"name": "f g"}]}, "tools[0].name"),
        ({**CHAT, "tool_choice": "required"}, "tool_choice"),
        ({"text": "x", "tools": [{"name": "f"}]}, "tools"),
        ({"prompt": "x", "raw": True, "tools": [{"name": "f"}]}, "tools"),
        ({**CHAT, "response_format": {"type": "xml"}}, "response_format.type"),
        ({**CHAT, "guided_json": []}, "guided_json"),
    ],
)  # fmt: skip
def test_bad_body_names_the_field(fields: dict[str, Any], param: str | None) -> None:
    with pytest.raises(InvalidRequest) as caught:
        generations(**fields)
    assert caught.value.param == param
    assert caught.value.http_status == 400


def test_lora_is_not_supported() -> None:
    with pytest.raises(LoraNotSupported):
        generations(**CHAT, lora="name")


def test_numbers_of_messages_and_parts_are_bounded() -> None:
    with pytest.raises(PayloadTooLarge, match="4097"):
        generations(messages=[USER] * (MAX_MESSAGES + 1))
    parts = [{"type": "text", "text": "x"}] * 1025
    with pytest.raises(PayloadTooLarge, match="1025"):
        generations(messages=[{"role": "user", "content": parts}])


@pytest.mark.parametrize(
    "fields", [CHAT, {"prompt": "x"}, {"prompt": "x", "raw": True}, {"text": "x"}]
)
def test_body_without_prompts_keeps_the_options(fields: dict[str, Any]) -> None:
    """The gateway decodes it once more, with the tokens of a large body beside it."""
    body = decoded(**fields, temperature=4.0, options={"rejectIfBusy": True}, max_tokens=3)
    short = RUN_FIELDS.decode(msgspec.json.encode(without_prompts(body, 1)))
    (kept,) = to_generation_requests(short, "tiny")
    (full,) = to_generation_requests(body, "tiny")
    assert kept.prompt.num_chars < 40
    assert type(kept.prompt) is type(full.prompt)
    changed = {"prompt": full.prompt, "sampling": full.sampling}
    assert msgspec.structs.replace(kept, **changed) == full
    assert kept.sampling.temperature == full.sampling.temperature


def test_many_texts_without_prompts() -> None:
    short = without_prompts(decoded(text=["a", "b"]), 2)
    assert len(to_generation_requests(short, "tiny")) == 2


KEYS = [each.encode_name for each in msgspec.structs.fields(RunRequest)]
LEAVES = (
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=9)
)
ROLES = st.sampled_from(["system", "user", "assistant", "tool", "king"])
VALUES = st.recursive(
    LEAVES | st.fixed_dictionaries({"role": ROLES, "content": LEAVES}),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["role", "content", "type", "rejectIfBusy"]), inner)
    ),
    max_leaves=9,
)


@given(st.dictionaries(st.sampled_from([*KEYS, *NEUTRAL_VALUES]), VALUES, max_size=4))
def test_any_object_is_converted_or_rejected(fields: dict[str, Any]) -> None:
    try:
        assert generations(**fields)
    except InvalidRequest as error:
        assert error.message


def test_input_is_that_of_the_responses_api() -> None:
    body = {"input": [{"role": "user", "content": "hi"}], "instructions": "be brief"}
    (generation,) = generations(**body)
    assert generation.prompt == ChatPrompt(
        ({"role": "system", "content": "be brief"}, {"role": "user", "content": "hi"}),
        param="input",
    )
