"""The commands that are services: `hearth gateway`, `hearth decode` and so on.

Each imports its own service, so that only workers load the engine.
"""

from __future__ import annotations

import os
from collections.abc import Callable

import typer

from services.cli.cluster.service_options import DecodeRole, PrefillRole, service_command
from services.cli.help import ServiceHelpCommand
from services.local.processes.environ import thread_environ
from shared.config import (
    EncodeConfig,
    GatewayConfig,
    HostConfig,
    KvIndexConfig,
    RankConfig,
    SchedulerConfig,
    WorkerConfig,
)
from shared.messages import Role

SERVICES = "One process of a cluster"

app = typer.Typer()


def _run_gateway(config: GatewayConfig) -> int:
    from services.gateway.service import build_gateway
    from shared.lifecycle.process import run_service

    return run_service(config, lambda: build_gateway(config))


def _run_scheduler(config: SchedulerConfig) -> int:
    from services.scheduler.service import build_scheduler
    from shared.lifecycle.process import run_service

    return run_service(config, lambda: build_scheduler(config))


def _run_kv_index(config: KvIndexConfig) -> int:
    from services.kv_index.service import build_kv_index
    from shared.lifecycle.process import run_service

    return run_service(config, lambda: build_kv_index(config))


def _run_host(config: HostConfig) -> int:
    from services.host.service import build_host
    from shared.lifecycle.process import run_service

    return run_service(config, lambda: build_host(config))


def _run_worker(config: WorkerConfig, roles: tuple[Role, ...], *, is_encoding: bool = False) -> int:
    _set_thread_environ(config)
    from services.worker.worker import build_worker
    from shared.lifecycle.process import run_service

    return run_service(config, lambda: build_worker(config, roles, is_encoding=is_encoding))


def _run_encode(config: EncodeConfig) -> int:
    _set_thread_environ(config)
    from services.worker.encode_worker import build_encode_worker
    from shared.lifecycle.process import run_service

    return run_service(config, lambda: build_encode_worker(config))


def _set_thread_environ(config: EncodeConfig) -> None:
    """Sets the number of threads, which math libraries read when they are loaded."""
    for name, value in thread_environ(config.num_threads or len(os.sched_getaffinity(0))).items():
        os.environ.setdefault(name, value)


def _run_prefill(config: WorkerConfig, role: str) -> int:
    roles: tuple[Role, ...] = ("prefill", "decode") if role == "both" else ("prefill",)
    return _run_worker(config, roles, is_encoding=role == "encode")


def _run_decode(config: WorkerConfig, role: str) -> int:
    return _run_worker(config, ("prefill", "decode") if role == "both" else ("decode",))


def _run_both(config: WorkerConfig) -> int:
    return _run_worker(config, ("prefill", "decode"))


def _run_rank(config: RankConfig) -> int:
    from services.worker.rank_service import run_rank

    return run_rank(config)


_VARIABLES = "Each option is also a variable: --metrics-port is HEARTH_METRICS_PORT."
_EXAMPLE = "Example:  HEARTH_NATS_URL=nats://ID:PASSWORD@HOST:4222 hearth"


def _add_services() -> None:
    def add(name: str, command: Callable[..., None], about: str) -> None:
        app.command(
            name,
            help=about,
            epilog=f"{_EXAMPLE} {name}\n\n{_VARIABLES}",
            rich_help_panel=SERVICES,
            cls=ServiceHelpCommand,
        )(command)

    worker = WorkerConfig
    add("gateway", service_command(GatewayConfig, "gateway", _run_gateway), "HTTP gateway.")
    add(
        "scheduler",
        service_command(SchedulerConfig, "scheduler", _run_scheduler),
        "Places requests on workers.",
    )
    add(
        "kv-index",
        service_command(KvIndexConfig, "kv_index", _run_kv_index),
        "Tracks which worker holds which prefix.",
    )
    add(
        "encode",
        service_command(EncodeConfig, "encode", _run_encode),
        "Encodes the images of prompts.",
    )
    add(
        "prefill",
        service_command(worker, "prefill", _run_prefill, role_type=PrefillRole),
        "Computes the KV cache of prompts.",
    )
    add(
        "decode",
        service_command(worker, "decode", _run_decode, role_type=DecodeRole),
        "Generates tokens.",
    )
    add(
        "worker",
        service_command(worker, "worker", _run_both),
        "Prefill and decode over one engine.",
    )
    add(
        "host",
        service_command(HostConfig, "host", _run_host),
        "Starts, parks and wakes the workers of many models.",
    )
    add(
        "rank",
        service_command(RankConfig, "rank", _run_rank),
        "Ranks of a worker that is on another host.",
    )


_add_services()
