"""`hearth up` in a process of its own."""

from __future__ import annotations

import signal
from contextlib import suppress
from pathlib import Path

from services.local.state import LocalClusterState, holder_of
from shared.errors import ConfigError
from tests.support.services.running import (
    LAST_LINE,
    cluster_of,
    eventually,
    processes_of,
    read_until,
    start_hearth,
)


class Up:
    """A running `hearth up`."""

    def __init__(self, state_home: Path, *arguments: str, **environ: str) -> None:
        self.state_home = state_home
        self.environ = environ
        arguments = ("up", "--http", "127.0.0.1:0", *arguments)
        self.process = start_hearth(state_home, *arguments, **environ)
        self._printed = ""
        self.directory, self.state = self._wait()

    def _wait(self) -> tuple[Path, LocalClusterState]:
        found = eventually(lambda: self._cluster() or self.process.poll() is not None, "up")
        assert isinstance(found, tuple), self.process.communicate()[0]
        return found

    def _cluster(self) -> tuple[Path, LocalClusterState] | None:
        """Returns the cluster of this process. The Redis of one that was killed in the same folder
        holds that one's lock for a moment longer, and the lock has no holder while it is replaced.
        """
        found = cluster_of(self.state_home)
        with suppress(ConfigError):
            if found is not None and holder_of(found[0]) == self.process.pid:
                return found
        return None

    def printed(self) -> str:
        """Returns what it has printed until it was ready, with the commands to copy."""
        if not self._printed:
            self._printed = read_until(self.process, LAST_LINE)
        return self._printed

    def pid_of(self, command: str) -> int:
        """The pid of the only process of this `hearth` command, or of this server."""
        (pid,) = self.pids_of(command)
        return pid

    def pids_of(self, command: str) -> list[int]:
        words = {pid: line.split("\0") for pid, line in processes_of(self.state_home).items()}
        return [
            pid
            for pid, line in words.items()
            if command in line[3:4] or Path(line[0].split(" ")[0]).name == command
        ]

    def stop(self, number: signal.Signals = signal.SIGTERM) -> str:
        """Returns all that it has printed."""
        self.process.send_signal(number)
        output, _ = self.process.communicate(timeout=60)
        return self._printed + output
