"""Runs Claude Code, unmodified, for one round trip of a tool: `scripts/try_claude_code [CLAUDE]`.

In an empty home and a folder with one file, against a cluster of the wide checkpoint, whose model
calls the tool that it is offered. CLAUDE: the program (default: `claude`), such as that of
`npm install @anthropic-ai/claude-code`. What it did is written to `transcripts/claude_code.jsonl`.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from typing import Any

from tests.clients.agent_program import LEAST_CACHED, Place, program_of, run_place, write_transcript
from tests.support.account import AGENT_MODEL

MODEL_VARIABLES = ("ANTHROPIC_MODEL", "ANTHROPIC_SMALL_FAST_MODEL", "ANTHROPIC_DEFAULT_HAIKU_MODEL")
OFF = ("CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC", "DISABLE_AUTOUPDATER", "DISABLE_TELEMETRY")
OPTIONS = ("--output-format", "stream-json", "--verbose", "--tools", "Bash", "--allowedTools")


def main(arguments: Sequence[str]) -> int:
    """Returns 0 if it called the tool, and found the second prompt in the cache."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("program", metavar="CLAUDE", nargs="?", default="claude", type=program_of)
    options = parser.parse_args(arguments)
    with run_place() as place:
        messages = list(transcript(run_claude(options.program, place)))
    return write_transcript("claude_code", messages, list(problems_of(messages)))


def run_claude(program: str, place: Place) -> str:
    """Returns what it wrote: a JSON object in each line."""
    variables = {
        "ANTHROPIC_BASE_URL": place.cluster.url,
        "ANTHROPIC_AUTH_TOKEN": place.cluster.state.api_key,
        **dict.fromkeys(MODEL_VARIABLES, AGENT_MODEL),
        **dict.fromkeys(OFF, "1"),
    }
    command = [program, "-p", "List the files.", *OPTIONS, "Bash", "--max-turns", "3"]
    return place.run(command, variables)


def transcript(output: str) -> Iterator[dict[str, Any]]:
    """The messages of both sides, and the result: without times and paths."""
    for line in output.splitlines():
        event = json.loads(line)
        match event["type"]:
            case "assistant" | "user":
                message = event["message"]
                fields = ("role", "content", "stop_reason", "usage")
                yield {name: message[name] for name in fields if name in message}
            case "result":
                fields = ("subtype", "is_error", "num_turns", "result")
                yield {name: event[name] for name in fields if name in event}


def problems_of(messages: Sequence[dict[str, Any]]) -> Iterator[str]:
    blocks = [
        block for each in messages for block in each.get("content", ()) if isinstance(block, dict)
    ]
    for kind in ("tool_use", "tool_result"):
        if all(block["type"] != kind for block in blocks):
            yield f"there is no {kind}"
    if not messages or messages[-1].get("is_error", True):
        yield "it ended with an error"
    usages = [each["usage"] for each in messages if "usage" in each]
    cached = usages[-1]["cache_read_input_tokens"] if usages else 0
    if not usages or cached < LEAST_CACHED * (cached + usages[-1]["input_tokens"]):
        yield "the last prompt was not found in the cache"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
