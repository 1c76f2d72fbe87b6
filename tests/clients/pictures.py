"""A picture that clients send, and the answer that the native API gives about it."""

from __future__ import annotations

import base64
import struct
import zlib

import httpx

from tests.support.account import EYES_MODEL, Account

QUESTION = "What is in it?"
MAX_TOKENS = 24


def _chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def picture(width: int = 60, height: int = 40) -> bytes:
    """Returns a PNG whose colours change from left to right and from top to bottom."""
    rows = [
        b"\0" + bytes(part for x in range(width) for part in (x * 4, y * 6, (x + y) % 256))
        for y in range(height)
    ]
    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    parts = ((b"IHDR", head), (b"IDAT", zlib.compress(b"".join(rows))), (b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(_chunk(*each) for each in parts)


BASE64 = base64.b64encode(picture()).decode()
URL = f"data:image/png;base64,{BASE64}"
SHOWN = {"type": "image_url", "image_url": {"url": URL}}
CALL = {"id": "call_1", "type": "function", "function": {"name": "look", "arguments": "{}"}}


def reference_text(account: Account, messages: list[dict]) -> str:
    """Returns the greedy answer over plain HTTP; another one without the picture."""
    body = {
        "model": EYES_MODEL,
        "messages": messages,
        "max_tokens": MAX_TOKENS,
        "temperature": 0,
    }
    url = f"{account.url}/v1/chat/completions"
    response = httpx.post(url, json=body, headers=account.headers, timeout=60)
    response.raise_for_status()
    text: str = response.json()["choices"][0]["message"]["content"]
    return text


def looked(*parts: dict) -> list[dict]:
    """Returns a chat in which a tool answered with the parts and a text."""
    return [
        user(),
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {**user(*parts), "role": "tool", "tool_call_id": CALL["id"]},
    ]


def reference_of_tool(account: Account) -> str:
    """Returns the answer to a picture in a tool's result."""
    found = reference_text(account, looked(SHOWN))
    assert found != reference_text(account, looked())
    return found


def user(*parts: dict) -> dict:
    return {"role": "user", "content": [*parts, {"type": "text", "text": QUESTION}]}
