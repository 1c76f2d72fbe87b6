"""Links over unix sockets, which are never sealed, on a machine without cryptography."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[4]
CODE = """
import asyncio, sys
sys.modules["cryptography"] = None  # importing it raises ModuleNotFoundError
from shared.kv_wire.dialer import Dialer
from shared.kv_wire.kv_server import KvServer
from tests.shared.kv_wire.support import INSTANCE, RecordingSink, fill_with, header, payload_of

async def main():
    server, dialer, sink = await KvServer.start(instance_id=INSTANCE), Dialer(), RecordingSink()
    server.expect(b"placement-a", sink)
    link = await dialer.link(server.address)
    await link.send(header(5000), fill_with(payload_of(5000)))
    print([data == payload_of(5000) for _, data in sink.frames])
    await dialer.close()
    await server.close()

asyncio.run(main())
"""


def test_frames_are_pushed_without_cryptography() -> None:
    command = [sys.executable, "-c", CODE]
    child = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
    assert child.stdout == "[True]\n", child.stderr
