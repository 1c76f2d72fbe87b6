"""Times as `hearth status` shows them."""

from __future__ import annotations

from datetime import UTC, datetime


def since(age_s: float | None, wall_s: float) -> str:
    """Returns the time of day, in UTC as in the logs, with the date before today; "" if unknown."""
    if age_s is None:
        return ""
    then, now = (datetime.fromtimestamp(each, UTC) for each in (wall_s - age_s, wall_s))
    return then.strftime("%H:%M:%SZ" if then.date() == now.date() else "%Y-%m-%d %H:%M:%SZ")
