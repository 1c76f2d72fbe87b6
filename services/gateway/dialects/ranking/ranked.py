"""Selects the documents with the highest scores."""

from __future__ import annotations

from collections.abc import Sequence


def ranked(scores: Sequence[float], limit: int | None) -> list[int]:
    """Returns at most `limit` places, the highest score first. Of equal scores the first place
    comes first.
    """
    return sorted(range(len(scores)), key=lambda place: -scores[place])[:limit]
