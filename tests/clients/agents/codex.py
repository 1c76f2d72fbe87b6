"""Requests in the shape and size of Codex 0.169: its fields, items and tools, with own texts."""

from __future__ import annotations

from typing import Any

WORDS = "read the file before you change it and keep the style of the code around it "
SESSION = "01890000-0000-7000-8000-000000000001"
HEADERS = {
    "originator": "codex_exec",
    "user-agent": "codex_exec/0.169.0",
    "session-id": SESSION,
    "thread-id": SESSION,
    "x-client-request-id": SESSION,
}
NUM_COMMAND_OPTIONS = 9
DESCRIPTION_CHARS = {
    "write_stdin": 300,
    "request_user_input": 900,
    "view_image": 150,
    "get_goal": 120,
    "create_goal": 400,
    "update_goal": 1700,
}
AGENT_TOOLS = {
    "close_agent": 500,
    "resume_agent": 500,
    "send_input": 900,
    "spawn_agent": 6000,
    "wait_agent": 700,
}


def body_of(items: list[dict[str, Any]], model: str) -> dict[str, Any]:
    return {
        "model": model,
        "stream": True,
        "input": items,
        "tools": tools(),
        "tool_choice": "auto",
        "parallel_tool_calls": True,
        "reasoning": {"summary": "auto"},
        "store": False,
        "include": ["reasoning.encrypted_content"],
        "prompt_cache_key": SESSION,
        "client_metadata": {"session_id": SESSION, "thread_id": SESSION},
    }


def first_items(question: str) -> list[dict[str, Any]]:
    """Two messages of the developer come before those of the user."""
    return [
        message("msg_1", "developer", words(16_979)),
        message("msg_2", "developer", words(2129), words(341)),
        message("msg_3", "user", f"<environment_context>\n{words(400)}"),
        message("msg_4", "user", question),
    ]


def next_items(
    items: list[dict[str, Any]], answer: list[dict[str, Any]], output: str
) -> list[dict[str, Any]]:
    """With the answer's items as they came, and an output for each call."""
    text = f"Chunk ID: 0a1b2c\nWall time: 0.0000 seconds\nOutput:\n{output}\n"
    outputs = [
        {
            "type": "function_call_output",
            "id": f"fco_{index}",
            "call_id": each["call_id"],
            "output": text,
        }
        for index, each in enumerate(answer)
        if each["type"] == "function_call"
    ]
    return [*items, *answer, *outputs]


def message(item_id: str, role: str, *texts: str) -> dict[str, Any]:
    content = [{"type": "input_text", "text": each} for each in texts]
    return {"type": "message", "id": item_id, "role": role, "content": content}


def tools() -> list[dict[str, Any]]:
    """Functions, a namespace of functions, and one that only its vendor hosts."""
    agents = [tool(name, size) for name, size in AGENT_TOOLS.items()]
    namespace = {"name": "multi_agent_v1", "description": "Agents.", "tools": agents}
    return [
        tool("exec_command", 100, NUM_COMMAND_OPTIONS),
        *(tool(name, size) for name, size in DESCRIPTION_CHARS.items()),
        {"type": "namespace", **namespace},
        {"type": "web_search", "external_web_access": False},
    ]


def tool(name: str, description_chars: int, num_options: int = 2) -> dict[str, Any]:
    options = {
        f"option_{number}": {"type": "string", "description": words(80)}
        for number in range(num_options)
    }
    return {
        "type": "function",
        "name": name,
        "description": words(description_chars),
        "strict": False,
        "parameters": {
            "type": "object",
            "properties": {"cmd": {"type": "string"}, **options},
            "required": ["cmd"],
            "additionalProperties": False,
        },
    }


def words(num_chars: int) -> str:
    return (WORDS * (num_chars // len(WORDS) + 1))[:num_chars]
