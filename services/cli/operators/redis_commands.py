"""`hearth redis-acl` and `hearth audit`."""

from __future__ import annotations

import os
from collections.abc import Sequence
from enum import StrEnum
from typing import Annotated

import typer

from services.cli.operators.audited import audited
from services.cli.options import OPERATE
from shared.errors import ConfigError

RedisUrl = Annotated[
    str | None,
    typer.Option(envvar="HEARTH_REDIS_URL", help="Redis URL (default: the local cluster's)."),
]

app = typer.Typer()
MAX_SHOWN = 30_000
DEFAULT_SHOWN = 50


class AuditKind(StrEnum):
    """The kinds of `shared.tenancy.audit`, which is imported only where it is used."""

    COMMAND = "command"
    DELETION = "deletion"
    REFUSAL = "refusal"


@app.command(
    "redis-acl",
    rich_help_panel=OPERATE,
    epilog="Example:  HEARTH_REDIS_GATEWAY_PASSWORD=… hearth redis-acl gateway >> users.acl",
)
def redis_acl(
    roles: Annotated[
        list[str] | None, typer.Argument(metavar="[ROLE]...", help="Default: all.")
    ] = None,
    is_applied: Annotated[
        bool, typer.Option("--apply", help="Make the users at the Redis URL, and print nothing.")
    ] = False,
    redis_url: RedisUrl = None,
) -> None:
    """Print a Redis user for each role: gateway, kv_index, host, operator.

    Each has the commands and keys that the role needs. The lines are those of an ACL file, or of
    redis.conf. Passwords come from HEARTH_REDIS_<ROLE>_PASSWORD; the lines have their digests. A
    process logs in with redis://ROLE:PASSWORD@HOST:PORT.
    """
    from services.local.redis_acl import REDIS_ROLES, acl_line

    found = {_role(each): _password(_role(each)) for each in roles or REDIS_ROLES}
    if is_applied:
        _apply(list(found), redis_url)
        return
    for role, password in found.items():
        print(acl_line(role, password))


@audited("redis-acl")
def _apply(roles: Sequence[str], redis_url: str | None) -> None:
    """Sets the users of these roles. Names alone are the arguments that are recorded."""
    from services.cli.operators.redis_users import set_users
    from services.local.redis_acl import acl_rules

    set_users(redis_url, {role: acl_rules(role, _password(role)) for role in roles})


def _role(text: str) -> str:
    """Raises ConfigError."""
    from services.local.redis_acl import REDIS_ROLES

    role = text.replace("-", "_")
    if role not in REDIS_ROLES:
        raise ConfigError(f"no Redis user for role {text!r}, only {', '.join(REDIS_ROLES)}")
    return role


def _password(role: str) -> str:
    """Raises ConfigError."""
    name = f"HEARTH_REDIS_{role.upper()}_PASSWORD"
    found = os.environ.get(name, "")
    if not found:
        raise ConfigError(f"{name} is not set: the password of the Redis user {role}")
    return found


@app.command(
    rich_help_panel=OPERATE,
    epilog="Examples:  hearth audit --kind refusal  ·  hearth audit --jsonl > audit.jsonl",
)
def audit(
    count: Annotated[
        int | None,
        typer.Option(min=1, max=MAX_SHOWN, help="The last so many (default: 50; JSON Lines: all)."),
    ] = None,
    kind: Annotated[
        list[AuditKind] | None,
        typer.Option(help="command, deletion or refusal; may be repeated (default: all)."),
    ] = None,
    redis_url: RedisUrl = None,
    json: Annotated[bool, typer.Option("--json", help="JSON instead of a table.")] = False,
    jsonl: Annotated[
        bool, typer.Option("--jsonl", help="JSON Lines: an object a line, the oldest first.")
    ] = False,
) -> None:
    """Show commands of operators, deletions of tenants' data and refusals: who, what, when. Redis
    holds some 10,000 of each kind.
    """
    from services.cli.operators.audit_table import print_lines, read_audit, show_audit
    from services.cli.output import print_json

    num_shown = count or (MAX_SHOWN if jsonl else DEFAULT_SHOWN)
    lines = read_audit(redis_url, num_shown, [each.value for each in kind or AuditKind])
    if jsonl:
        print_lines(lines)
    else:
        print_json(lines) if json else show_audit(lines)
