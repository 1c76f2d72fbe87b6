"""Tokens of a real tokenizer, whose markers are special tokens, through the output of a request."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer

from services.gateway.models.served_text import ServedModel
from services.gateway.observability.metrics.gateway_metrics import GatewayMetrics
from services.gateway.output.choice_output import MAX_DELTA_TOKENS
from services.gateway.output.events import Event, Finished, TextDelta
from services.gateway.request.conversation import ReasoningOptions
from services.gateway.request.generation_request import GenerationRequest
from services.gateway.request.prompt import PackedPrompt
from services.gateway.request.request_builder import RequestBuilder, assembler_of
from services.gateway.request.request_output import RequestOutput
from services.gateway.request.sampling import SamplingFields
from services.gateway.structured.grammars.constraint import OutputConstraint
from services.gateway.structured.tools.families import HARMONY, HERMES, LLAMA_JSON, with_thinking
from services.gateway.structured.tools.family import Family
from services.gateway.structured.tools.tool import Tool, ToolOptions
from services.gateway.text.model_files import ModelFiles
from shared.clock import MonotonicClock
from shared.config import GatewayConfig
from shared.messages import Finish, Served, TokenLogprobs
from shared.packing import pack_token_ids
from shared.randomness import SystemRandomness
from shared.tenancy.tenant import TenantRecord
from tests.services.gateway.peer import CARD
from tests.services.gateway.structured.tools.test_response_parser import Parsed
from tests.support.services.model_dir import served_text

FAMILY = with_thinking(HERMES, "<think>", "</think>")
MARKERS = ("<tool_call>", "</tool_call>", "<think>", "</think>")
SERVED = Served(num_cached_tokens=0, prefill_worker_id=None)
STOP, LENGTH = (Finish(reason=reason, served=SERVED) for reason in ("stop", "length"))
TOOLS = ToolOptions(tools=(Tool(name="clock"),))
CALL = '<tool_call>{"name": "clock", "arguments": {"s": "</tool_call> no END"}}</tool_call>'
SCORED = TokenLogprobs(-0.5)


@pytest.fixture(scope="module")
def files(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> ModelFiles:
    """With the markers as special tokens."""
    path = tmp_path_factory.mktemp("marked")
    for each in model_dir.iterdir():
        (path / each.name).write_bytes(each.read_bytes())
    tokenizer = Tokenizer.from_file(str(path / "tokenizer.json"))
    tokenizer.add_special_tokens([AddedToken(each, special=True) for each in MARKERS])
    tokenizer.save(str(path / "tokenizer.json"))
    return ModelFiles(path)


class Response:
    """One request's output, and what a client puts together of it."""

    def __init__(self, config: GatewayConfig, files: ModelFiles, **options: Any) -> None:
        stop, family = options.pop("stop", None), options.pop("family", FAMILY)
        builder = RequestBuilder(config, SystemRandomness())
        tail = files.tokenizer.tokenizer.encode(options.pop("tail", "a"), add_special_tokens=False)
        generation = GenerationRequest(
            model=CARD.name,
            prompt=PackedPrompt(pack_token_ids(tail.ids), "messages", is_chat=True),
            sampling=SamplingFields(stop=stop),
            **{"max_tokens": 400, "tools": TOOLS, **options},
        )
        prepared = builder.build(
            generation,
            ServedModel(CARD, served_text(files, family)),
            tenant=TenantRecord(tenant_id="t"),
            request_id="r",
            max_payload_bytes=1 << 20,
        )
        assemblers = [assembler_of(prepared)]
        self.files = files
        self.output = RequestOutput(prepared, assemblers, GatewayMetrics(), MonotonicClock())
        self.has_logprobs = generation.num_logprobs is not None
        self.events: list[Event] = []

    def ids(self, text: str) -> list[int]:
        """`</tool_call> no` inside of an argument is no marker."""
        found: list[int] = []
        for piece in re.split("(?<=</tool)(?=_call> no)", text):
            found += self.files.tokenizer.tokenizer.encode(piece, add_special_tokens=False).ids
        return found

    def add(self, text: str, finish: Finish | None = STOP, *, takes: bool = True) -> Parsed:
        for token_id in self.ids(text):
            if not self.output.on_tokens(0, (token_id,), (SCORED,) if self.has_logprobs else ()):
                finish = None
                break
            if takes:
                self.events += self.output.take()
        if finish is not None:
            self.output.on_finish(0, finish)
        self.events += self.output.take()
        while self.output.has_more:
            self.events += self.output.take()
        return Parsed(self.events)

    @property
    def reason(self) -> str:
        (end,) = [each for each in self.events if isinstance(each, Finished)]
        return end.reason

    @property
    def scored_text(self) -> str:
        tokens = [t for e in self.events if isinstance(e, TextDelta) for t in e.tokens]
        decode = self.files.tokenizer.tokenizer.decode
        return str(decode([each.token_id for each in tokens], skip_special_tokens=False))


@pytest.fixture
def config(gateway_config: GatewayConfig) -> GatewayConfig:
    return gateway_config


def test_content_reasoning_and_calls(config: GatewayConfig, files: ModelFiles) -> None:
    response = Response(config, files)
    text = f"<think>\nhm </think>\n\nhello{CALL}{CALL}"
    found = response.add(text)
    assert (found.thinking, found.content) == ("hm", "hello")
    assert [json.loads(each) for each in found.arguments] == [{"s": "</tool_call> no END"}] * 2
    assert (found.ended, response.reason) == ([0, 1], "tool_calls")
    assert response.output.num_output_tokens == len(response.ids(text))


@pytest.mark.parametrize("is_shown", [True, False])
def test_reasoning_is_counted_shown_or_not(
    config: GatewayConfig, files: ModelFiles, is_shown: bool
) -> None:
    response = Response(config, files, reasoning=ReasoningOptions(is_shown=is_shown), tools=None)
    found = response.add("<think>the lazy dog</think>hello")
    assert (found.thinking, found.content) == ("the lazy dog" * is_shown, "hello")
    assert response.output.num_reasoning_tokens == len(response.ids("<think>the lazy dog</think>"))
    assert response.reason == "stop"


def test_stop_strings_are_of_content_only(config: GatewayConfig, files: ModelFiles) -> None:
    response = Response(config, files, stop=["END"])
    found = response.add(f"<think>END</think>a{CALL}b EN{CALL}DcENDd")
    assert (found.thinking, found.content) == ("END", "ab ENDc")
    assert len(found.ended) == 2
    assert response.reason == "tool_calls"
    assert response.output.num_output_tokens < len(response.ids(CALL)) * 2 + 24


def test_logprobs_are_of_content_only(config: GatewayConfig, files: ModelFiles) -> None:
    response = Response(config, files, num_logprobs=0)
    found = response.add(f"<think>why</think>hello 😀{CALL}world")
    assert (found.content, response.scored_text) == ("hello 😀world", "hello 😀world")


def test_long_backlog_is_taken_in_parts(config: GatewayConfig, files: ModelFiles) -> None:
    text = "the quick brown fox 😀 jumps" * 40
    response = Response(config, files, num_logprobs=2, max_tokens=500)
    found = response.add(f"<think>{text[:60]}</think>{text}"[:700], takes=False)
    deltas = [each for each in response.events if isinstance(each, TextDelta)]
    assert max(len(each.tokens) for each in deltas) == MAX_DELTA_TOKENS
    assert found.content == response.scored_text == text[: 700 - 60 - len("<think></think>")]
    assert response.output.num_buffered_bytes == 0


@pytest.mark.parametrize(
    ("text", "finish", "expected"),
    [
        (CALL[:-26], LENGTH, ("length", [], "")),  # in the arguments
        (CALL + CALL[:-26], LENGTH, ("length", [0], "")),
        (CALL[: -len("</tool_call>")], LENGTH, ("length", [0], "")),
        (CALL[: -len("</tool_call>") - 1], STOP, ("tool_calls", [0], "")),  # lacks a bracket
        (CALL[: -len("}</tool_call>")] + "</tool_call>hi", STOP, ("tool_calls", [0], "hi")),
        (CALL.replace(': {"s', ": {s"), STOP, ("stop", [], None)),
        (CALL.replace("clock", "unknown"), STOP, ("stop", [], None)),
    ],
)
def test_cut_and_malformed_calls(
    config: GatewayConfig, files: ModelFiles, text: str, finish: Finish, expected: Any
) -> None:
    """What was not sent as a call is content; complete arguments make a complete call."""
    response = Response(config, files)
    found = response.add(text, finish)
    reason, ended, content = expected
    assert (response.reason, found.ended) == (reason, ended)
    if content is not None:
        assert found.content == content
        return
    shown = "".join([*found.arguments, found.content])
    assert "no END" in shown and "</tool_call>" in shown
    assert found.names or "unknown" in shown


def test_text_of_a_marker_is_no_marker(config: GatewayConfig, files: ModelFiles) -> None:
    response = Response(config, files)
    for piece in ("<tool", "_call>{}"):
        response.add(piece, None)
    assert response.add("").content == "<tool_call>{}"


def test_split_at_any_token_the_events_are_equal(config: GatewayConfig, files: ModelFiles) -> None:
    def joined(size: int) -> Sequence[Any]:
        response = Response(config, files)
        ids = response.ids(f"<think>hm</think>hello{CALL}")
        for first in range(0, len(ids), size):
            response.output.on_tokens(0, ids[first : first + size], ())
            response.events += response.output.take()
        found = vars(response.add(""))
        return sorted(found.items())

    assert joined(1) == joined(3) == joined(1000)


JSON = OutputConstraint(kind="json_object")
# Delimiters in a string of JSON: as text here, though a tokenizer may make tokens of them.
IMITATION = '{"a": "x <think>y</think> z <tool_call>{} </tool_call>", "b": 1} '
TEXT_MARKERS = with_thinking(HERMES, "[T]", "[/T]")  # no tokens


@pytest.mark.parametrize("tools", [TOOLS, None])
@pytest.mark.parametrize(
    ("family", "tail", "before", "text"),
    [
        (TEXT_MARKERS, "a", "", '{"a": "[T]x[/T] y", "b": 1} '),
        (TEXT_MARKERS, "a", "", "[T]x[/T] y"),  # a regular expression may match this
        (TEXT_MARKERS, "[T]", "hm[/T]", "[T]x[/T] y"),
        (TEXT_MARKERS, "[T]", "hm[/T]", ' {"a": "[T]x[/T] y"}'),
        (LLAMA_JSON, "a", "", '{"name": 1, "s": "<|python_tag|>"}'),
        (LLAMA_JSON, "a", "", ' {"name": "clocks", "parameters": {}}'),
        (
            HARMONY,
            "<|start|>assistant",
            "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>final<|message|>",
            '{"a": "<|end|><|channel|>analysis<|message|>b<|return|>"}',
        ),
    ],
)
def test_constrained_answer_is_content_literally(
    config: GatewayConfig,
    files: ModelFiles,
    tools: ToolOptions | None,
    family: Family,
    tail: str,
    before: str,
    text: str,
) -> None:
    response = Response(
        config, files, family=family, tail=tail, tools=tools, output=JSON, num_logprobs=0
    )
    found = response.add(before + text)
    assert (found.content, found.thinking, found.names) == (text, "hm" * bool(before), [])
    assert response.reason == "stop"
    if family is not LLAMA_JSON or tools is None:  # else it may be a call, which is not scored
        assert response.scored_text.endswith(text)


@pytest.mark.parametrize("before", ["", "<think>a</think>"])
def test_marker_tokens_before_a_constrained_answer_count(
    config: GatewayConfig, files: ModelFiles, before: str
) -> None:
    """The grammar allows a call in the place of the answer."""
    response = Response(config, files, output=JSON)
    found = response.add(f"{before}{CALL}\n{CALL}")
    assert (found.thinking, found.ended, found.content) == ("a" * bool(before), [0, 1], "")
    answered = Response(config, files, output=JSON).add(f"{before}{IMITATION[:6]}x")
    assert (answered.thinking, answered.content) == ("a" * bool(before), f"{IMITATION[:6]}x")


def test_spaces_of_a_constrained_answer_are_content(
    config: GatewayConfig, files: ModelFiles
) -> None:
    found = Response(config, files, output=JSON, tools=None).add("<think>hm</think> \n{} ")
    assert (found.thinking, found.content) == ("hm", " \n{} ")
