"""The start of the `hearth` command.

The health check of a container runs every few seconds, so that it imports nothing but a probe.
"""

from __future__ import annotations

import os
import signal
import sys

from services.client.probe import is_alive


def main() -> None:
    """Runs the command. `hearth health` alone asks the process of this container, if it has a
    port for that: exit status 0 if it is alive, else 1.
    """
    if sys.argv[1:] == ["health"]:
        found = is_alive(os.environ)
        if found is not None:
            sys.exit(0 if found else 1)
    if os.getpid() == 1:
        _end_at_sigterm()
    from services.__main__ import main as run

    run()


def _end_at_sigterm() -> None:
    """Has SIGTERM end this process, as it ends any other: the kernel withholds from the first
    process of a container what it does not handle. Services replace the handler by their drain.
    """
    signal.signal(signal.SIGTERM, lambda *_: os._exit(128 + signal.SIGTERM))
