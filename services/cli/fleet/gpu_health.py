"""What is wrong with a worker's GPU, in one cell."""

from __future__ import annotations

from rich.text import Text

from shared.messages import DeviceHealth


def health_text(health: DeviceHealth | None) -> Text:
    """Returns an empty text for a GPU of which nothing is known, or nothing bad."""
    if health is None:
        return Text()
    if health.fault:
        return Text(health.fault, style="red")
    parts = [
        f"throttled ({', '.join(health.throttles)})" if health.throttles else "",
        f"row remap {health.row_remap}" if health.row_remap else "",
        f"Xid {health.last_xid}" if health.num_xids else "",
        f"not read for {health.unread_s:.0f} s" if health.unread_s else "",
    ]
    return Text(", ".join(filter(None, parts)), style="yellow")
