"""`hearth model alias`, `unalias` and `aliases`: other names for a model."""

from __future__ import annotations

from typing import Annotated

import typer

from services.cli.operators.audited import audited

app = typer.Typer()

Alias = Annotated[str, typer.Argument(metavar="NAME", help="Alias: the name in requests.")]
Tenant = Annotated[str | None, typer.Option(help="Tenant id (default: all tenants).")]
RedisUrl = Annotated[
    str | None,
    typer.Option(envvar="HEARTH_REDIS_URL", help="Redis URL (default: the local cluster's)."),
]


@app.command(epilog="Example:  hearth model alias fast hearth-demo --tenant team-a")
@audited("model alias")
def alias(
    name: Alias,
    model: Annotated[str, typer.Argument(help="Name of the model that the cluster serves.")],
    tenant: Tenant = None,
    redis_url: RedisUrl = None,
) -> None:
    """Give a model another name, replacing an alias of the same name.

    Gateways follow within a second. A tenant's own alias takes precedence over one for all
    tenants. MODEL is never looked up as an alias, and a model's own name always means that model.
    """
    from services.cli.models.alias_table import with_alias_admin

    with_alias_admin(redis_url, lambda admin: admin.put(name, model, tenant))


@app.command(epilog="Example:  hearth model unalias fast --tenant team-a")
@audited("model unalias")
def unalias(name: Alias, tenant: Tenant = None, redis_url: RedisUrl = None) -> None:
    """Remove an alias: gateways reject requests for it within a second."""
    from services.cli.models.alias_table import with_alias_admin

    with_alias_admin(redis_url, lambda admin: admin.remove(name, tenant))


@app.command("aliases", epilog="Example:  hearth model aliases --tenant team-a --json | jq")
def list_aliases(
    tenant: Annotated[
        str | None, typer.Option(help="Only the aliases that this tenant may use.")
    ] = None,
    redis_url: RedisUrl = None,
    json: Annotated[bool, typer.Option("--json", help="JSON instead of a table.")] = False,
) -> None:
    """List the aliases and their models."""
    from services.cli.models.alias_table import show_aliases, with_alias_admin

    rows = with_alias_admin(
        redis_url, lambda admin: admin.all() if tenant is None else admin.visible_to(tenant)
    )
    show_aliases(rows, is_json=json)
