"""The paths of this dialect: everything below an account, and below Cloudflare's prefix.

Below `/ai/v1` the requests and errors are OpenAI's.
"""

from __future__ import annotations

import re
from urllib.parse import unquote

_OWN = re.compile(r"/client/v4(/.*)?|/accounts/.*", re.DOTALL)
_OPENAI = re.compile(r"(/client/v4)?/accounts/[^/]+/ai/v1(/.*)?", re.DOTALL)


def has_own_envelope(path: str) -> bool:
    """Returns whether errors of this path are in the envelope of this dialect."""
    return _OWN.fullmatch(path) is not None and _OPENAI.fullmatch(path) is None


def model_part(raw_path: bytes) -> str:
    """Returns the decoded part of a run's path after `ai/run`: `%2F` is a slash. `raw_path`: the
    path as the client sent it, since the web framework joins slashes.
    """
    return unquote(raw_path.decode("latin-1")).partition("/ai/run")[2]
