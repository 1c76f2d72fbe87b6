"""The command as the first process of a container, to which the kernel sends no signal that it does
not handle.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.waiting import LIMIT_S, wait_until

HEARTH = [sys.executable, "-c", "from services.start import main; main()"]
ALONE = ["unshare", "--map-root-user", "--pid", "--fork", "--kill-child"]


def may_have_own_processes() -> bool:
    try:
        return subprocess.run([*ALONE, "true"], capture_output=True).returncode == 0
    except FileNotFoundError:
        return False


@pytest.mark.skipif(not may_have_own_processes(), reason="no namespace of processes here")
def test_sigterm_ends_a_download(tmp_path: Path) -> None:
    """Before the drain of a service is there, a stop would wait for the SIGKILL after 320 s."""
    with socket.create_server(("127.0.0.1", 0)) as hub:
        hub.settimeout(LIMIT_S)
        environ = {
            **os.environ,
            "HF_ENDPOINT": f"http://127.0.0.1:{hub.getsockname()[1]}",
            "HF_HOME": str(tmp_path),
            "HEARTH_NATS_URL": "nats://decode:x@127.0.0.1:1",
        }
        command = [*ALONE, *HEARTH, "decode", "--model-dir", "org/name"]
        with subprocess.Popen(command, env=environ, stderr=subprocess.DEVNULL) as outside:
            try:
                download, _ = hub.accept()  # it waits for a reply
                children = Path(f"/proc/{outside.pid}/task/{outside.pid}/children")
                os.kill(int(children.read_text()), signal.SIGTERM)
                wait_until(lambda: outside.poll() is not None)
                download.close()
            finally:
                outside.kill()
    assert outside.returncode == 128 + signal.SIGTERM
