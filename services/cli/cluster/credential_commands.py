"""`hearth credential` and `hearth nats-config`: who may connect to NATS."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, get_args

import typer

from services.cli.operators.audited import audited
from services.cli.options import OPERATE, among
from shared.errors import ConfigError
from shared.subjects import CredentialRole
from shared.transport.link_config import DEFAULT_LEAF_PORT

if TYPE_CHECKING:
    from services.local.join import NewCredential
    from shared.tenancy.tenant_admin import TenantAdmin

app = typer.Typer()


@app.command(
    rich_help_panel=OPERATE,
    epilog="Examples:  hearth credential decode  ·  hearth credential worker --host 10.0.0.5  ·  "
    "hearth credential client --tenant default  ·  hearth credential --folder secrets",
)
def credential(
    role: Annotated[
        str | None,
        typer.Argument(
            help="gateway, scheduler, encode, prefill, decode, kv_index, host, worker, observer, "
            "operator: commands hosts and workers, or client: an application that sends requests "
            "over NATS.",
            autocompletion=among(*get_args(CredentialRole)),
        ),
    ] = None,
    process_id: Annotated[
        str | None,
        typer.Option("--process-id", "--name", help="Its name (default: ROLE-<6 hex digits>)."),
    ] = None,
    host: Annotated[
        str | None,
        typer.Option(
            help="Address of this machine for the other host; with --folder, of the Redis host."
        ),
    ] = None,
    region: Annotated[
        str, typer.Option(help="The region that the process may announce; empty: none.")
    ] = "",
    tenant: Annotated[str, typer.Option(help="The tenant of a client.")] = "",
    folder: Annotated[
        Path | None,
        typer.Option(
            metavar="DIRECTORY",
            help="Create all secrets of a deployment that you run yourself, one file each, or add "
            "what the directory lacks. It remembers --process, --host and --tls.",
        ),
    ] = None,
    is_kubernetes: Annotated[
        bool,
        typer.Option(
            "--kubernetes",
            help="Print a Kubernetes Secret for each process, of --folder or of new secrets.",
        ),
    ] = False,
    process: Annotated[
        list[str] | None,
        typer.Option(
            metavar="ROLE=NAME[@REGION]",
            help="A process of --folder or --kubernetes; repeatable (default: those of the "
            "deployment files).",
        ),
    ] = None,
    namespace: Annotated[str, typer.Option(help="The namespace of --kubernetes.")] = "hearth",
    tls: Annotated[
        str | None,
        typer.Option(
            metavar="DIRECTORY",
            help="Require TLS in nats.conf of --folder, with the certificates that nats-server has "
            "in this directory.",
        ),
    ] = None,
) -> None:
    """Create a credential for other processes of the local cluster, or for a client of its API:
    prints its NATS URL.

    With --folder or --kubernetes, create the secrets of a whole deployment instead.
    """
    if folder is None and not is_kubernetes:
        if role is None:
            raise ConfigError("a role, or --folder, or --kubernetes is missing")
        _add(role, process_id, host, region, tenant)
        return
    if role is not None:
        raise ConfigError("--folder and --kubernetes take no role: give --process ROLE=NAME")
    from services.cli.deployment.write_secrets import write_secrets

    write_secrets(
        folder, process, tls=tls, redis_host=host, namespace=namespace if is_kubernetes else None
    )


@audited("credential")
def _add(role: str, process_id: str | None, host: str | None, region: str, tenant: str) -> None:
    from services.local.join import add_credential

    if role == "client":
        added = _add_client(tenant, process_id, host)
    elif tenant:
        raise ConfigError("--tenant is for the role client: processes belong to no tenant")
    else:
        added = add_credential(role, process_id, host, region)
    print(added.nats_url)
    if not added.is_reachable:
        note = "note: this NATS listens on loopback only; `hearth up --advertise HOST` opens it"
        print(note, file=sys.stderr)
    print(_usage_of(added.credential.role), file=sys.stderr)


def _add_client(tenant: str, name: str | None, host: str | None) -> NewCredential:
    """Adds the credential, then its tenant: until then gateways reject the client."""
    from services.cli.tenants.tenant_tables import with_tenant_admin
    from services.local.credentials import random_process_id
    from services.local.join import add_credential

    if not tenant:
        raise ConfigError("a client needs --tenant: `hearth tenant list` shows the tenants")
    client_id = random_process_id("client") if name is None else name

    async def add(admin: TenantAdmin) -> NewCredential:
        await admin.check_client(tenant, client_id)
        added = add_credential("client", client_id, host)
        await admin.add_client(tenant, client_id)
        return added

    return with_tenant_admin(None, add)


def _usage_of(role: str) -> str:
    if role == "client":
        return "in the application: services/client/hearth_nats.py connects to this URL"
    is_reader = role in ("observer", "operator")
    command = "status" if is_reader else f"{role.replace('_', '-')} --help"
    return f"on the other host: HEARTH_NATS_URL=… hearth {command}"


@app.command(
    "nats-config",
    rich_help_panel=OPERATE,
    epilog="Example:  hearth nats-config gateway=gateway decode=decode-eu@eu decode=decode-us@us",
)
def nats_config(
    processes: Annotated[list[str], typer.Argument(metavar="ROLE=NAME[@REGION]...")],
    host: Annotated[str, typer.Option(help="Address that nats-server listens on.")] = "0.0.0.0",
    port: Annotated[
        int, typer.Option(help="Port that nats-server listens on.", min=1, max=65535)
    ] = 4222,
    tls: Annotated[
        str | None,
        typer.Option(
            metavar="DIRECTORY",
            help="Require TLS, with server.crt, server.key and ca.crt of this directory; processes "
            "must have a certificate of that authority, too.",
        ),
    ] = None,
    nkeys: Annotated[
        Path | None,
        typer.Option(
            metavar="DIRECTORY",
            help="Users by public keys in place of passwords. The seed of each is NAME.nk of this "
            "directory, created if it is missing: nats://NAME@HOST:PORT?seed=NAME.nk",
        ),
    ] = None,
    site: Annotated[
        str, typer.Option(metavar="NAME", help="The name of this site, which --link needs.")
    ] = "",
    link: Annotated[
        list[str] | None,
        typer.Option(
            metavar="SITE[@REGION][=HOST:PORT]",
            help="Another site: it connects to --link-port of this one, or this one to its "
            "HOST:PORT. REGION is where it is. Its key is in the directory of --nkeys: the site "
            "that is connected to creates link-OTHER@THIS.nk for the other one, whose nats-server "
            "reads the seed from HEARTH_LINK_<SITE>_SEED.",
        ),
    ] = None,
    link_port: Annotated[
        int, typer.Option(help="Port on which nats-server accepts links.", min=1, max=65535)
    ] = DEFAULT_LEAF_PORT,
    region_class: Annotated[
        list[str] | None,
        typer.Option(
            "--class",
            metavar="NAME=REGION,...",
            help="Class of regions, repeatable: data of tenants with this class is for processes "
            "and sites of its regions alone. Processes read it from HEARTH_REGION_CLASSES.",
        ),
    ] = None,
) -> None:
    """Print a nats-server configuration: credentials with least permissions.

    The replicas of one service may share a credential. A process announces the credential's region,
    or none.

    Passwords are variables that nats-server reads from its environment: HEARTH_<ID>_PASSWORD. With
    --nkeys there are none.

    A link lets requests, tokens and the state of a site through, and nothing else.
    """
    from services.cli.cluster.site_links import site_links
    from services.local.credentials import (
        check_classes,
        named_credentials,
        nats_config_with_nkeys,
        nats_config_with_variables,
        tls_block,
    )
    from shared.nats_urls import checked_host
    from shared.regions.region_classes import region_classes

    host, tls_lines = checked_host(host), "" if tls is None else tls_block(tls)
    named, classes = named_credentials(processes), region_classes(region_class or ())
    regions = [each.region for each in named]
    options = f"--host {host} --port {port}" + ("" if tls is None else f" --tls {tls}")
    if bool(site) != bool(link) or (link and nkeys is None):
        raise ConfigError("--site and --link belong together, and need --nkeys DIRECTORY")
    if nkeys is None:
        check_classes(classes, regions)
        text = nats_config_with_variables(named, host=host, port=port, classes=classes)
    else:
        links = None
        if link:
            links = site_links(site, link, seeds=nkeys, host=host, port=link_port, tls=tls)
            options += "".join((f" --site {site}", *(f" --link {each}" for each in link)))
            options += f" --link-port {link_port}"
            regions += [each.region for each in links.links]
        check_classes(classes, regions)
        text = nats_config_with_nkeys(
            named, nkeys, host=host, port=port, links=links, classes=classes
        )
        options += f" --nkeys {nkeys}"
    options += "".join(f" --class {each}" for each in classes.texts())
    print(f"# hearth nats-config {' '.join(processes)} {options}")
    if classes.regions:
        print(f"# each process: HEARTH_REGION_CLASSES='{' '.join(classes.texts())}'")
    print(text + tls_lines, end="")
