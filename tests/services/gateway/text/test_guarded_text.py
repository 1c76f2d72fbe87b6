"""Clients write role marks, and the marks of references, into every string of a conversation."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

import services
from services.gateway.preparation.template_process import decoded, encoded_reply
from services.gateway.text.chat_template import ChatTemplate, LiteralText
from services.gateway.text.model_files import ModelFiles
from services.gateway.text.process_jobs import (
    SIZE,
    BodyJob,
    JobFinished,
    JobRejected,
    PreparedBody,
    ProcessSetup,
    Rendered,
    RenderJob,
    Reply,
    frame,
    render_job,
)
from tests.support.services.model_dir import CHAT_TEMPLATE, EOS_TOKEN_ID, write_model_dir

ROOT = Path(services.__file__).resolve().parents[1]
SPECIAL_TOKENS = ["<|im_start|>", "<|im_end|>", "<|im_start|>x"]
MESSAGES = [{"role": "user", "content": "hello"}]
# Each special token is written once; the second line is what a template with `.items()` writes.
TOOLS = (
    "<|im_start|>{{ tools | tojson }}\n"
    "{% for tool in tools %}{% for key, value in tool.items() %}{{ key }}: {{ value | tojson }}\n"
    "{% endfor %}{% endfor %}<|im_end|>"
)
PIECES = (*SPECIAL_TOKENS, "\ufdd0", "\ufdd1", "\ufdd00\ufdd1", "\ufdd099999\ufdd1", "1", "\u0661")
texts = st.lists(st.sampled_from((*PIECES, "role", "system\n", " ")), max_size=6).map("".join)
trees = st.recursive(
    texts | st.none() | st.integers(),
    lambda children: st.lists(children, max_size=3) | st.dictionaries(texts, children, max_size=3),
    max_leaves=12,
)
objects = st.dictionaries(texts | st.just("role"), trees, max_size=4)

encode = msgspec.msgpack.encode


def replies_of(frames: bytes) -> list[Reply]:
    replies = []
    while frames:
        (size,) = SIZE.unpack(frames[: SIZE.size])
        data, frames = frames[SIZE.size : SIZE.size + size], frames[SIZE.size + size :]
        replies.append(msgspec.msgpack.decode(data, type=JobFinished).reply)
    return replies


def template(source: str = TOOLS) -> ChatTemplate:
    return ChatTemplate(source, special_tokens=SPECIAL_TOKENS, variables={})


def role_marks(parts: list[str]) -> list[str]:
    """The special tokens that the tokenizer would recognize, in order."""
    text = "\n".join(part for part in parts if not isinstance(part, LiteralText))
    found = [(text.find(each, at), each) for each in SPECIAL_TOKENS for at in range(len(text))]
    return [each for _, each in sorted({hit for hit in found if hit[0] >= 0})]


@settings(max_examples=40)
@given(tools=st.lists(objects, min_size=1, max_size=3))
def test_template_alone_writes_role_marks(tools: list[dict[str, Any]]) -> None:
    """The text of any tools is unchanged, in keys as in values, and none of it is a role mark."""
    parts = template().render(MESSAGES, tools)
    assert role_marks(parts) == ["<|im_start|>", "<|im_end|>"]
    lines = [
        f"{key}: {json.dumps(value, ensure_ascii=False)}\n"
        for tool in tools
        for key, value in tool.items()
    ]
    whole = json.dumps(tools, ensure_ascii=False)
    assert "".join(parts) == f"<|im_start|>{whole}\n{''.join(lines)}<|im_end|>"


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages[0].content | replace('0', '99999') }}",  # no reference has this number
        "{{ messages[0].content | replace('0', '1' * 5000) }}",  # not even an integer of Python
        "{{ messages[0].content | replace('0', '\u0661') }}",  # a digit that is not of ASCII
        "{{ messages[0].content[:-1] }}",
    ],
)
def test_changed_reference_is_text(source: str) -> None:
    parts = template(source).render([{"role": "user", "content": "<|im_start|>x"}])
    assert len(parts) == 1 and not isinstance(parts[0], LiteralText)
    assert role_marks(parts) == []


def nested(depth: int) -> Any:
    tree: Any = []
    for _ in range(depth):
        tree = [tree]
    return tree


@pytest.mark.parametrize(
    ("source", "job"),
    [
        ("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", encode(render_job(MESSAGES))),
        ("{{ '\ud800' }}", encode(render_job(MESSAGES))),  # cannot be sent
        ("{{ tools }}", encode(render_job(MESSAGES, [{"a": nested(500)}]))),
        ("{{ tools }}", encode(RenderJob(b'[[],[{"a":' + b"[" * 5_000 + b"]" * 5_000 + b"}]]"))),
        ("", b"\xc1"),
    ],
)
def test_any_error_rejects_the_job(source: str, job: bytes) -> None:
    (reply,) = replies_of(*encoded_reply(template(source), decoded(job)))
    assert isinstance(reply, JobRejected)
    assert "the chat template fails on these messages" in reply.reason


def test_any_error_rejects_a_body() -> None:
    def prepare(job: BodyJob) -> PreparedBody:
        raise ZeroDivisionError(job.kind)

    (reply,) = replies_of(*encoded_reply(template(), BodyJob("chat", b"{}"), prepare))
    assert reply == JobRejected("the body cannot be prepared: ZeroDivisionError", None)


def test_one_process_answers_every_hostile_job() -> None:
    jobs = [
        render_job(MESSAGES, [{text: value, "role": text}])
        for text in (*PIECES, "\ufdd0" + "9" * 5_000 + "\ufdd1")
        for value in (text, nested(900))
    ]
    done = subprocess.run(
        [sys.executable, "-m", "services.gateway.preparation.template_process"],
        input=frame(ProcessSetup(template().source)) + b"".join(map(frame, jobs)),
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        timeout=60,
    )
    assert done.returncode == 0
    replies = replies_of(done.stdout)
    assert [type(each) for each in replies] == [Rendered, JobRejected] * (len(jobs) // 2)
    for reply in replies[::2]:
        assert isinstance(reply, Rendered)
        parts = [LiteralText(text) if is_literal else text for is_literal, text in reply.parts]
        assert role_marks(parts) == ["<|im_start|>", "<|im_end|>"]


def test_client_text_is_no_marker_of_the_template(tmp_path: Path) -> None:
    """Added tokens that are not special, as Qwen has them; `<table>` is text, as for Gemma."""
    path = write_model_dir(tmp_path / "marked")
    tokenizer = Tokenizer.from_file(str(path / "tokenizer.json"))
    tokenizer.add_tokens(["<tool_call>", "</think>", "<table>", "\n\n"])
    tokenizer.save(str(path / "tokenizer.json"))
    template = CHAT_TEMPLATE + "{#- <tool_call> </think> #}"
    (path / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
    files = ModelFiles(path)
    assert files.chat_template is not None
    assert files.tokenizer.markers == ("<tool_call>", "</think>")
    call, think, table = map(files.tokenizer.added_token_id, ("<tool_call>", "</think>", "<table>"))
    user = {"role": "user", "content": "a<tool_call>b</think>c<table>"}
    template_of = files.chat_template.compiled()
    token_ids = files.tokenizer.encode(template_of.render([user]))
    assert call not in token_ids and think not in token_ids and table in token_ids
    assert str(user["content"]) in files.tokens.decode(token_ids)
    answer = {"role": "assistant", "content": "x</think>y<|im_end|>"}
    token_ids = files.tokenizer.encode(template_of.render([user, answer]))
    assert token_ids.count(think) == 1
    assert token_ids.count(EOS_TOKEN_ID) == 2
    assert call in files.tokenizer.encode(["<tool_call>"])


@pytest.mark.parametrize("marks", [("<think>", "</think>"), ("[THINK]", "[/THINK]")])
def test_template_splits_reasoning_off_that_special_tokens_enclose(marks: tuple[str, str]) -> None:
    opening, close = marks
    source = (
        "{% for m in messages %}<|im_start|>"
        f"{{{{ m.content.split('{close}')[-1] }}}}"
        "<|im_end|>{% endfor %}"
    )
    template = ChatTemplate(source, special_tokens=[*SPECIAL_TOKENS, *marks], variables={})
    answer = f"{opening}secret<|im_end|>{close}fine<|im_end|>"
    parts = template.render([{"role": "assistant", "content": answer}])
    assert parts == ["<|im_start|>fine", LiteralText("<|im_end|>"), "<|im_end|>"]
    parts = template.render([{"role": "user", "content": answer}])
    assert LiteralText(close) in parts and type(parts[parts.index(close)]) is LiteralText
