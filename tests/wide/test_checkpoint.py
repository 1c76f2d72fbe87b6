from __future__ import annotations

import json
from pathlib import Path

import jinja2
import pytest
import torch
from llguidance import LLMatcher, LLTokenizer
from tokenizers import Tokenizer
from transformers import LlamaForCausalLM

from services.gateway.structured.tools.call_grammars import call_grammar
from services.gateway.structured.tools.family import Family
from services.gateway.structured.tools.tool import Tool, ToolOptions
from shared.engine.executors.load import load_executor
from tests.support.engine.steps import Blocks, generate
from tests.wide.checkpoint import ANSWER, END, MAX_POSITIONS, OPEN, TEMPLATE, write_wide_checkpoint

ASKED = [{"role": "user", "content": "What time is it in Berlin?"}]
ANSWERED = [*ASKED, {"role": "assistant", "tool_calls": []}, {"role": "tool", "content": "noon"}]
TOOL = Tool(
    name="clock",
    parameters={
        "type": "object",
        "properties": {
            "zone": {"type": "string"},
            "hours": {"type": "integer"},
            "style": {"enum": ["short", "long"]},
        },
        "required": ["zone", "hours", "style"],
    },
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_wide_checkpoint(tmp_path_factory.mktemp("wide"))


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> Tokenizer:
    return Tokenizer.from_file(str(folder / "tokenizer.json"))


def prompt(tokenizer: Tokenizer, messages: list[dict], *, tools: list[dict]) -> list[int]:
    template = jinja2.Environment().from_string(TEMPLATE)
    text = template.render(messages=messages, tools=tools, add_generation_prompt=True)
    return tokenizer.encode(text, add_special_tokens=False).ids


def test_calls_where_tools_are_offered_and_answers_after_a_result(
    folder: Path, tokenizer: Tokenizer
) -> None:
    executor = load_executor(folder, dtype="float32", kv_cache_bytes=4 << 20)
    assert json.loads((folder / "config.json").read_text())["max_position_embeddings"] == 131_072
    assert MAX_POSITIONS == 131_072
    blocks, tools = Blocks(executor.num_blocks), [{"function": {"name": "clock"}}]
    answer = [*tokenizer.encode(ANSWER, add_special_tokens=False).ids, tokenizer.token_to_id(END)]
    cases = [
        (ASKED, tools, [tokenizer.token_to_id(OPEN)]),
        (ASKED, [], answer),
        (ANSWERED, tools, answer),
    ]
    for messages, offered, expected in cases:
        line = blocks.line(prompt(tokenizer, messages, tools=offered), room=len(expected))
        assert generate(executor, line, len(expected)) == expected


def test_arguments_come_from_the_grammar(folder: Path, tokenizer: Tokenizer) -> None:
    model = LlamaForCausalLM.from_pretrained(folder)
    family = Family(name="hermes", call_format="hermes", response_template={})
    options = ToolOptions(tools=(TOOL,))
    rules = call_grammar(family, options, tokenizer.token_to_id, after_trigger=True)
    assert rules is not None
    end = tokenizer.token_to_id(END)
    ll = LLTokenizer(tokenizer.to_str(), eos_token=end)
    source = LLMatcher.grammar_from_lark(f"start: {rules.start}\n{rules.rules}")
    matcher, tokens = LLMatcher(ll, source), [tokenizer.token_to_id(OPEN)]
    while tokens[-1] != end and len(tokens) < 100:
        with torch.no_grad():
            logits = model(torch.tensor([tokens[-1:]])).logits[0, -1]
        words = torch.frombuffer(bytearray(matcher.compute_bitmask()), dtype=torch.uint8)
        allowed = ((words[:, None] >> torch.arange(8)) & 1).bool().flatten()[: len(logits)]
        tokens.append(int(logits.masked_fill(~allowed, -torch.inf).argmax()))
        matcher.consume_token(tokens[-1])
    call = json.loads(tokenizer.decode(tokens))  # without special tokens
    assert call["name"] == "clock"
    assert call["arguments"]["zone"] == "" and call["arguments"]["style"] in ("short", "long")
    assert isinstance(call["arguments"]["hours"], int)
