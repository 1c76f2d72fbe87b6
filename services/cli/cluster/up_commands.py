"""`hearth up` and `hearth bench`: start a cluster, and measure one."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from services.cli.cluster import up_options as given
from services.cli.cluster.service_options import local_model, model_name_for
from services.cli.options import START, GatewayUrl
from services.local.gpus import count_gpus
from services.local.plan import UpOptions, worker_counts
from shared.errors import ConfigError
from shared.transport.link_config import DEFAULT_LEAF_PORT

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
    encode: given.NumEncode = 0,
    role: given.Role = None,
    chat_template: given.ChatTemplate = "",
    http: given.Http = None,
    http_cert: given.HttpCert = "",
    http_key: given.HttpKey = "",
    nats: given.Nats = None,
    redis: given.Redis = None,
    nats_port: given.NatsPort = None,
    data_plane_port: given.DataPlanePort = None,
    state: given.State = None,
    api_key: given.ApiKey = "",
    advertise: given.Advertise = "127.0.0.1",
    dtype: given.Dtype = "auto",
    kv_dtype: given.KvDtype = "auto",
    device: given.Device = "auto",
    load_format: given.LoadFormat = "auto",
    weights: given.Weights = "auto",
    kv_cache_bytes: given.KvCacheBytes = None,
    gpu_memory: given.GpuMemory = "",
    max_batch_tokens: given.MaxBatchTokens = None,
    tp: given.Tp = 1,
    pp: given.Pp = 1,
    prefill_tp: given.PrefillTp = None,
    decode_tp: given.DecodeTp = None,
    experts: given.Experts = "auto",
    activations: given.Activations = "plain",
    site: given.Site = "",
    region: given.Region = "",
    region_class: given.RegionClasses = None,
    link: given.Links = None,
    link_port: given.LinkPort = DEFAULT_LEAF_PORT,
    log_level: given.LogLevel = "info",
    log_format: given.LogFormat = "auto",
    check: given.Check = False,
) -> None:
    """Start a cluster on this machine, ask it two questions, and run until Ctrl-C.

    Also starts NATS and Redis, unless their URLs are given. Removes its processes, and its state
    without --state.
    """
    from services.cli.cluster.site_links import local_links
    from services.cli.cluster.up import run_up
    from services.local.credentials import check_classes
    from shared.regions.region_classes import region_classes

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
    links = local_links(site, link or (), host=advertise.strip("[]"), port=link_port)
    linked = [each.region for each in links["links"].links] if links else []
    classes = region_classes(region_class or ())
    check_classes(classes, (region, *linked))
    model_dir, model_name = given.source_of(models, needs_weights=load_format != "dummy")
    options = UpOptions(
        model_dir=model_dir,
        model_name=model_name,
        models=models.several,
        num_prefill=counts[0],
        num_decode=counts[1],
        num_both=counts[2],
        num_encode=encode,
        http_host=host,
        http_port=port,
        chat_template=chat_template,
        http_cert=http_cert,
        http_key=http_key,
        nats_url=nats,
        redis_url=redis,
        nats_port=nats_port,
        data_plane_port=data_plane_port,
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
        gpu_memory=gpu_memory,
        max_batch_tokens=max_batch_tokens,
        prefill_tp=tp if prefill_tp is None else prefill_tp,
        decode_tp=tp if decode_tp is None else decode_tp,
        tp=tp,
        pp=pp,
        activations=activations,
        experts=experts,
        log_level=log_level,
        log_format=log_format,
        region=region,
        region_classes=classes.texts(),
        **links,
    )
    run_up(options, is_check=check)


@app.command(
    rich_help_panel=START,
    epilog="Examples:  hearth bench  ·  hearth bench --concurrency 32 --requests 500  ·  "
    "hearth bench --model DIR --decode 2 --rate 20",
)
def bench(
    url: GatewayUrl = None,
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
            model_dir=local_model(model),
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
