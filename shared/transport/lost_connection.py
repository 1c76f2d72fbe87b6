"""Decides when a process has lost the bus for good. It then exits, so that its supervisor starts it
again: it would be deaf for ever, with good health checks. No I/O.
"""

from __future__ import annotations

POLL_S = 1.0
STOPPED_S = 5.0  # neither the read loop nor the reconnect loop of the client runs
AWAY_S = 120.0  # no server accepts the connection


class LostConnection:
    """Counts the seconds of a lost connection between polls, at most POLL_S each: none while this
    process is frozen.
    """

    def __init__(self) -> None:
        self._away_s = self._stopped_s = 0.0

    def reason(self, *, is_connected: bool, is_running: bool) -> str | None:
        """Returns why the connection is lost, or None. Must be called every POLL_S. `is_running`:
        whether one of the client's loops runs.
        """
        self._away_s = 0.0 if is_connected else self._away_s + POLL_S
        self._stopped_s = 0.0 if is_running else self._stopped_s + POLL_S
        if self._stopped_s >= STOPPED_S:
            return "the connection to NATS has stopped reading"
        if self._away_s >= AWAY_S:
            return f"not connected to NATS for {AWAY_S:.0f} s"
        return None
