"""What systemd does for one unit, as far as Hearth depends on it: the command with its variables
and credentials, READY=1, a watchdog, a restart.
"""

from __future__ import annotations

import os
import shlex
import signal
import socket
import subprocess
import threading
from collections import defaultdict
from pathlib import Path
from string import Template
from time import monotonic

POLL_S = 0.05
FOLDERS = {"%C": "cache", "%S": "state", "%t": "run", "%d": "credentials"}


def read_unit(root: Path, name: str) -> dict[str, list[str]]:
    """Returns the [Service] settings of hearth@NAME and its drop-in, in their order."""
    units, settings = root / "etc/systemd/system", defaultdict(list)
    for path in (units / "hearth@.service", units / f"hearth@{name}.service.d/process.conf"):
        section = ""
        for line in path.read_text().splitlines():
            if line.startswith("["):
                section = line
            elif section == "[Service]" and "=" in line and not line.startswith("#"):
                key, _, value = line.partition("=")
                settings[key].append(value)
    return settings


class Supervisor:
    """Runs hearth@NAME of the files below `root`, until it is left."""

    def __init__(self, root: Path, name: str, *, watchdog_s: float) -> None:
        self._root, self._name, self._watchdog_s = root, name, watchdog_s
        self._settings = read_unit(root, name)
        self.pids: list[int] = []  # of the processes that became ready
        self.states: list[str] = []
        self.statuses: list[int] = []
        self._is_stopping = False
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> Supervisor:
        self._prepare()
        self._thread.start()
        return self

    def try_once(self) -> subprocess.CompletedProcess[str]:
        """Runs the command, which is expected to fail at its start."""
        self._prepare()
        command, environ = self._command(self._root / "notify")
        return subprocess.run(command, env=environ, capture_output=True, text=True, timeout=60)

    def _prepare(self) -> None:
        """Makes the folders, and loads the credentials."""
        for folder in FOLDERS.values():
            (self._root / folder / "hearth").mkdir(parents=True, exist_ok=True)
        for each in self._settings["LoadCredential"]:
            name, _, source = each.partition(":")
            (self._root / "credentials" / name).write_bytes(Path(source).read_bytes())

    def __exit__(self, *_: object) -> None:
        self._is_stopping = True
        self._thread.join()

    def _resolved(self, text: str) -> str:
        for specifier, folder in FOLDERS.items():
            text = text.replace(specifier, str(self._root / folder))
        return text.replace("%i", self._name).replace("%%", "%")

    def _environ(self, address: Path) -> dict[str, str]:
        environ = {"PATH": os.environ["PATH"], "NOTIFY_SOCKET": str(address)}
        environ["WATCHDOG_USEC"] = str(int(self._watchdog_s * 1e6))
        assignments = [word for line in self._settings["Environment"] for word in shlex.split(line)]
        for file in self._settings["EnvironmentFile"]:
            lines = (self._root / self._resolved(file).lstrip("/")).read_text().splitlines()
            assignments += [each for each in lines if not each.startswith("#")]
        return environ | dict(self._resolved(each).split("=", 1) for each in assignments)

    def _command(self, address: Path) -> tuple[list[str], dict[str, str]]:
        environ = self._environ(address)
        line = self._settings["ExecStart"][-1]
        return shlex.split(Template(line).substitute(environ)), environ

    def _run(self) -> None:
        address = self._root / "notify"
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as notified:
            notified.bind(str(address))
            notified.settimeout(POLL_S)
            while not self._is_stopping:
                self._run_once(notified, *self._command(address))

    def _run_once(
        self, notified: socket.socket, command: list[str], environ: dict[str, str]
    ) -> None:
        log = (self._root / "log").open("ab")
        process = subprocess.Popen(command, env=environ, stdout=log, stderr=log)
        last_at: float | None = None  # of READY=1 or WATCHDOG=1
        while process.poll() is None and not self._is_stopping:
            state = _receive(notified)
            if state == "READY=1":
                self.pids.append(process.pid)
            if state in ("READY=1", "WATCHDOG=1"):
                last_at = monotonic()
            if state:
                self.states.append(state)
            if last_at is not None and monotonic() - last_at > self._watchdog_s:
                process.send_signal(signal.SIGKILL)  # systemd: SIGABRT, then SIGKILL
                break
        if self._is_stopping:
            process.terminate()
        self.statuses.append(process.wait(timeout=60))
        while state := _receive(notified):
            self.states.append(state)
        log.close()


def _receive(notified: socket.socket) -> str:
    try:
        return notified.recv(4096).decode()
    except TimeoutError:
        return ""
