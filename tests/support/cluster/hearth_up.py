"""A full cluster, started with `hearth up` in a separate process, on free ports."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import httpx

from services.local.state import LocalClusterState, running_cluster
from shared.errors import ConfigError
from tests.support.cluster.cluster_client import START_TIMEOUT_S, ClusterClient
from tests.support.servers import free_port


@dataclass
class Cluster(ClusterClient):
    process: subprocess.Popen[str]
    startup: str  # output of `hearth up` until the cluster was ready
    folder: Path  # the folder of its state

    def pid_of(self, process_id: str) -> int:
        """Returns the pid of the service process with this credential. Raises
        LookupError if none runs.
        """
        for pid in self._children():
            with contextlib.suppress(OSError):  # the process may have just been killed
                environ = Path(f"/proc/{pid}/environ").read_bytes()
                if f"HEARTH_NATS_URL=nats://{process_id}:".encode() in environ:
                    return pid
        raise LookupError(f"{process_id} does not run")

    def pid_of_server(self, binary: str) -> int:
        """Returns the pid of this cluster's nats-server or redis-server."""
        for pid in self._children():
            with contextlib.suppress(OSError):
                if os.readlink(f"/proc/{pid}/exe").endswith(binary):  # noqa: PTH115
                    return pid
        raise LookupError(f"{binary} does not run")

    def _children(self) -> list[int]:
        parent = self.process.pid
        text = Path(f"/proc/{parent}/task/{parent}/children").read_text()
        return [int(pid) for pid in text.split()]

    @contextlib.contextmanager
    def frozen(self, *pids: int) -> Iterator[None]:
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
        try:
            yield
        finally:
            for pid in pids:
                os.kill(pid, signal.SIGCONT)

    def log_of(self, process_id: str) -> str:
        directory, _ = running_cluster(clusters_of(self.folder))
        return (directory / "logs" / f"{process_id}.log").read_text(errors="replace")

    def kill(self, process_id: str) -> None:
        os.kill(self.pid_of(process_id), signal.SIGKILL)


@contextlib.contextmanager
def run_cluster(
    folder: Path,
    *options: str,
    max_local_prefill_tokens: int = 4,
    variables: Mapping[str, str] = {},
) -> Iterator[Cluster]:
    """Runs `hearth up` until the block ends. `variables` are of its environment.

    Prompts above `max_local_prefill_tokens` are handed off to prefill workers; by default decode
    workers compute prompts as short as those of tests.
    """
    handed_off = {"HEARTH_MAX_LOCAL_PREFILL_TOKENS": str(max_local_prefill_tokens)}
    environ = os.environ | handed_off | variables | {"XDG_STATE_HOME": str(folder)}
    port = free_port()
    command = [sys.executable, "-m", "services", "up", "--http", f"127.0.0.1:{port}", *options]
    process = subprocess.Popen(
        command, env=environ, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    try:
        state = _wait_for_state(process, clusters_of(folder))
        headers = {"Authorization": f"Bearer {state.api_key}"}
        with httpx.Client(base_url=state.url, headers=headers, timeout=120) as client:
            yield Cluster(state, client, process, _read_startup(process), folder)
    finally:
        process.send_signal(signal.SIGTERM)
        output, _ = process.communicate(timeout=60)
    assert process.returncode == 0, output


def clusters_of(folder: Path) -> Path:
    return folder / "hearth" / "clusters"


def _read_startup(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    lines = []
    for line in process.stdout:
        lines.append(line)
        if line.startswith("ready in"):
            return "".join(lines)
    raise AssertionError(f"the cluster ended: {''.join(lines)}")


def _wait_for_state(process: subprocess.Popen[str], clusters: Path) -> LocalClusterState:
    deadline = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline:
        with contextlib.suppress(ConfigError):
            return running_cluster(clusters)[1]
        if process.poll() is not None:
            break
        time.sleep(0.05)
    output, _ = process.communicate(timeout=60)
    raise AssertionError(f"the cluster did not start: {output}")
