from __future__ import annotations

from pathlib import Path

import jinja2
from tokenizers import Tokenizer

from shared.engine.executors.load import load_executor
from tests.support.engine.steps import Blocks, generate
from tests.wide.checkpoint import ANSWER
from tests.wide.harmony import CHANNEL, RETURN, TEMPLATE, THOUGHT, write_harmony_checkpoint

ASKED = [{"role": "user", "content": "Which files are there?"}]
CALLED = {"function": {"name": "look", "arguments": {"cmd": ""}}}
ANSWERED = [
    *ASKED,
    {"role": "assistant", "tool_calls": [CALLED], "thinking": "Hm."},
    {"role": "tool", "content": 'README.md\n"a b"\n'},
]


def test_thinks_calls_and_answers(tmp_path: Path) -> None:
    """Without a grammar it stops to be certain where the call's header continues."""
    folder = write_harmony_checkpoint(tmp_path)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    executor = load_executor(folder, dtype="float32", kv_cache_bytes=4 << 20)
    template = jinja2.Environment().from_string(TEMPLATE)
    blocks, tools = Blocks(executor.num_blocks), [{"function": {"name": "look"}}]
    thought = f"{CHANNEL}analysis<|message|>{THOUGHT}<|end|><|start|>assistant{CHANNEL}commentary"
    answer = f"{CHANNEL}final<|message|>{ANSWER}{RETURN}"
    for messages, expected in ((ASKED, thought), (ANSWERED, answer)):
        prompt = template.render(messages=messages, tools=tools, add_generation_prompt=True)
        wanted, given = (
            tokenizer.encode(text, add_special_tokens=False).ids for text in (expected, prompt)
        )
        assert generate(executor, blocks.line(given, room=len(wanted)), len(wanted)) == wanted
