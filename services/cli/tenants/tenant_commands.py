"""`hearth tenant`, `hearth usage` and `hearth api-key`."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING, Annotated, Any

import typer

from services.cli.operators.audited import audited
from services.cli.options import OPERATE
from services.cli.tenants.tenant_options import with_limits
from shared.errors import ConfigError

if TYPE_CHECKING:
    from shared.store import Store
    from shared.tenancy.tenant_admin import TenantAdmin

app = typer.Typer()
tenant_app = typer.Typer(
    help="Tenants: their API keys and limits.",
    epilog="Examples:  hearth tenant add team-a --requests-per-min 60  ·  "
    "hearth tenant limits team-a --output-tokens-per-min 20000 --concurrency unlimited  ·  "
    "hearth tenant rotate team-a",
)

Tenant = Annotated[str, typer.Argument(help="Tenant id.")]
RedisUrl = Annotated[
    str | None,
    typer.Option(envvar="HEARTH_REDIS_URL", help="Redis URL (default: the local cluster's)."),
]
Json = Annotated[bool, typer.Option("--json", help="JSON instead of a table.")]


@tenant_app.command(epilog="Example:  hearth tenant add team-a --concurrency 8 --zero-retention")
@with_limits
@audited("tenant add")
def add(tenant: Tenant, changes: dict[str, Any], redis_url: RedisUrl = None) -> None:
    """Add a tenant: prints its first API key once; Redis stores only a digest.

    A limit that is not given is unlimited, and 0 allows nothing.
    """
    from services.cli.tenants.tenant_tables import with_tenant_admin
    from shared.tenancy.tenant_admin import new_api_key

    api_key = new_api_key()
    with_tenant_admin(redis_url, lambda it: it.add(tenant, changes, api_key))
    print(api_key)
    _note_unknown_models(redis_url, changes)


@tenant_app.command("list", epilog="Example:  hearth tenant list --json | jq")
def list_tenants(redis_url: RedisUrl = None, json: Json = False) -> None:
    """List the tenants and their limits, and those of other sites as SITE/TENANT."""
    from services.cli.output import print_json, show, with_store
    from services.cli.tenants.tenant_tables import all_tenants, table_of_tenants

    records = with_store(redis_url, all_tenants)
    print_json(records) if json else show(table_of_tenants(records))


@tenant_app.command(epilog="Examples:  hearth tenant show team-a  ·  … --where")
def show(
    tenant: Tenant,
    where: Annotated[
        bool, typer.Option("--where", help="What of it lies where: records, KV, copies.")
    ] = False,
    redis_url: RedisUrl = None,
    nats_url: Annotated[
        str | None,
        typer.Option(envvar="HEARTH_NATS_URL", help="NATS URL (default: the local cluster's)."),
    ] = None,
    json: Json = False,
) -> None:
    """Show a tenant: limits, current use, and keys by id. One of another site is SITE/TENANT; its
    home site has the use and the keys.
    """
    if where:
        from services.cli.tenants.tenant_where import show_where

        show_where(tenant, redis_url, nats_url, is_json=json)
        return
    from services.cli import output
    from services.cli.tenants import tenant_tables
    from shared.tenancy.rate_limit import LimitState
    from shared.tenancy.site_admin import copied_tenant, is_copied
    from shared.tenancy.tenant_admin import TenantAdmin

    async def read(store: Store) -> tuple[Any, Any, Any]:
        admin = TenantAdmin(store, time.time)
        if is_copied(tenant):
            record = await copied_tenant(store, tenant)
            return record, LimitState("", 0.0, {}, 0), []
        record = await admin.one(tenant)
        return record, await admin.state(record), await admin.keys(tenant)

    record, state, keys = output.with_store(redis_url, read)
    if json:
        now = {"used": state.used, "open_requests": state.num_open}
        output.print_json({"tenant": record, "now": now, "keys": keys})
    else:
        limits = tenant_tables.table_of_limits(record, state)
        output.show(limits, "", tenant_tables.table_of_keys(keys, time.time()))


@tenant_app.command(epilog="Example:  hearth tenant rotate team-a --keep-s 3600")
@audited("tenant rotate")
def rotate(
    tenant: Tenant,
    key: Annotated[str | None, typer.Option(help="Key id to replace (default: all).")] = None,
    keep_s: Annotated[float, typer.Option(help="Seconds until replaced keys expire.")] = 86_400.0,
    redis_url: RedisUrl = None,
) -> None:
    """Print a new API key; replaced keys stay valid for --keep-s, or until they are revoked."""
    from services.cli.tenants.tenant_tables import with_tenant_admin
    from shared.tenancy.tenant_admin import new_api_key

    if not 0 <= keep_s <= 366 * 86_400:
        raise ConfigError(f"--keep-s {keep_s:g} is not from 0 to a year")
    api_key = new_api_key()
    replaced = with_tenant_admin(
        redis_url,
        lambda admin: admin.rotate(tenant, api_key, keep_s=keep_s, key_id=key),
    )
    print(api_key)
    note = f"{', '.join(replaced)} ends in {keep_s:g} s" if replaced else "no key was valid"
    print(f"note: {note}", file=sys.stderr)


@tenant_app.command(epilog="Examples:  hearth tenant revoke team-a --key ID  ·  … --all")
@audited("tenant revoke")
def revoke(
    tenant: Tenant,
    key: Annotated[str | None, typer.Option(help="Key id, as printed by `show`.")] = None,
    all_keys: Annotated[bool, typer.Option("--all", help="Every key of the tenant.")] = False,
    redis_url: RedisUrl = None,
) -> None:
    """Revoke an API key: all gateways reject it within a second."""
    from services.cli.tenants.tenant_tables import with_tenant_admin

    if (key is None) is not all_keys:
        raise ConfigError("give either --key ID or --all")
    revoked = with_tenant_admin(redis_url, lambda it: it.revoke(tenant, key))
    if not revoked:
        raise ConfigError("nothing to revoke: none of these keys is valid")
    print("\n".join(revoked))


@tenant_app.command(epilog="Examples:  hearth tenant remove team-a  ·  … --with-usage")
@audited("tenant remove")
def remove(
    tenant: Tenant,
    with_usage: Annotated[
        bool, typer.Option("--with-usage", help="Delete the counts of its usage, too.")
    ] = False,
    redis_url: RedisUrl = None,
) -> None:
    """Remove a tenant: its requests end; keys, limits, aliases, stored responses, named prefixes,
    records and copies are deleted, and its KV on all workers.
    """
    from services.cli.tenants.tenant_removal import remove_tenant

    remove_tenant(tenant, redis_url, with_usage=with_usage)


@tenant_app.command(epilog="Example:  hearth tenant client team-a billing")
@audited("tenant client")
def client(
    tenant: Tenant,
    name: Annotated[str, typer.Argument(help="The client's NATS user.")],
    redis_url: RedisUrl = None,
) -> None:
    """Let a NATS client send requests as this tenant, where `hearth nats-config client=NAME` has
    made its credential. `revoke --key NAME` ends that.
    """
    from services.cli.tenants.tenant_tables import with_tenant_admin
    from services.local.credentials import check_name

    check_name(name)
    with_tenant_admin(redis_url, lambda admin: admin.add_client(tenant, name))


@tenant_app.command(epilog="Example:  hearth tenant limits team-a --requests-per-min unlimited")
@with_limits
@audited("tenant limits")
def limits(tenant: Tenant, changes: dict[str, Any], redis_url: RedisUrl = None) -> None:
    """Change only the given limits; gateways apply them within a second."""
    from services.cli import output
    from services.cli.tenants import tenant_tables

    if not changes:
        raise ConfigError("no limit is given: see `hearth tenant limits --help`")

    async def change(admin: TenantAdmin) -> tuple[Any, Any]:
        record = await admin.change(tenant, changes)
        return record, await admin.state(record)

    record, state = tenant_tables.with_tenant_admin(redis_url, change)
    output.show(tenant_tables.table_of_limits(record, state))
    if changes.get("is_zero_retention"):
        from services.cli.tenants.tenant_removal import note_dropped_kv

        note_dropped_kv(tenant, redis_url)
    _note_unknown_models(redis_url, changes)


@tenant_app.command(epilog="Example:  hearth tenant trust frankfurt")
@audited("tenant trust")
def trust(
    site: Annotated[str, typer.Argument(help="A linked site.")], redis_url: RedisUrl = None
) -> None:
    """Accept the next key with which a linked site signs its tenants: its cluster secret is new."""
    from services.cli.output import with_store
    from shared.tenancy.site_admin import forget_site_key

    with_store(redis_url, lambda store: forget_site_key(store, site))


def _note_unknown_models(redis_url: str | None, changes: dict[str, Any]) -> None:
    """Prints a note about allowed models that do not exist, which is no error: they may come."""
    from services.cli.tenants.model_names import unknown_models

    if names := unknown_models(redis_url, changes.get("allowed_models") or ()):
        what = "no model of the catalogue and no alias"
        print(f"note: {', '.join(names)}: {what} of this name yet", file=sys.stderr)


@app.command(
    "api-key", rich_help_panel=OPERATE, epilog="Example:  hearth api-key team-a --redis-url URL"
)
@audited("api-key")
def api_key(
    tenant: Annotated[str, typer.Argument(help="Tenant that the key belongs to.")],
    redis_url: RedisUrl = None,
) -> None:
    """Create an additional API key, and its tenant if new: prints the key once."""
    from services.cli.tenants.tenant_tables import with_tenant_admin
    from shared.tenancy.tenant_admin import new_api_key

    api_key = new_api_key()
    with_tenant_admin(redis_url, lambda admin: admin.add_key(tenant, api_key))
    print(api_key)


@app.command(
    rich_help_panel=OPERATE, epilog="Examples:  hearth usage  ·  hearth usage --days 30 --json"
)
def usage(
    tenant: Annotated[str | None, typer.Option(help="Only this tenant.")] = None,
    days: Annotated[int, typer.Option(help="Number of UTC days, including today.")] = 7,
    redis_url: RedisUrl = None,
    json: Json = False,
) -> None:
    """Show delivered requests and tokens by tenant, model and day."""
    from services.cli.output import print_json, show, with_store
    from services.cli.tenants.tenant_tables import all_tenants, last_days, table_of_usage
    from shared.tenancy.tenant_admin import TenantAdmin

    requested = last_days(days, time.time())

    async def read(store: Store) -> Any:
        known = await all_tenants(store)
        if tenant is not None and tenant not in known:
            raise ConfigError(f"tenant {tenant!r} does not exist: see `hearth tenant list`")
        admin = TenantAdmin(store, time.time)
        return await admin.usage([tenant] if tenant else list(known), requested)

    rows = with_store(redis_url, read)
    print_json(rows) if json else show(table_of_usage(rows))
