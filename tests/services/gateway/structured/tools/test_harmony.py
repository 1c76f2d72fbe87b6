"""Messages of gpt-oss, and histories of its calls, as openai-harmony 0.0.8 reads and writes them:
channel, recipient (`to=`) and content type of each message; the call's end, <|call|>, is a stop
token of `generation_config.json`, as <|return|> is.
"""

from __future__ import annotations

from typing import Any

import pytest

from services.gateway.structured.tools.families import HARMONY
from services.gateway.text.chat_template import ChatTemplate
from tests.services.gateway.structured.tools.test_response_parser import markers_of, parse
from tests.services.gateway.structured.tools.wire_formats import Call, Message
from tests.wide.harmony import MARKS, TEMPLATE

ANALYSIS = "<|channel|>analysis<|message|>Think.<|end|><|start|>assistant"
CLOCK = [Call("clock", {"n": 1})]
MESSAGES = {
    f"{ANALYSIS}<|channel|>final<|message|>Hello": Message("Hello", [], "Think."),
    "<|channel|>final <|constrain|>json<|message|>[1]<|return|>": Message("[1]", [], ""),
    f"{ANALYSIS}{ANALYSIS}<|channel|>final<|message|>Hello": Message("Hello", [], "Think.\nThink."),
    "<|channel|>analysis<|message|>Thi": Message("", [], "Thi"),
    "<|channel|>commentary<|message|>I look.<|end|><|start|>assistant<|channel|>commentary "
    'to=functions.clock <|constrain|>json<|message|>{"n": 1}<|call|>': Message(
        "I look.", CLOCK, ""
    ),
    **{
        f'{ANALYSIS}{head}<|message|>{{"n": 1}}<|call|>': Message("", CLOCK, "Think.")
        for head in (
            "<|channel|>commentary to=functions.clock <|constrain|>json",
            "<|channel|>analysis to=functions.clock <|constrain|>json",
            " to=functions.clock<|channel|>commentary <|constrain|>json",
            " to=functions.clock<|channel|>commentary json",
            "<|channel|>commentary to=functions.clock",
            "<|channel|>commentary to=functions.clock code",
            "<|channel|>commentary to=clock <|constrain|>json",
        )
    },
}


@pytest.mark.parametrize("text", MESSAGES)
def test_message_is_read(text: str) -> None:
    """Also without its last token, which ends the answer and is no text; and with markers that are
    tokens.
    """
    markers = markers_of(HARMONY)
    cut = text.removesuffix("<|call|>").removesuffix("<|return|>")
    for given in (text, cut):
        assert parse(HARMONY, [*given]).message == MESSAGES[text]
        assert parse(HARMONY, [*markers.replaced(given)], markers).message == MESSAGES[text]


def test_reasoning_before_a_call_is_shown_until_an_answer_follows() -> None:
    call = {"id": "1", "type": "function", "function": {"name": "look", "arguments": '{"n":1}'}}
    history: list[dict[str, Any]] = [
        {"role": "user", "content": "List."},
        {"role": "assistant", "content": "", "reasoning_content": "Think.", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "name": "look", "content": "a.md"},
    ]
    template = ChatTemplate(TEMPLATE, special_tokens=MARKS, variables={})
    prompt = "<|start|>user<|message|>List.<|end|>"
    called = (
        '<|start|>assistant to=functions.look<|channel|>commentary json<|message|>{"n": 1}<|call|>'
        '<|start|>functions.look to=assistant<|channel|>commentary<|message|>"a.md"<|end|>'
    )
    thought = "<|start|>assistant<|channel|>analysis<|message|>Think.<|end|>"
    assert "".join(template.render(history)) == f"{prompt}{thought}{called}<|start|>assistant"
    history += [{"role": "assistant", "content": "One."}, {"role": "user", "content": "Again."}]
    answered = "<|start|>assistant<|channel|>final<|message|>One.<|end|>"
    again = "<|start|>user<|message|>Again.<|end|><|start|>assistant"
    assert "".join(template.render(history)) == f"{prompt}{called}{answered}{again}"
