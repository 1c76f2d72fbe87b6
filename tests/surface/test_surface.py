"""What needs no process: commands, configuration, subjects, messages, Redis, metrics."""

from __future__ import annotations

import inspect
import os
from collections.abc import Iterator
from hashlib import sha256
from typing import Any, get_args

import msgspec
import pytest
import typer

from services.__main__ import app
from services.gateway.dialects.dialect_table import DIALECTS
from services.gateway.dialects.responses.storage.record import ResponseRecord
from services.gateway.nats_api.endpoints import api_endpoints
from services.gateway.operator.cluster.kept_history import KeptHistory
from services.local.redis_acl import REDIS_ROLES
from shared import config, messages, subjects
from shared.config import ProcessConfig
from shared.fleet import read_fleet
from shared.metrics.families.fleet import FleetCollector
from shared.metrics.machine import MachineCollector
from shared.model_registry.record import RegisteredModel
from shared.subjects import CredentialRole, api_permissions, permissions
from shared.tenancy import (
    home_tenants,
    rate_limit,
    site_usage,
    stored_responses,
    tenant,
)
from shared.tenancy.model_alias import ModelAlias
from shared.tenancy.prefixes import pinned_prefix
from shared.tenancy.prefixes.pinned_prefix import Entry, PinnedPrefix
from shared.tenancy.tenant import ApiKeyRecord, TenantRecord
from shared.tenancy.tenant_copy import TenantCopy
from shared.tls import TlsFiles
from tests.surface.recording import check_record
from tests.surface.type_shape import shape_lines

REDIS_RECORDS = {
    "hearth:tenants": TenantRecord,
    "hearth:api_key:{digest}": ApiKeyRecord,
    "hearth:tenant_copies: body of SignedCopy": TenantCopy,
    "hearth:model:catalogue": RegisteredModel,
    "hearth:model:aliases": ModelAlias,
    "hearth:{tenant}:pinned_prefixes": Entry,
    "hearth:{tenant}:pinned_prefix:{name}": PinnedPrefix,
    "hearth:{tenant}:response:{id}": ResponseRecord,
    "hearth:cluster:history": KeptHistory,
}
SCRIPTS = (tenant, home_tenants, site_usage, pinned_prefix, rate_limit, stored_responses)


def test_commands(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in filter(lambda each: each.startswith("HEARTH_"), list(os.environ)):
        if name != "HEARTH_WRITE_SURFACE":
            monkeypatch.delenv(name)
    check_record("commands.txt", "\n".join(_command_lines("hearth", typer.main.get_command(app))))


def _command_lines(path: str, command: Any) -> Iterator[str]:
    yield f"{path}: {' '.join((command.help or '').split())}"
    for each in command.params:
        names = ", ".join([*each.opts, *each.secondary_opts])
        shown = {
            "required": each.required or None,
            "many": each.multiple or each.nargs == -1 or None,
            "default": None if callable(each.default) else repr(each.default),
            "variable": each.envvar,
        }
        given = [f"{key} {value}" for key, value in shown.items() if value not in (None, "None")]
        text = " ".join((getattr(each, "help", None) or "").split())
        yield f"  {names} ({'; '.join(given)}): {text}"
    for name, each in sorted(getattr(command, "commands", {}).items()):
        yield from ("", *_command_lines(f"{path} {name}", each))


def test_configuration() -> None:
    found = [each for each in vars(config).values() if isinstance(each, type)]
    kinds = sorted(
        (each for each in found if issubclass(each, ProcessConfig)), key=lambda each: each.__name__
    )
    assert len(kinds) > 5
    check_record(
        "configuration.txt", "\n".join(line for each in kinds for line in _config_lines(each))
    )


def _config_lines(kind: type[ProcessConfig]) -> Iterator[str]:
    yield kind.__name__.removesuffix("Config")
    types = {
        name: text for each in kind.__mro__ for name, text in inspect.get_annotations(each).items()
    }
    for field in msgspec.structs.fields(kind):
        default = field.default
        if field.default_factory is not msgspec.NODEFAULT:
            default = field.default_factory()
        text = "" if default is msgspec.NODEFAULT else f" = {default!r}"
        yield f"  {field.name}: {types[field.name]}{text}"


def test_subjects() -> None:
    lines = []
    for role in get_args(CredentialRole):
        for region in ("", "eu"):
            lines.append(f"{role} in region {region!r}")
            lines += _permission_lines(permissions(role, "c", region))
    for role in ("gateway", "scheduler", "prefill", "decode"):
        lines.append(f"{role} of a site with links")
        lines += _permission_lines(permissions(role, "c", is_linked=True))
    for role in get_args(CredentialRole):
        plain, classed = (
            _permission_lines(permissions(role, "c", "eu", is_linked=True, region_classes=names))
            for names in ((), ("k",))
        )
        lines += [f"{role} of a region class", *(each for each in classed if each not in plain)]
    lines += ["gateway to its API clients", *_permission_lines(api_permissions("g"))]
    check_record("subjects.txt", "\n".join(lines))


def _permission_lines(allowed: subjects.Permissions) -> list[str]:
    return [
        *(f"  publish {each}" for each in allowed.publish),
        *(f"  subscribe {each}" for each in allowed.subscribe),
        f"  replies {allowed.max_replies} within {allowed.reply_s} s",
    ]


def test_messages() -> None:
    modules = vars(messages) | vars(read_fleet)
    found = [each for each in modules.values() if isinstance(each, type)]
    sent = [each for each in found if issubclass(each, msgspec.Struct) and _tag(each) is not None]
    assert len(sent) > 40
    lines = []
    for each in sorted(sent, key=lambda each: str(_tag(each))):
        lines += [str(_tag(each)), *shape_lines(each)]
    check_record("messages.txt", "\n".join(lines))


def _tag(kind: type[msgspec.Struct]) -> object:
    return kind.__struct_config__.tag


def test_redis() -> None:
    lines = []
    for key, record in REDIS_RECORDS.items():
        lines += [key, *shape_lines(record)]
    for name, role in REDIS_ROLES.items():
        lines += [f"user {name}", *(f"  {each}" for each in (*role.keys, *role.commands))]
    for module in SCRIPTS:
        for name, text in vars(module).items():
            if name.endswith("_LUA") and not name.startswith("_"):
                lines += [f"script {name}", *(f"  {line}" for line in text.strip().splitlines())]
    check_record("redis.txt", "\n".join(lines))


def test_metrics_of_processes() -> None:
    collectors = FleetCollector(tuple), MachineCollector(TlsFiles(), ())
    found = sorted((m for each in collectors for m in each.collect()), key=lambda each: each.name)
    assert len(found) > 50
    rows = [f"{each.name} {each.type} {_labels(each)}: {each.documentation}" for each in found]
    check_record("metrics_of_processes.txt", "\n".join(rows))


def _labels(metric: Any) -> str:
    return f"{{{', '.join(metric._labelnames)}}}"


def test_endpoints_over_nats() -> None:
    """Of schemas a digest: `openapi.json` has the same in full."""
    lines = []
    for each in (each.info for each in api_endpoints(DIALECTS).values()):
        lines.append(f"{each.name} {each.subject} {each.queue_group}")
        for name, value in sorted(each.metadata.items()):
            is_schema = value.startswith("{")
            shown = sha256(value.encode()).hexdigest()[:16] if is_schema else value
            lines.append(f"  {name} {shown}")
    check_record("nats_endpoints.txt", "\n".join(lines))
