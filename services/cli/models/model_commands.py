"""`hearth model`: the registry of models that the cluster can serve."""

from __future__ import annotations

from typing import Annotated

import typer

from services.cli.models import alias_commands
from services.cli.models.alias_commands import RedisUrl
from services.cli.operators.audited import audited

model_app = typer.Typer(
    help="Models: the catalogue of what the cluster can serve, and other names for models.",
    epilog="Examples:  hearth model add qwen ~/models/qwen --standby 1  ·  "
    "hearth model add qwen ~/models/qwen-new --canary 5  ·  hearth model promote qwen r2  ·  "
    "hearth model list  ·  hearth model alias fast qwen --tenant team-a",
)

Name = Annotated[str, typer.Argument(help="Model name, as in requests.")]
Revision = Annotated[str, typer.Argument(help="Revision name, as `list` prints it.")]
Canary = Annotated[
    float | None,
    typer.Option(metavar="PERCENT", help="Share of new requests that the revision gets."),
]
Tenants = Annotated[
    list[str] | None,
    typer.Option(
        metavar="ID", help="Tenant that may use it; repeatable; all for every one (default: all)."
    ),
]
MaxContext = Annotated[
    str | None,
    typer.Option(
        metavar="TOKENS",
        help="Longest sequence, or unlimited: what model and memory allow (default: unlimited).",
    ),
]
Weights = Annotated[
    str | None,
    typer.Option(help="Weight format in memory: auto, dense or compressed (default: auto)."),
]
KvDtype = Annotated[
    str | None,
    typer.Option(
        help="Of stored KV: auto, bf16 or fp8, as --kv-dtype of a worker (default: auto)."
    ),
]
Standby = Annotated[
    int | None,
    typer.Option(metavar="N", help="Hosts that keep it in standby or hot (default: 0)."),
]
Priority = Annotated[
    int | None,
    typer.Option(
        help="Of two models that compete for memory, the one with more stays hot: -100 to 100 "
        "(default: 0)."
    ),
]
NatsUrl = Annotated[
    str | None,
    typer.Option(
        envvar="HEARTH_NATS_URL",
        help="NATS URL with credential, for the states on hosts (default: the local cluster's).",
    ),
]
OperatorUrl = Annotated[
    str | None,
    typer.Option(
        envvar="HEARTH_NATS_URL",
        help="NATS URL with an operator's credential (default: the local cluster's).",
    ),
]
HostedRevision = Annotated[
    str | None,
    typer.Option(
        "--revision", help="As `hearth status` shows it (default: the only one on hosts)."
    ),
]
Json = Annotated[bool, typer.Option("--json", help="JSON instead of a table.")]


@model_app.command(
    epilog="Examples:  hearth model add qwen ~/models/qwen --alias fast --standby 1 --pin  ·  "
    "hearth model add qwen org/name --revision may --canary 5"
)
@audited("model add")
def add(
    name: Name,
    source: Annotated[
        str, typer.Argument(help="Checkpoint directory, bundle, or hub id, as hosts see it.")
    ],
    revision: Annotated[
        str | None, typer.Option(help="Name of the revision (default: r1, r2, …).")
    ] = None,
    canary: Canary = None,
    alias: Annotated[
        list[str] | None, typer.Option(metavar="NAME", help="Another name for it; repeatable.")
    ] = None,
    tenant: Tenants = None,
    max_context: MaxContext = None,
    weights: Weights = None,
    kv_dtype: KvDtype = None,
    standby: Standby = None,
    priority: Priority = None,
    pin: Annotated[bool, typer.Option("--pin", help="Never park it while it is hot.")] = False,
    redis_url: RedisUrl = None,
) -> None:
    """Add a model, or a further revision of one: prints the revision's name.

    A further revision serves nothing until --canary or `promote` gives it requests. Aliases are for
    the tenants that may use the model. Settings that are not given stay as they are.
    """
    from services.cli.models.model_options import settings_of
    from services.cli.models.registry_changes import add_model

    settings = settings_of(
        tenant,
        max_context,
        weights=weights,
        kv_dtype=kv_dtype,
        standby=standby,
        priority=priority,
    )
    if pin:
        settings["is_pinned"] = True
    add_model(redis_url, name, source, revision, canary, settings=settings, aliases=alias or ())


@model_app.command("set", epilog="Example:  hearth model set qwen --priority 5 --tenant all")
@audited("model set")
def set_settings(
    name: Name,
    tenant: Tenants = None,
    max_context: MaxContext = None,
    weights: Weights = None,
    kv_dtype: KvDtype = None,
    standby: Standby = None,
    priority: Priority = None,
    redis_url: RedisUrl = None,
) -> None:
    """Change only the given settings of a model."""
    from services.cli.models.model_options import settings_of
    from services.cli.models.registry_changes import change_settings

    settings = settings_of(
        tenant,
        max_context,
        weights=weights,
        kv_dtype=kv_dtype,
        standby=standby,
        priority=priority,
    )
    change_settings(redis_url, name, settings)


@model_app.command("list", epilog="Example:  hearth model list --json | jq")
def list_models(redis_url: RedisUrl = None, nats_url: NatsUrl = None, json: Json = False) -> None:
    """List the models of the catalogue, a row for each revision, with their states on hosts."""
    from services.cli.models.registry_table import show_models

    show_models(redis_url, nats_url, is_json=json)


@model_app.command(epilog="Example:  hearth model show qwen")
def show(
    name: Name, redis_url: RedisUrl = None, nats_url: NatsUrl = None, json: Json = False
) -> None:
    """Show a model: settings, revisions, and its state on each host."""
    from services.cli.models.registry_table import show_model

    show_model(redis_url, nats_url, name, is_json=json)


@model_app.command(epilog="Examples:  hearth model remove qwen  ·  … --revision r1")
@audited("model remove")
def remove(
    name: Name,
    revision: Annotated[
        str | None, typer.Option(help="Only this revision (default: the model and its aliases).")
    ] = None,
    redis_url: RedisUrl = None,
) -> None:
    """Remove a model and its aliases, or a revision; running requests end on it."""
    from services.cli.models.registry_changes import remove_model

    remove_model(redis_url, name, revision)


@model_app.command(
    epilog="Examples:  hearth model promote qwen r2  ·  hearth model promote qwen r2 --canary 20"
)
@audited("model promote")
def promote(
    name: Name,
    revision: Revision,
    keep: Annotated[
        bool, typer.Option("--keep", help="Keep the revisions that it replaces, without requests.")
    ] = False,
    canary: Canary = None,
    redis_url: RedisUrl = None,
) -> None:
    """Move a name to a revision at once: all new requests, or those of --canary.

    Running requests end on the revision that they have. One that no host has loaded yet takes over
    as soon as a host has.
    """
    from services.cli.models.registry_changes import promote_revision

    promote_revision(redis_url, name, revision, keep=keep, canary=canary)


@model_app.command(epilog="Example:  hearth model pin qwen")
@audited("model pin")
def pin(name: Name, redis_url: RedisUrl = None) -> None:
    """Keep a model hot once it is: hosts never park it."""
    from services.cli.models.registry_changes import set_pinned

    set_pinned(redis_url, name, True)


@model_app.command(epilog="Example:  hearth model unpin qwen")
@audited("model unpin")
def unpin(name: Name, redis_url: RedisUrl = None) -> None:
    """Let hosts park a model again."""
    from services.cli.models.registry_changes import set_pinned

    set_pinned(redis_url, name, False)


@model_app.command(epilog="Example:  hearth model wake qwen --host host-1")
@audited("model wake")
def wake(
    name: Name,
    revision: HostedRevision = None,
    host: Annotated[
        str | None, typer.Option(help="Host id (default: one that can serve it soonest).")
    ] = None,
    nats_url: OperatorUrl = None,
) -> None:
    """Make a model hot on a host, before requests ask for it."""
    from services.cli.models.wakes import run_wake

    run_wake(nats_url, name, revision, host)


@model_app.command(epilog="Example:  hearth model park qwen")
@audited("model park")
def park(
    name: Name,
    revision: HostedRevision = None,
    host: Annotated[str | None, typer.Option(help="Host id (default: all).")] = None,
    nats_url: OperatorUrl = None,
) -> None:
    """Put a hot model in standby. It is refused while the model serves requests."""
    from services.cli.models.wakes import run_park

    run_park(nats_url, name, revision, host)


model_app.registered_commands += alias_commands.app.registered_commands
