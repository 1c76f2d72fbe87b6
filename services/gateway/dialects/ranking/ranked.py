"""The documents with the highest scores."""

from __future__ import annotations

from collections.abc import Sequence


def ranked(scores: Sequence[float], limit: int | None) -> list[int]:
    """At most `limit` places, the highest score first; of equal scores the first place."""
    return sorted(range(len(scores)), key=lambda place: -scores[place])[:limit]
