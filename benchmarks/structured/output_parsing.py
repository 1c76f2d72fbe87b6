"""CPU time of the split of an output into content, reasoning and calls, for a token.

Run: python -m benchmarks.structured.output_parsing [--tokens 10000] [--out FILE]

Tokens have four characters. `us a token` is of the parser alone, for each family and each part of
an output; a detokenizer and the search for stop strings come on top with and without it. Bar:
15 us a token.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec

from benchmarks.report import Row, at_most, write_result
from services.gateway.structured.tools.families import FAMILIES, with_thinking
from services.gateway.structured.tools.family import Family
from services.gateway.structured.tools.parsing.marker_tokens import MarkerTokens
from services.gateway.structured.tools.parsing.response_parser import ResponseParser
from services.gateway.structured.tools.parsing.response_template import compiled_template

TOKEN_CHARS = 4
BAR_US = 15.0
PROSE = "the quick brown fox jumps over the lazy dog, whose x < 3 [or more]. "
SCHEMAS = {"write": {"properties": {"text": {"type": "string"}}}}
OPENINGS = {  # openings of a call with one long argument, which need not end
    "hermes": '<tool_call>{"name": "write", "arguments": {"text": "',
    "qwen_xml": "<tool_call>\n<function=write>\n<parameter=text>\n",
    "llama_json": '{"name": "write", "parameters": {"text": "',
    "pythonic": "[write(text='",
    "mistral_args": '[TOOL_CALLS]write[ARGS]{"text": "',
    "gemma4": '<|tool_call>call:write{text:<|"|>',
    "kimi": "<|tool_calls_section_begin|><|tool_call_begin|>functions.write:0"
    '<|tool_call_argument_begin|>{"text": "',
}


def outputs(family: Family, num_chars: int) -> Iterator[tuple[str, str]]:
    prose = PROSE * (num_chars // len(PROSE) + 1)
    yield "content", prose
    yield "reasoning", _opening(family) + prose
    if family.name in OPENINGS:
        yield "call", OPENINGS[family.name] + json.dumps(prose)[1:-1]


def _opening(family: Family) -> str:
    return family.think_open or "<think>"


def measure(family: Family, part: str, text: str) -> Row:
    markers = MarkerTokens()
    parser = ResponseParser(
        compiled_template(family.response_template, markers),
        markers,
        0,
        schemas=SCHEMAS,
        call_id_of=lambda index, name: name,
    )
    pieces = [text[at : at + TOKEN_CHARS] for at in range(0, len(text), TOKEN_CHARS)]
    began = time.process_time()
    for piece in pieces:
        parser.feed(piece)
    took_s = time.process_time() - began
    assert part == "reasoning" or parser.is_in_content == (part == "content")
    return {"family": family.name, "part": part, "us a token": took_s / len(pieces) * 1e6}


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=10_000, metavar="N", help="per row")
    parser.add_argument("--out", type=Path, metavar="FILE", help="also write the JSON to this file")
    given = parser.parse_args(argv)
    rows: list[Row] = []
    for each in FAMILIES.values():
        family = each if each.think_close else with_thinking(each, "<think>", "</think>")
        texts = outputs(family, given.tokens * TOKEN_CHARS)
        rows += [measure(family, part, text) for part, text in texts]
    slowest = max(rows, key=lambda row: row["us a token"])
    name = f"{slowest['family']}, {slowest['part']}: CPU time of a token"
    bars = [at_most(name, slowest["us a token"], BAR_US, "us")]
    command = ["-m", "benchmarks.structured.output_parsing", *argv]
    result = write_result("output_parsing", rows, bars, command)
    if given.out is not None:
        given.out.write_bytes(msgspec.json.encode(result) + b"\n")


if __name__ == "__main__":
    main(sys.argv[1:])
