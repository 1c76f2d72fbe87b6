"""The tools of the demo model: its chat format, its dialogues and its held-out questions."""

from __future__ import annotations

import json
import random

import pytest
from tokenizers import Tokenizer
from transformers.utils.chat_parsing import ResponseParser

from demo_training.chat_format import (
    CHAT_TEMPLATE,
    RESPONSE_TEMPLATE,
    SPECIALS,
    SYSTEM,
    TOOL_SPECIALS,
)
from demo_training.corpus import CORPUS, Corpus, load_corpus
from demo_training.rows import Row, RowWriter
from demo_training.tokenizer import train_tokenizer
from demo_training.tool_cases import ToolCase, held_out_cases, name_of, shared_grams
from demo_training.tool_dialogues import Exchange, ToolCorpus, ToolDialogues, load_tools
from services.gateway.text.chat_template import ChatTemplate
from tests.support.grids import in_short_run

VOCABULARY = 2048


@pytest.fixture(scope="module")
def corpus() -> Corpus:
    return load_corpus(CORPUS)


@pytest.fixture(scope="module")
def tools() -> ToolCorpus:
    return load_tools(CORPUS)


@pytest.fixture(scope="module")
def tokenizer(corpus: Corpus) -> Tokenizer:
    return train_tokenizer(corpus, VOCABULARY)


@pytest.fixture(scope="module")
def template() -> ChatTemplate:
    return ChatTemplate(CHAT_TEMPLATE, special_tokens=(*SPECIALS, *TOOL_SPECIALS), variables={})


def test_chats_without_tools_are_as_they_were(template: ChatTemplate) -> None:
    messages = [
        {"role": "system", "content": " Be brief.\n"},
        {"role": "user", "content": "What is a token?"},
        {"role": "assistant", "content": "A part of a text."},
    ]
    assert "".join(template.render(messages)) == (
        "<|bos|><|system|>Be brief.<|end|><|user|>What is a token?<|end|>"
        "<|assistant|>A part of a text.<|end|><|assistant|>"
    )


def messages_of(exchange: Exchange) -> list[dict[str, object]]:
    """The exchange as the messages of a request."""
    messages: list[dict[str, object]] = [{"role": "user", "content": exchange.question}]
    if exchange.calls:
        calls = [{"type": "function", "function": function_of(call)} for call in exchange.calls]
        messages.append({"role": "assistant", "content": None, "tool_calls": calls})
    messages += [{"role": "tool", "content": result} for result in exchange.results]
    return [*messages, {"role": "assistant", "content": exchange.answer}]


def function_of(call: str) -> dict[str, str]:
    name, arguments = json.loads(call).values()
    return {"name": name, "arguments": json.dumps(arguments)}


@pytest.mark.parametrize("seed", in_short_run(range(5), range(20)))
def test_the_template_writes_what_the_model_was_trained_on(
    corpus: Corpus, tools: ToolCorpus, tokenizer: Tokenizer, template: ChatTemplate, seed: int
) -> None:
    writer = RowWriter(corpus, tools, tokenizer, random.Random(seed))
    offered = writer.dialogues.offer()
    exchange = writer.dialogues.needed(offered)
    row = Row()
    lines = [tool.line() for tool in offered]
    writer.message(row, SYSTEM, writer.encode("\n".join(["Tools:", *lines])), 0.0)
    writer.exchange(row, exchange)
    schemas = ToolCase(exchange.question, tuple(offered), ()).schemas()
    parts = template.render(messages_of(exchange), schemas, add_generation_prompt=False)
    assert "".join(parts) == "<|bos|>" + tokenizer.decode(row.ids, skip_special_tokens=False)


def test_a_system_message_precedes_the_tools(template: ChatTemplate) -> None:
    function = {"name": "ping", "parameters": {"properties": {"a": True, "b": {"type": "null"}}}}
    bare = {"type": "function", "function": {"name": "noop"}}
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Go"}]
    parts = template.render(messages, [{"type": "function", "function": function}, bare])
    assert "".join(parts) == (
        '<|bos|><|system|>Be brief.\nTools:\n{"name": "ping", "description": "", "parameters": '
        '{"a": "any", "b": "null"}}\n{"name": "noop", "description": "", "parameters": {}}<|end|>'
        "<|user|>Go<|end|><|assistant|>"
    )


def test_transformers_reads_calls_with_the_response_template() -> None:
    calls = [{"name": "clock", "arguments": {"city": "Oslo"}}, {"name": "noop", "arguments": {}}]
    text = "".join(f"<tool_call>{json.dumps(call)}</tool_call>" for call in calls)
    parser = ResponseParser(RESPONSE_TEMPLATE, prefix="<|user|>Go<|end|><|assistant|>")
    parser.feed(f"Wait.{text}<|end|>")
    message, _ = parser.finalize()
    assert message["content"] == "Wait."
    assert [call["function"] for call in message["tool_calls"]] == calls


def test_tokens_of_tools_are_the_last_of_the_vocabulary(tokenizer: Tokenizer) -> None:
    assert tokenizer.get_vocab_size() == VOCABULARY
    ids = [tokenizer.token_to_id(name) for name in (*SPECIALS, *TOOL_SPECIALS)]
    assert ids == [*range(len(SPECIALS)), *range(VOCABULARY - len(TOOL_SPECIALS), VOCABULARY)]


def test_a_question_calls_a_tool_that_is_offered(tools: ToolCorpus) -> None:
    for seed in range(30):
        check_question(tools, seed)


def check_question(tools: ToolCorpus, seed: int) -> None:
    dialogues = ToolDialogues(tools, random.Random(seed))
    offered = {tool.name: tool for tool in dialogues.offer()}
    exchange = dialogues.needed(list(offered.values()))
    assert len(exchange.results) == len(exchange.calls) in (1, 2)
    for call in map(json.loads, exchange.calls):
        parameters = offered[call["name"]].kind.parameters
        assert list(call["arguments"]) == list(parameters)
        for name, value in call["arguments"].items():
            assert isinstance(value, str if parameters[name] == "string" else int)


def test_held_out_questions_share_no_six_words_with_the_corpus(
    tools: ToolCorpus, corpus: Corpus
) -> None:
    assert shared_grams(CORPUS, tools, corpus) == set()


def test_a_quarter_of_the_held_out_questions_needs_no_tool(tools: ToolCorpus) -> None:
    cases = held_out_cases(CORPUS, tools)
    assert len(cases) == len({case.question for case in cases}) == 200
    assert sum(not case.calls for case in cases) == 50
    assert len({name_of(call) for case in cases for call in case.calls}) >= 8
    for case in cases:
        names = [tool.name for tool in case.tools]
        assert len(names) == len(set(names)) == 4
        assert {name_of(call) for call in case.calls} <= set(names)


def test_a_case_scores_names_and_arguments_apart() -> None:
    call = '{"name": "clock", "arguments": {"city": "Oslo"}}'
    case = ToolCase("?", (), (call,))
    assert case.score(f"<tool_call>{call}</tool_call>") == (True, True)
    assert case.score(f"<tool_call>{call.replace('Oslo', 'Rome')}</tool_call>") == (True, False)
    assert case.score(f"<tool_call>{call[:-3]}</tool_call>") == (False, False)
    assert case.score("Hello.") == (False, False)
    assert ToolCase("?", (), ()).score("Hello.") == (True, True)
