"""--metrics-port of real processes: who has it, and what a port in use is answered with."""

from __future__ import annotations

import inspect
import os
import socket
import subprocess
import sys

import pytest

from services.cli.cluster.service_options import service_command
from shared.config import (
    GatewayConfig,
    HostConfig,
    KvIndexConfig,
    ProcessConfig,
    RankConfig,
    SchedulerConfig,
    WorkerConfig,
)


def has_option(config_type: type[ProcessConfig]) -> bool:
    command = service_command(config_type, "role", lambda config: 0)
    return "metrics_port" in inspect.signature(command).parameters


def test_every_role_but_ranks_has_the_option() -> None:
    for config_type in (GatewayConfig, SchedulerConfig, KvIndexConfig, WorkerConfig, HostConfig):
        assert has_option(config_type)
    assert not has_option(RankConfig)


def test_port_in_use_is_one_line_at_the_start() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        environ = {
            **os.environ,
            "HEARTH_NATS_URL": "nats://scheduler:x@127.0.0.1:1",
            "HEARTH_METRICS_PORT": str(port),
        }
        command = [sys.executable, "-m", "services", "scheduler", "--instance", "-"]
        done = subprocess.run(command, env=environ, capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr == (
        f"scheduler: metrics_port: cannot listen on 127.0.0.1:{port}: Address already in use\n"
    )


@pytest.mark.parametrize("module", ["services.scheduler.service", "services.worker.worker"])
def test_process_without_the_port_loads_no_metrics(module: str) -> None:
    code = f"import sys, {module}; print('prometheus_client' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"
