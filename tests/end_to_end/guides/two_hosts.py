"""The hosts of a guide: each runs its commands in a network of its own, or all run on loopback."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from tests.support.guide_blocks import ROOT

CACHE = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")  # of compiled kernels
LINKS = "to-b", "to-a"  # the devices of the first and of the second host
LIMIT_S = 300


class Host:
    """A machine with the repository and an empty home. `enter`: the words that enter its network,
    before a command.
    """

    def __init__(self, folder: Path, enter: Sequence[str] = ()) -> None:
        folder.mkdir(exist_ok=True)
        for name in ("services", "shared"):
            (folder / name).symlink_to(ROOT / name)
        self._folder, self._enter = folder, [*enter]
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        self.environ = {"PATH": path, "HOME": str(folder), "XDG_CACHE_HOME": CACHE}
        self.environ |= {"TMPDIR": str(folder), "COLUMNS": "200"}

    def start(self, command: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            self._words(command),
            cwd=self._folder,
            env=self.environ,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def run(self, command: str, *, check: bool = True) -> subprocess.CompletedProcess[str]:
        done = subprocess.run(
            self._words(command),
            cwd=self._folder,
            env=self.environ,
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
        )
        assert done.returncode == 0 or not check, f"{command}\n{done.stdout}\n{done.stderr}"
        return done

    def _words(self, command: str) -> list[str]:
        return [*self._enter, "env", f"--chdir={self._folder}", "bash", "-c", command]


def has_networks() -> bool:
    """Whether this user may make network namespaces here."""
    if not all(map(shutil.which, ("unshare", "nsenter", "ip"))):
        return False
    command = ["unshare", "--map-root-user", "--net", "ip", "link", "add", "x", "type", "veth"]
    return subprocess.run(command, capture_output=True).returncode == 0


@contextlib.contextmanager
def linked_networks(
    first: str, second: str, *, hidden: Path
) -> Iterator[tuple[list[str], list[str]]]:
    """Yields the words that enter each of two networks, which a link with these addresses joins.
    Nothing leaves them. The first does not see the `hidden` folder, where the second one has its
    unix sockets.
    """
    hidden.mkdir()
    with contextlib.ExitStack() as stack:
        a = stack.enter_context(_network(["unshare", "--map-root-user", "--net", "--mount"]))
        b = stack.enter_context(_network([*_enter(a), "unshare", "--net"]))
        in_a, in_b = [*_enter(a), "--mount"], _enter(b)
        _run(in_a, f"mount -t tmpfs none {hidden}")
        to_b, to_a = LINKS
        _run(in_a, f"ip link add {to_b} type veth peer name {to_a} netns {b}")
        for enter, device, address in ((in_a, to_b, first), (in_b, to_a, second)):
            _run(enter, f"ip addr add {address}/24 dev {device}")
            _run(enter, f"ip link set {device} up")
            _run(enter, "ip link set lo up")
        yield in_a, in_b


@contextlib.contextmanager
def _network(command: Sequence[str]) -> Iterator[int]:
    """Yields the id of a process in a new network."""
    holder = subprocess.Popen(
        [*command, "sh", "-c", "echo; exec cat"], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert holder.stdout is not None
    try:
        assert holder.stdout.readline() == b"\n"  # it is in there
        yield holder.pid
    finally:
        holder.communicate(b"")


def _enter(process: int) -> list[str]:
    return ["nsenter", f"--target={process}", "--user", "--preserve-credentials", "--net"]


def _run(enter: Sequence[str], command: str) -> None:
    subprocess.run([*enter, *command.split()], check=True)
