"""The cluster with TLS that several_hosts.md tells to start, on one host."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.guide_blocks import FOLDER, ROOT, blocks_of
from tests.support.servers import free_port

LIMIT_S = 400
GUIDE = FOLDER / "several_hosts.md"
SERVED = "https://10.0.0.1:8443"
WAIT = f"""
until curl -s --cacert tls/ca.crt {SERVED}/ready | grep '"ready":true'; do sleep 1; done
curl -sS --cacert tls/ca.crt {SERVED}/v1/completions -H "x-api-key: $(tail -1 key)" \\
  -H 'Content-Type: application/json' -d '{{"prompt": "What is a block?", "max_tokens": 8}}'
"""
BEGIN = "trap 'kill $(jobs -p); wait' EXIT"


@pytest.mark.long
def test_processes_with_tls_answer(tmp_path: Path) -> None:
    for name in ("shared", "services"):
        (tmp_path / name).symlink_to(ROOT / name)
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    done = subprocess.run(
        ["timeout", str(LIMIT_S), "bash", "-c", on_this_host(script())],
        cwd=tmp_path,
        env=os.environ | {"PATH": path, "HOME": str(tmp_path), "COLUMNS": "200"},
        capture_output=True,
        text=True,
    )
    assert '"ready":true' in done.stdout, done.stderr
    assert '"finish_reason":"length"' in done.stdout, f"{done.stdout}\n{done.stderr}"
    assert all(f"{role} " in done.stdout for role in ("prefill", "decode", "scheduler"))


def script() -> str:
    """Returns the guide's blocks; those of host B run in a shell of their own."""
    parts = []
    for block in blocks_of(GUIDE):
        if block.mark == "run: tls elsewhere":
            parts.append(f"(\n{block.text}) &\n{WAIT}")
        elif block.mark == "run: tls":
            parts.append(block.text.replace("tenant add team-a ", "tenant add team-a > key "))
    return "\n".join([BEGIN, *parts])


def on_this_host(text: str) -> str:
    text = text.replace("10.0.0.1", "127.0.0.1").replace("10.0.0.2", "127.0.0.1")
    for port in ("4222", "6379", "8443", "7700"):
        text = text.replace(port, str(free_port()))
    return text
