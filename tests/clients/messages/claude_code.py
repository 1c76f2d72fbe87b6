"""Requests in the shape of Claude Code 2.1: its fields and blocks, with own texts."""

from __future__ import annotations

from typing import Any

NUM_TOOLS = 24
WORDS = "read the file before you change it and keep the style of the code around it "
HEADERS = {
    "anthropic-version": "2023-06-01",
    "anthropic-beta": "claude-code-20250219,interleaved-thinking-2025-05-14,unknown-2099-01-01",
    "x-app": "cli",
    "user-agent": "claude-cli/2.1.197 (external, sdk-cli)",
}
MARK = {"type": "ephemeral", "ttl": "1h"}


def body_of(messages: list[dict[str, Any]], model: str, turn: int) -> dict[str, Any]:
    """`turn`: the billing header differs in each."""
    return {
        "model": model,
        "max_tokens": 32_000,
        "stream": True,
        "messages": messages,
        "system": [
            text(f"x-anthropic-billing-header: cc_version=2.1.197.{turn}; cch={turn * 7919:05x};"),
            {**text("You are an agent for the command line."), "cache_control": MARK},
            {**text("Rules.\n" + 60 * WORDS), "cache_control": MARK},
        ],
        "tools": [tool(number) for number in range(NUM_TOOLS)],
        "thinking": {"type": "adaptive"},
        "output_config": {"effort": "high"},
        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        "metadata": {"user_id": '{"device_id":"d","account_uuid":"","session_id":"s-1"}'},
    }


def first_messages(question: str) -> list[dict[str, Any]]:
    """A system message follows the user's."""
    reminder = text(f"<system-reminder>\n{10 * WORDS}\n</system-reminder>")
    asked = {**text(question), "cache_control": MARK}
    return [
        {"role": "user", "content": [reminder, asked]},
        {"role": "system", "content": "The date is the first of May."},
    ]


def next_messages(
    messages: list[dict[str, Any]], answer: list[dict[str, Any]], output: str
) -> list[dict[str, Any]]:
    """With the answer's blocks as they came, and a result for each call."""
    results = [
        {"type": "tool_result", "tool_use_id": each["id"], "content": output, "is_error": False}
        for each in answer
        if each["type"] == "tool_use"
    ]
    return [
        *messages,
        {"role": "assistant", "content": answer},
        {"role": "user", "content": [{**each, "cache_control": MARK} for each in results]},
    ]


def tool(number: int) -> dict[str, Any]:
    properties = {
        "command": {"type": "string", "description": "the command", "maxLength": 20},
        "timeout": {"type": "number", "description": "in milliseconds"},
    }
    return {
        "name": "Bash" if number == 0 else f"mcp__server__tool_{number}",
        "description": f"Tool {number}. {12 * WORDS}",
        "input_schema": {
            "$schema": "https://json-schema.org/draft/2020-12/schema",
            "type": "object",
            "properties": properties,
            "required": ["command"],
            "additionalProperties": False,
        },
    }


def text(content: str) -> dict[str, Any]:
    return {"type": "text", "text": content}
