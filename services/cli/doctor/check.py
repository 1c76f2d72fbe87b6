"""What `hearth doctor` finds: one line each, with what to do about it."""

from __future__ import annotations

from typing import Literal

import msgspec

Level = Literal["ok", "warn", "fail"]
GIB = 1 << 30


class Check(msgspec.Struct, frozen=True):
    """A finding. `advice` says what to do if it is not ok."""

    name: str
    level: Level
    text: str
    advice: str = ""


def by_limit(
    name: str, value: float, text: str, *, warn_below: float, fail_below: float, advice: str
) -> Check:
    """Returns the check of a quantity of which there should be much."""
    if value >= warn_below:
        return Check(name, "ok", text)
    return Check(name, "fail" if value < fail_below else "warn", text, advice)
