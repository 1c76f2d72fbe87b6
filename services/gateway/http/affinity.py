"""Finds the session of a request in the headers of its client.

x-session-affinity, else the body's prompt_cache_key, else the header in which a client sends its
session: Codex, Claude Code, Open WebUI.
"""

from __future__ import annotations

from collections.abc import Mapping

AFFINITY_HEADER = "x-session-affinity"
SESSION_HEADERS = ("session-id", "x-claude-code-session-id", "x-openwebui-chat-id")


def session_key_of(headers: Mapping[str, str]) -> str | None:
    """Returns the first header that is not empty."""
    return next((found for name in SESSION_HEADERS if (found := headers.get(name))), None)
