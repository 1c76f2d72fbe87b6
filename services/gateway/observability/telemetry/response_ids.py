"""Finds the request of a response by the id that its client got. No I/O."""

from __future__ import annotations

import re

MAX_IDS = 4096
_PREFIX = re.compile(r"(?:chatcmpl-|cmpl-|msg_|rerank-|score-)")
_DIGEST = re.compile(r"[a-z]{2,8}_([0-9a-f]{32})")  # of a response, which its items repeat


class ResponseIds:
    """The requests of the last responses whose ids do not end with those of their requests."""

    def __init__(self) -> None:
        self._by_digest: dict[str, str] = {}

    def add(self, response_id: str, request_id: str) -> None:
        found = _DIGEST.match(response_id)
        if found is None:
            return
        self._by_digest[found[1]] = request_id
        if len(self._by_digest) > MAX_IDS:
            del self._by_digest[next(iter(self._by_digest))]

    def request_id_of(self, name: str) -> str:
        """Returns the id of a request. `name` is that, the id of a response, or of its item."""
        found = _DIGEST.match(name)
        if found is not None and found[1] in self._by_digest:
            return self._by_digest[found[1]]
        return _PREFIX.sub("", name, count=1) if _PREFIX.match(name) else name
