"""Finds the session of a request in the headers of its client.

The order is x-session-affinity, the body's prompt_cache_key, and the header in which Codex, Claude
Code or Open WebUI sends its session.
"""

from __future__ import annotations

from collections.abc import Mapping

AFFINITY_HEADER = "x-session-affinity"
SESSION_HEADERS = ("session-id", "x-claude-code-session-id", "x-openwebui-chat-id")


def session_key_of(headers: Mapping[str, str]) -> str | None:
    """Returns the first session header that is not empty, or None."""
    return next((found for name in SESSION_HEADERS if (found := headers.get(name))), None)
