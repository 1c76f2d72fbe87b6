"""The modules of the commands. A command's module is imported, and its options are built, when the
command is used: all of them take 0.3 s.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from importlib import import_module
from typing import Any

import typer

from services.cli.help import HelpGroup, use_plain_help
from services.cli.options import OPERATE

# In the order of the help. A group of commands is named by its app.
MODULES = {
    "up": "cli.cluster.up_commands",
    "chat": "cli.cluster.chat_command",
    "bench": "cli.cluster.up_commands",
    "status": "cli.fleet.status_command",
    "stop": "cli.cluster.stop_command",
    "doctor": "cli.doctor.doctor_command",
    "credential": "cli.cluster.credential_commands",
    "nats-config": "cli.cluster.credential_commands",
    "install-service": "cli.deployment.install_service_command",
    "health": "cli.fleet.status_command",
    "logs": "cli.logs.logs_command",
    "api-key": "cli.tenants.tenant_commands",
    "usage": "cli.tenants.tenant_commands",
    "compress": "cli.checkpoints.bundle_commands",
    "decompress": "cli.checkpoints.bundle_commands",
    "quantize": "cli.checkpoints.quantize_command",
    "quality": "cli.checkpoints.quality_command",
    "warm": "cli.cluster.warm_command",
    "models": "cli.checkpoints.plan_command",
    "plan": "cli.checkpoints.plan_command",
    "drain": "cli.deployment.drain_command",
    "role": "cli.cluster.role_command",
    "profile": "cli.profile.profile_command",
    "redis-acl": "cli.operators.redis_commands",
    "audit": "cli.operators.redis_commands",
    "backup": "cli.operators.backup_commands",
    "restore": "cli.operators.backup_commands",
    "trace": "cli.trace.trace_command",
    "verify": "cli.verify.verify_command",
    "version": "cli.version_command",
    "model": "cli.models.model_commands:model_app",
    "prefix": "cli.tenants.prefix_commands:prefix_app",
    "tenant": "cli.tenants.tenant_commands:tenant_app",
    "gateway": "service_commands",
    "scheduler": "service_commands",
    "kv-index": "service_commands",
    "encode": "service_commands",
    "prefill": "service_commands",
    "decode": "service_commands",
    "worker": "service_commands",
    "host": "service_commands",
    "rank": "service_commands",
}


class CommandTable(Mapping[str, Any]):
    """The commands by name. Each is built when it is read."""

    def __init__(self) -> None:
        self._built: dict[str, Any] = {}

    def __getitem__(self, name: str) -> Any:
        if name not in self._built:
            self._built[name] = _build(name, MODULES[name])
        return self._built[name]

    def __iter__(self) -> Iterator[str]:
        return iter(MODULES)

    def __len__(self) -> int:
        return len(MODULES)


class RootGroup(HelpGroup):
    """The `hearth` command."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.commands = CommandTable()  # type: ignore[assignment]


def _build(name: str, place: str) -> Any:
    module, _, group = place.partition(":")
    found: typer.Typer = getattr(import_module(f"services.{module}"), group or "app")
    one = typer.Typer(rich_markup_mode=None, pretty_exceptions_enable=False)  # see `help.py`
    if group:
        one.add_typer(found, name=name, rich_help_panel=OPERATE)
    else:
        one.registered_commands = [
            each for each in found.registered_commands if _name(each) == name
        ]
    use_plain_help(one)
    return typer.main.get_group(one).commands[name]


def _name(command: Any) -> str:
    return command.name or command.callback.__name__.replace("_", "-")
