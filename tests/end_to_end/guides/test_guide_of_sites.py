"""The two linked sites that two_sites.md tells to start, on free ports."""

from __future__ import annotations

import contextlib
import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.guide_blocks import FOLDER, ROOT, blocks_of
from tests.support.servers import free_port

LIMIT_S = 180
BEGIN = "set -m; trap 'kill $(jobs -p); wait' EXIT"
ASK = """
until curl -s http://127.0.0.1:8001/ready | grep '"ready":true'; do sleep 1; done
hearth chat --url http://127.0.0.1:8001 --api-key "$(tail -1 key)" "What is a block?" 2> chat.txt
cat chat.txt
HEARTH_NATS_URL="nats://observer@127.0.0.1:4301?seed=$PWD/keys-a/observer.nk" hearth status
"""


@pytest.mark.long
def test_site_without_a_worker_answers_over_the_link(tmp_path: Path) -> None:
    for name in ("shared", "services"):
        (tmp_path / name).symlink_to(ROOT / name)
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    done = subprocess.run(
        ["timeout", str(LIMIT_S), "bash", "-c", on_free_ports(script())],
        cwd=tmp_path,
        env=os.environ | {"PATH": path, "HOME": str(tmp_path), "COLUMNS": "200"},
        capture_output=True,
        text=True,
    )
    assert "decode b/gateway" in done.stdout, f"{done.stdout}\n{done.stderr[-4000:]}"
    assert "connected since" in done.stdout
    assert done.returncode == 0, done.stderr[-4000:]


def script() -> str:
    """Returns the guide's blocks, with an observer's credential, and `ASK` in place of its chat."""
    blocks = [each.text for each in blocks_of(FOLDER / "two_sites.md") if each.mark == "run: sites"]
    text = "\n".join(blocks).replace("worker=worker@eu", "worker=worker@eu observer=observer")
    text = re.sub(r"(hearth tenant add team-a) .*", r"\1 > key", text)
    text = re.sub(r"^hearth chat .*$", "", text, flags=re.MULTILINE)
    return "\n".join([BEGIN, text, ASK])


def on_free_ports(text: str) -> str:
    """The ports of one program differ in their last digit, which the commands compute."""
    for first in ("430", "630", "800"):
        port = free_pair()
        text = text.replace(f"{first}1", str(port)).replace(f"{first}2", str(port + 1))
        text = text.replace(f"{first}$n", f"$(({port - 1} + n))")
    return text.replace("7422", str(free_port()))


def free_pair() -> int:
    """Returns a free port after which the next one is free, too."""
    while True:
        port = free_port()
        with socket.socket() as other, contextlib.suppress(OSError):
            other.bind(("127.0.0.1", port + 1))
            return port
