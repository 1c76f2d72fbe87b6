"""The commands that are not services: start, use and operate a cluster.

Tenants are in `tenants/tenant_commands.py`.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, get_args

import typer

from services.cli.cluster import up_options as given
from services.cli.cluster.service_options import model_name_for
from services.cli.operators.audited import audited
from services.cli.options import OPERATE, START, among
from services.local.gpus import count_gpus
from services.local.hub_download import local_copy
from services.local.plan import UpOptions, worker_counts
from shared.errors import ConfigError
from shared.subjects import CredentialRole

if TYPE_CHECKING:
    from services.local.join import NewCredential
    from shared.tenancy.tenant_admin import TenantAdmin

app = typer.Typer()


@app.command(
    rich_help_panel=START,
    epilog="Examples:  hearth up  ·  hearth up --prefill 2 --decode 2  ·  "
    "hearth up --model ~/models/tiny --http 0.0.0.0:8000  ·  "
    "hearth up --model meta-llama/Llama-3.2-1B"
    "  ·  hearth up --state ~/hearth  ·  hearth up --role both --check",
)
def up(
    model: given.Model = None,
    name: given.Name = "",
    prefill: given.NumPrefill = None,
    decode: given.NumDecode = None,
    both: given.NumBoth = None,
    role: given.Role = None,
    chat_template: given.ChatTemplate = "",
    http: given.Http = None,
    http_cert: given.HttpCert = "",
    http_key: given.HttpKey = "",
    nats: given.Nats = None,
    redis: given.Redis = None,
    nats_port: given.NatsPort = None,
    state: given.State = None,
    api_key: given.ApiKey = "",
    advertise: given.Advertise = "127.0.0.1",
    dtype: given.Dtype = "auto",
    kv_dtype: given.KvDtype = "auto",
    device: given.Device = "auto",
    load_format: given.LoadFormat = "auto",
    weights: given.Weights = "auto",
    kv_cache_bytes: given.KvCacheBytes = None,
    max_batch_tokens: given.MaxBatchTokens = None,
    tp: given.Tp = 1,
    pp: given.Pp = 1,
    prefill_tp: given.PrefillTp = None,
    decode_tp: given.DecodeTp = None,
    experts: given.Experts = "auto",
    activations: given.Activations = "plain",
    log_level: given.LogLevel = "info",
    log_format: given.LogFormat = "auto",
    check: given.Check = False,
) -> None:
    """Start a cluster on this machine, send a first request, and run until Ctrl-C.

    Also starts NATS and Redis, unless their URLs are given. Removes its processes, and its state
    without --state.
    """
    from services.cli.cluster.up import run_up

    models = given.given_models(model, name)
    num_gpus = count_gpus() if device != "cpu" else 0
    counts = given.num_workers(
        models,
        prefill=prefill,
        decode=decode,
        both=both,
        role=role,
        device=device,
        num_gpus=num_gpus,
    )
    host, port = given.host_and_port(http)
    model_dir, model_name = given.source_of(models, needs_weights=load_format != "dummy")
    options = UpOptions(
        model_dir=model_dir,
        model_name=model_name,
        models=models.several,
        num_prefill=counts[0],
        num_decode=counts[1],
        num_both=counts[2],
        http_host=host,
        http_port=port,
        chat_template=chat_template,
        http_cert=http_cert,
        http_key=http_key,
        nats_url=nats,
        redis_url=redis,
        nats_port=nats_port,
        advertise_host=advertise.strip("[]"),
        state_dir=state,
        api_key=api_key,
        dtype=dtype,
        kv_dtype=kv_dtype,
        device=device,
        num_gpus=num_gpus,
        load_format=load_format,
        weights=weights,
        kv_cache_bytes=kv_cache_bytes,
        max_batch_tokens=max_batch_tokens,
        prefill_tp=tp if prefill_tp is None else prefill_tp,
        decode_tp=tp if decode_tp is None else decode_tp,
        tp=tp,
        pp=pp,
        activations=activations,
        experts=experts,
        log_level=log_level,
        log_format=log_format,
    )
    run_up(options, is_check=check)


@app.command(
    rich_help_panel=START,
    epilog='Examples:  hearth chat  ·  hearth chat "What is the KV cache?" > answer.txt  ·  '
    "hearth chat --url http://site-a:8000 --api-key KEY"
    "  ·  hearth chat --tools clock,dice  ·  hearth chat --json SCHEMA.json",
)
def chat(
    question: Annotated[
        str | None, typer.Argument(help="Answer this and end (default: a conversation).")
    ] = None,
    url: Annotated[
        str | None,
        typer.Option(envvar="HEARTH_URL", help="Gateway URL (default: the local cluster)."),
    ] = None,
    api_key: Annotated[
        str | None, typer.Option(envvar="HEARTH_API_KEY", help="Key (default: local cluster's).")
    ] = None,
    model: Annotated[
        str | None, typer.Option(metavar="NAME", help="Model (default: the cluster's first).")
    ] = None,
    system: Annotated[
        str, typer.Option(metavar="TEXT", help="System prompt (default: none).")
    ] = "",
    tools: Annotated[
        str, typer.Option(metavar="NAMES", help="Local tools: clock,dice (default: none).")
    ] = "",
    json: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="JSON Schema of the answers (default: free text)."),
    ] = None,
    quiet: Annotated[bool, typer.Option("--quiet", help="Print answers and errors alone.")] = False,
) -> None:
    """Chat with a model in this terminal, or print its answer to one question.

    Answers go to standard output, all else to standard error.
    """
    from services.cli.cluster.chat import ChatOptions, run_chat

    options = ChatOptions(
        question=question, model=model, system=system, tools=tools, schema=json, is_quiet=quiet
    )
    run_chat(url, api_key, options)


@app.command(
    rich_help_panel=START,
    epilog="Examples:  hearth bench  ·  hearth bench --concurrency 32 --requests 500  ·  "
    "hearth bench --model DIR --decode 2 --rate 20",
)
def bench(
    url: Annotated[
        str | None,
        typer.Option(envvar="HEARTH_URL", help="Gateway URL (default: the local cluster)."),
    ] = None,
    api_key: Annotated[
        str | None, typer.Option("--api-key", "--key", envvar="HEARTH_API_KEY", help="API key.")
    ] = None,
    model: Annotated[
        Path | None, typer.Option(help="Start a cluster with this directory or hub id.")
    ] = None,
    prefill: Annotated[
        int | None, typer.Option(help="Prefill workers of that cluster (default: 1).")
    ] = None,
    decode: Annotated[
        int | None, typer.Option(help="Decode workers of that cluster (default: 1).")
    ] = None,
    both: Annotated[
        int | None, typer.Option(help="Workers of that cluster for both roles (default: 0).")
    ] = None,
    dtype: Annotated[str, typer.Option(help="Data type of that cluster.")] = "auto",
    device: Annotated[
        str, typer.Option(envvar="HEARTH_DEVICE", help="Device of that cluster.")
    ] = "auto",
    weights: Annotated[
        str, typer.Option(envvar="HEARTH_WEIGHTS", help="Weight format of that cluster.")
    ] = "auto",
    concurrency: Annotated[
        str, typer.Option(metavar="N,N...", help="Concurrency levels to run, comma-separated.")
    ] = "1,16,64",
    rate: Annotated[
        float | None,
        typer.Option(help="Poisson arrival rate in requests/s, instead of a fixed concurrency."),
    ] = None,
    requests: Annotated[
        int | None, typer.Option(help="Requests per load, instead of a duration.")
    ] = None,
    duration_s: Annotated[float, typer.Option(help="Seconds per load.")] = 10.0,
    input_tokens: Annotated[int, typer.Option(help="Approximate prompt tokens.")] = 100,
    output_tokens: Annotated[int, typer.Option(help="Tokens to generate.")] = 64,
    temperature: Annotated[float, typer.Option(help="Sampling temperature.")] = 0.0,
    ttft_s: Annotated[
        float, typer.Option(help="Goodput threshold: time to first token, in seconds.")
    ] = 0.5,
    itl_s: Annotated[float, typer.Option(help="Goodput threshold: mean token gap, s.")] = 0.05,
    seed: Annotated[int, typer.Option(help="Seed of prompts and arrivals.")] = 0,
) -> None:
    """Measure speed and latency as clients see them: a table, then one JSON line."""
    from services.cli.cluster.bench import run_bench
    from services.client.load_test import LoadTestOptions

    up_options = None
    if model is not None:
        num_gpus = count_gpus() if device != "cpu" else 0
        num_prefill, num_decode, num_both = worker_counts(
            prefill, decode, both, device=device, num_gpus=num_gpus
        )
        up_options = UpOptions(
            model_dir=local_copy(model),
            model_name=model_name_for(model, ""),
            num_prefill=num_prefill,
            num_decode=num_decode,
            num_both=num_both,
            http_port=0,
            dtype=dtype,
            device=device,
            num_gpus=num_gpus,
            weights=weights,
        )
    options = LoadTestOptions(
        concurrency=_numbers(concurrency),
        rate=rate,
        num_requests=requests,
        duration_s=duration_s,
        num_input_tokens=input_tokens,
        num_output_tokens=output_tokens,
        temperature=temperature,
        ttft_limit_s=ttft_s,
        itl_limit_s=itl_s,
        seed=seed,
    )
    raise typer.Exit(run_bench(url, api_key, up_options, options))


def _numbers(text: str) -> tuple[int, ...]:
    parts = text.replace(",", " ").split()
    if not parts or not all(part.isdecimal() for part in parts):
        raise ConfigError(f"--concurrency {text!r} is not a list of numbers such as 1,16,64")
    return tuple(int(part) for part in parts)


@app.command(
    rich_help_panel=START,
    epilog="Exit status 1: something is lost or unavailable.\n\n"
    "Examples:  hearth status  ·  hearth status --once  ·  hearth status --json | jq",
)
def status(
    nats_url: Annotated[
        str | None,
        typer.Option(
            envvar="HEARTH_NATS_URL", help="NATS URL with credential (default: local cluster)."
        ),
    ] = None,
    once: Annotated[bool, typer.Option("--once", help="Print one table, then exit.")] = False,
    json: Annotated[bool, typer.Option("--json", help="A JSON line instead of a table.")] = False,
    interval_s: Annotated[float, typer.Option(help="Poll interval in seconds.")] = 1.0,
) -> None:
    """Show the workers and other processes of a cluster until Ctrl-C; once if not on a terminal."""
    from services.cli.cluster.status import run_status

    raise typer.Exit(run_status(nats_url, is_once=once, is_json=json, interval_s=interval_s))


@app.command(
    rich_help_panel=OPERATE,
    epilog="Examples:  hearth credential decode  ·  hearth credential worker --host 10.0.0.5  ·  "
    "hearth credential client --tenant default",
)
@audited("credential")
def credential(
    role: Annotated[
        str,
        typer.Argument(
            help="gateway, scheduler, prefill, decode, kv_index, host, worker, observer, operator: "
            "commands hosts and workers, or client: an application that sends requests over NATS.",
            autocompletion=among(*get_args(CredentialRole)),
        ),
    ],
    process_id: Annotated[
        str | None,
        typer.Option("--process-id", "--name", help="Its name (default: ROLE-<6 hex digits>)."),
    ] = None,
    host: Annotated[
        str | None, typer.Option(help="Address of this machine for the other host.")
    ] = None,
    region: Annotated[
        str, typer.Option(help="The region that the process may announce; empty: none.")
    ] = "",
    tenant: Annotated[str, typer.Option(help="The tenant of a client.")] = "",
) -> None:
    """Create a credential for other processes of the local cluster, or for a client of its API:
    prints its NATS URL.
    """
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
    port: Annotated[int, typer.Option(help="Port that nats-server listens on.")] = 4222,
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
) -> None:
    """Print a nats-server configuration: credentials with least permissions.

    The replicas of one service may share a credential. A process announces the credential's region,
    or none.

    Passwords are variables that nats-server reads from its environment: HEARTH_<ID>_PASSWORD. With
    --nkeys there are none.
    """
    from services.local.credentials import (
        named_credentials,
        nats_config_with_nkeys,
        nats_config_with_variables,
        tls_block,
    )

    named = named_credentials(processes)
    options = f"--host {host} --port {port}" + ("" if tls is None else f" --tls {tls}")
    if nkeys is None:
        text = nats_config_with_variables(named, host=host, port=port)
    else:
        text = nats_config_with_nkeys(named, nkeys, host=host, port=port)
        options += f" --nkeys {nkeys}"
    print(f"# hearth nats-config {' '.join(processes)} {options}")
    print(text + ("" if tls is None else tls_block(tls)), end="")


@app.command(rich_help_panel=OPERATE, epilog="Exit status 0: healthy. 1: no heartbeat. 2: error.")
def health(
    nats_url: Annotated[str, typer.Option(envvar="HEARTH_NATS_URL", help="URL with credential.")],
    process_id: Annotated[
        str | None,
        typer.Option(
            envvar="HEARTH_PROCESS_ID",
            help="Process (default: this host's, of the NATS URL's user).",
        ),
    ] = None,
    timeout_s: Annotated[float, typer.Option(help="Seconds to wait for a heartbeat.")] = 3.0,
) -> None:
    """Check whether a process is ready, by its heartbeat on NATS. Without options, where
    HEARTH_METRICS_PORT is set: whether the process of this container is alive, at that port.
    """
    from services.client.health_check import run_probe

    raise typer.Exit(0 if run_probe(nats_url, process_id, timeout_s=timeout_s) else 1)
