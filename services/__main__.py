"""The `hearth` command, the entry point of all processes.

Each command imports its service, so that `--help` is quick and only workers load the engine.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Callable
from functools import cache
from typing import Annotated, Any, NoReturn

_ON_INTERRUPT = signal.getsignal(signal.SIGINT)
if _ON_INTERRUPT is signal.default_int_handler:  # no traceback of what is imported until then
    with contextlib.suppress(ValueError):  # not the main thread
        signal.signal(signal.SIGINT, lambda *_: os._exit(130))

import typer

from services.cli.checkpoints import (
    bundle_commands,
    plan_command,
    quality_command,
    quantize_command,
)
from services.cli.cluster import commands, role_command, stop_command, warm_command
from services.cli.cluster.service_options import service_command
from services.cli.doctor import doctor_command
from services.cli.help import ServiceHelpCommand, use_plain_help
from services.cli.logs import logs_command
from services.cli.models.model_commands import model_app
from services.cli.operators import redis_commands
from services.cli.options import OPERATE
from services.cli.tenants import tenant_commands
from services.cli.tenants.prefix_commands import prefix_app
from services.cli.trace import trace_command
from services.local.processes.environ import thread_environ
from shared.config import (
    GatewayConfig,
    HostConfig,
    KvIndexConfig,
    RankConfig,
    SchedulerConfig,
    WorkerConfig,
)
from shared.errors import ConfigError, HearthError
from shared.lifecycle.release import NOT_INSTALLED, installed_release
from shared.messages import Role

if _ON_INTERRUPT is signal.default_int_handler:
    with contextlib.suppress(ValueError):
        signal.signal(signal.SIGINT, _ON_INTERRUPT)

# Typer bundles click or uses the installed one, by its version; this finds the one in use.
UsageError: Any = next(each for each in typer.BadParameter.__mro__ if each.__name__ == "UsageError")
VALIDATION_PREFIX = "Value error, "  # pydantic's, by which newer typers check values
SERVICES = "One process of a cluster"

app = typer.Typer(
    name="hearth",
    help="Serve large language models from many small GPU sites as one system.",
    epilog="Start with: hearth up",
    rich_markup_mode=None,  # `services.cli.help`
    pretty_exceptions_enable=False,
)


def _print_version(is_requested: bool) -> None:
    if is_requested:
        version()
        raise typer.Exit


@app.callback()
def root(
    is_version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print it.")
    ] = False,
) -> None:
    """Defines the options before a command."""


def version() -> None:
    """Print the version."""
    release = installed_release()
    if release == NOT_INSTALLED:
        raise ConfigError("no version: hearth runs from a tree that is not installed")
    print(release)


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


def _run_worker(config: WorkerConfig, roles: tuple[Role, ...]) -> int:
    _set_thread_environ(config)
    from services.worker.worker import build_worker
    from shared.lifecycle.process import run_service

    return run_service(config, lambda: build_worker(config, roles))


def _set_thread_environ(config: WorkerConfig) -> None:
    """Sets the number of threads, which math libraries read when they are loaded."""
    for name, value in thread_environ(config.num_threads or len(os.sched_getaffinity(0))).items():
        os.environ.setdefault(name, value)


def _run_prefill(config: WorkerConfig, is_both: bool) -> int:
    return _run_worker(config, ("prefill", "decode") if is_both else ("prefill",))


def _run_decode(config: WorkerConfig, is_both: bool) -> int:
    return _run_worker(config, ("prefill", "decode") if is_both else ("decode",))


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
        "prefill",
        service_command(worker, "prefill", _run_prefill, has_role_option=True),
        "Computes the KV cache of prompts.",
    )
    add(
        "decode",
        service_command(worker, "decode", _run_decode, has_role_option=True),
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


app.registered_commands += commands.app.registered_commands
app.registered_commands += stop_command.app.registered_commands
app.registered_commands += doctor_command.app.registered_commands
app.registered_commands += logs_command.app.registered_commands
app.add_typer(model_app, name="model", rich_help_panel=OPERATE)
app.add_typer(prefix_app, name="prefix", rich_help_panel=OPERATE)
app.registered_commands += tenant_commands.app.registered_commands
app.add_typer(tenant_commands.tenant_app, name="tenant", rich_help_panel=OPERATE)
app.registered_commands += bundle_commands.app.registered_commands
app.registered_commands += quantize_command.app.registered_commands
app.registered_commands += quality_command.app.registered_commands
app.registered_commands += warm_command.app.registered_commands
app.registered_commands += plan_command.app.registered_commands
app.registered_commands += role_command.app.registered_commands
app.registered_commands += redis_commands.app.registered_commands
_add_services()
app.registered_commands += trace_command.app.registered_commands
app.command(rich_help_panel=OPERATE, epilog="Example:  hearth version")(version)
use_plain_help(app)


@cache
def _command() -> Any:
    """The tree of all commands, which takes 70 ms."""
    return typer.main.get_command(app)


def main() -> None:
    """Reports an error as one line on standard error and exit status 2."""
    arguments = sys.argv[1:] or ["--help"]
    try:
        status = _command().main(arguments, prog_name="hearth", standalone_mode=False)
    except UsageError as error:
        _exit_with_error(error.format_message().replace(VALIDATION_PREFIX, ""))
    except HearthError as error:
        _exit_with_error(error.message)
    except (KeyboardInterrupt, typer.Abort):
        sys.exit(130)
    sys.exit(status or 0)


def _exit_with_error(message: str) -> NoReturn:
    print(f"hearth: {' '.join(message.split())}", file=sys.stderr)
    sys.exit(2)


if __name__ == "__main__":
    main()
