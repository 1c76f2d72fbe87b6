"""`hearth prefix`: prefixes that an operator publishes for all tenants."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from services.cli.operators.audited import audited
from services.cli.options import read_given_file
from shared.errors import ConfigError

prefix_app = typer.Typer(
    help="Public prefixes: system prompts whose cache all tenants share.",
    epilog="Examples:  hearth prefix publish house-rules --model NAME --file rules.txt  ·  "
    "hearth prefix list  ·  hearth prefix remove house-rules",
)

Name = Annotated[str, typer.Argument(help="Prefix name.")]
RedisUrl = Annotated[
    str | None,
    typer.Option(envvar="HEARTH_REDIS_URL", help="Redis URL (default: the local cluster's)."),
]


@prefix_app.command(epilog="Example:  hearth prefix publish house-rules --model NAME --file -")
@audited("prefix publish")
def publish(
    name: Name,
    model: Annotated[str, typer.Option(help="Its model: the name, or an alias for all tenants.")],
    file: Annotated[
        Path, typer.Option(help="The system prompt; .json: a list of messages; -: standard input.")
    ],
    redis_url: RedisUrl = None,
) -> None:
    """Publish a prefix to all tenants, replacing one with the same name.

    All tenants share its cache; tokens after the prefix stay private to each tenant. Gateways use
    the prefix within seconds.
    """
    from services.cli.tenants.public_prefixes import publish_prefix

    try:
        text = read_given_file(file, what="--file").decode().replace("\r\n", "\n")
    except UnicodeDecodeError as error:
        raise ConfigError(f"--file {file}: {error}") from None
    publish_prefix(redis_url, name, model, text, is_json=file.suffix == ".json")


@prefix_app.command("list", epilog="Example:  hearth prefix list --json | jq")
def list_prefixes(
    redis_url: RedisUrl = None,
    json: Annotated[bool, typer.Option("--json", help="JSON instead of a table.")] = False,
) -> None:
    """List the public prefixes and their sizes."""
    from services.cli.tenants.public_prefixes import show_prefixes

    show_prefixes(redis_url, is_json=json)


@prefix_app.command(epilog="Example:  hearth prefix remove house-rules")
@audited("prefix remove")
def remove(name: Name, redis_url: RedisUrl = None) -> None:
    """Remove a public prefix. Afterwards each tenant caches prompts with it privately."""
    from services.cli.tenants.public_prefixes import remove_prefix

    remove_prefix(redis_url, name)
