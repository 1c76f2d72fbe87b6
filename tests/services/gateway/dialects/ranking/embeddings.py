"""Embeddings of peers that depend on the prompt, and a cosine computed apart from the gateway's."""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence

import pytest

from shared.messages import Request
from shared.packing import unpack_token_ids
from tests.services.gateway.peer import PeerDecode

DIMENSIONS = 4


def embedding_of(token_ids: Sequence[int]) -> list[float]:
    """Differs for different tokens; not of length one."""
    return [
        sum(math.sin((dimension + 1) * token_id) for token_id in token_ids) + 0.1
        for dimension in range(DIMENSIONS)
    ]


def cosine_of(one: Sequence[float], other: Sequence[float]) -> float:
    dot = math.fsum(a * b for a, b in zip(one, other, strict=True))
    return dot / math.sqrt(math.fsum(a * a for a in one) * math.fsum(b * b for b in other))


def texts_embedded(monkeypatch: pytest.MonkeyPatch) -> None:
    """The peers answer with `embedding_of` the prompt."""

    def embedding_for(_: PeerDecode, request: Request) -> bytes:
        return array("f", embedding_of(unpack_token_ids(request.prompt_token_ids))).tobytes()

    monkeypatch.setattr(PeerDecode, "embedding_for", embedding_for)
