"""The health check of a container, which imports nothing but a probe."""

from __future__ import annotations

import subprocess
import sys

import pytest

from services.client.probe import is_alive
from shared.metrics.metrics_server import MetricsServer
from tests.support.servers import free_port

PROGRAM = """
import os, sys
sys.argv = ["hearth", "health"]
from services.start import main
try:
    main()
finally:
    print(any(name in sys.modules for name in ("typer", "msgspec", "asyncio", "services.__main__")))
"""


def test_process_with_a_port_is_asked_and_nothing_is_imported() -> None:
    server = MetricsServer("127.0.0.1", 0)
    server.start()
    try:
        done = run({"HEARTH_METRICS_PORT": str(server.port), "HEARTH_METRICS_HOST": "0.0.0.0"})
    finally:
        server.stop()
    assert done.returncode in (0, 1), done.stderr  # 1: this process has no event loop that runs
    assert done.stdout == "False\n"
    assert run({"HEARTH_METRICS_PORT": str(free_port())}).returncode == 1


def run(environ: dict[str, str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", PROGRAM], env=environ, capture_output=True, text=True
    )


@pytest.mark.parametrize("port", [None, "", "0", "x"])
def test_process_without_a_port_is_not_asked(port: str | None) -> None:
    assert is_alive({} if port is None else {"HEARTH_METRICS_PORT": port}) is None
