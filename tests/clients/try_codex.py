"""Runs Codex, unmodified, for two turns with a tool call in each:
`scripts/try_codex [--gpt-oss] [CODEX]`.

CODEX: the program (default: `codex`), such as that of `npm install @openai/codex`. The second turn
resumes the session of the first. What it did is written to `transcripts/codex.jsonl`, and with a
gpt-oss, which thinks before it calls, to `transcripts/codex_gpt_oss.jsonl`.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from typing import Any

from tests.clients.agent_program import LEAST_CACHED, Place, program_of, run_place, write_transcript
from tests.support.account import AGENT_MODEL, HARMONY_MODEL
from tests.wide.checkpoint import write_wide_checkpoint
from tests.wide.harmony import THOUGHT, write_harmony_checkpoint

KEY_VARIABLE = "HEARTH_API_KEY"
OPTIONS = ("--skip-git-repo-check", "--sandbox", "read-only", "--json")
TURNS = (("List the files.",), ("resume", "--last", "List them again."))
NUM_REQUESTS = 4  # of each turn: the call, and the answer to its result
ITEMS = {
    "reasoning": ("content",),
    "message": ("role", "content"),
    "function_call": ("name", "arguments", "call_id"),
    "function_call_output": ("call_id", "output"),
}
USAGE = ("input_tokens", "cached_input_tokens", "output_tokens")
# The model calls the first tool by name: without these, that is exec_command.
CONFIG = """
model = "{model}"
model_provider = "hearth"

[model_providers.hearth]
name = "Hearth"
base_url = "{url}/v1"
wire_api = "responses"
env_key = "{key_variable}"

[agents]
enabled = false

[features]
goals = false
"""


def main(arguments: Sequence[str]) -> int:
    """Returns 0 if it called the tool in both turns, and found later prompts in the cache."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("program", metavar="CODEX", nargs="?", default="codex", type=program_of)
    parser.add_argument("--gpt-oss", action="store_true", help="a model that thinks, in Harmony")
    options = parser.parse_args(arguments)
    write, model = write_wide_checkpoint, AGENT_MODEL
    if options.gpt_oss:
        write, model = write_harmony_checkpoint, HARMONY_MODEL
    with run_place(write, model) as place:
        records = run_codex(options.program, place, model)
        messages = list(transcript(records))
    problems = list(problems_of(messages))
    if options.gpt_oss and sum(THOUGHT in json.dumps(each) for each in messages) < len(TURNS):
        problems.append("there is no reasoning in each turn")
    name = "codex_gpt_oss" if options.gpt_oss else "codex"
    return write_transcript(name, messages, problems)


def run_codex(program: str, place: Place, model: str) -> list[dict[str, Any]]:
    """Returns the records of its session, which it keeps in its home."""
    folder = place.home / ".codex"
    folder.mkdir()
    fields = {"model": model, "url": place.cluster.url, "key_variable": KEY_VARIABLE}
    (folder / "config.toml").write_text(CONFIG.format(**fields))
    for turn in TURNS:
        variables = {KEY_VARIABLE: place.cluster.state.api_key}
        sys.stdout.write(place.run([program, "exec", *OPTIONS, *turn], variables))
    files = sorted(folder.glob("sessions/**/*.jsonl"))
    return [json.loads(line) for path in files for line in path.read_text().splitlines()]


def transcript(records: Sequence[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """From the first question on, the items of both sides and each request's usage: without
    times, paths and the program's own prompts.
    """
    is_asked = False
    for record in records:
        payload = record["payload"]
        kind = payload.get("type")
        is_asked = is_asked or is_question(payload)
        if not is_asked:
            continue
        if record["type"] == "response_item" and kind in ITEMS and not is_context(payload):
            yield {"type": kind, **{name: payload.get(name) for name in ITEMS[kind]}}
        elif kind == "token_count" and payload["info"]:
            usage = payload["info"]["last_token_usage"]
            yield {"usage": {name: usage[name] for name in USAGE}}
        elif kind in ("error", "stream_error"):
            yield {"error": payload["message"]}


def is_question(payload: dict[str, Any]) -> bool:
    return payload.get("role") == "user" and TURNS[0][-1] in json.dumps(payload["content"])


def is_context(payload: dict[str, Any]) -> bool:
    """What the program tells the model about itself and the machine."""
    role = payload.get("role")
    return role == "developer" or (role == "user" and "<cwd>" in json.dumps(payload["content"]))


def problems_of(messages: Sequence[dict[str, Any]]) -> Iterator[str]:
    kinds = [each.get("type") for each in messages]
    for kind in ("function_call", "function_call_output"):
        if kinds.count(kind) != len(TURNS):
            yield f"there is no {kind} in each turn"
    yield from (each["error"] for each in messages if "error" in each)
    usages = [each["usage"] for each in messages if "usage" in each]
    if len(usages) != NUM_REQUESTS:
        yield f"there are {len(usages)} requests instead of {NUM_REQUESTS}"
    for number, usage in enumerate(usages[1:], start=2):
        if usage["cached_input_tokens"] < LEAST_CACHED * usage["input_tokens"]:
            yield f"the prompt of request {number} was not found in the cache"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
