"""The options of `hearth up`, and what they mean together."""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import msgspec
import typer

from services.cli.cluster.option_texts import VALUES
from services.cli.cluster.service_options import (
    DEMO_MODEL_DIR,
    demo_folder,
    local_model,
    model_name_for,
)
from services.cli.options import among, size_option
from services.local.model_list import NamedModel, named_models
from services.local.plan import worker_counts
from shared.errors import ConfigError


class UpRole(StrEnum):
    apart = "apart"
    both = "both"


_MODEL, _WORKERS, _RANKS, _ADDRESSES = "Model", "Workers", "Ranks", "Addresses"
_STATE, _SITES = "State", "Sites"

Model = Annotated[
    list[str] | None,
    typer.Option(
        rich_help_panel=_MODEL,
        metavar="[NAME=]DIR",
        help="Checkpoint directory, or a hub id such as org/name (default: the demo model). "
        "Several: a host keeps those hot that are used, within its memory budget.",
    ),
]
Name = Annotated[
    str,
    typer.Option(
        rich_help_panel=_MODEL,
        help="Model name for clients (default: the hub id or directory name).",
    ),
]
NumPrefill = Annotated[
    int | None, typer.Option(rich_help_panel=_WORKERS, help="Prefill workers (default: 1).")
]
NumDecode = Annotated[
    int | None, typer.Option(rich_help_panel=_WORKERS, help="Decode workers (default: 1).")
]
NumBoth = Annotated[
    int | None,
    typer.Option(
        rich_help_panel=_WORKERS,
        help="Workers that run prefill and decode (default: 0; on a single GPU 1).",
    ),
]
NumEncode = Annotated[
    int,
    typer.Option(rich_help_panel=_WORKERS, help="Workers that encode images alone (default: 0)."),
]
Role = Annotated[
    UpRole | None,
    typer.Option(
        rich_help_panel=_WORKERS,
        help="both: one worker for prefill and decode; apart: one of each.",
    ),
]
Http = Annotated[
    str | None,
    typer.Option(
        rich_help_panel=_ADDRESSES,
        metavar="HOST:PORT",
        help="HTTP listen address (default: 127.0.0.1:8000, or a free port).",
    ),
]
ChatTemplate = Annotated[
    str,
    typer.Option(
        rich_help_panel=_MODEL,
        metavar="FILE",
        envvar="HEARTH_CHAT_TEMPLATE",
        help="Chat template (Jinja) in place of those of the checkpoint.",
    ),
]
HttpCert = Annotated[
    str,
    typer.Option(
        rich_help_panel=_ADDRESSES,
        metavar="FILE",
        envvar="HEARTH_HTTP_CERT",
        help="PEM file of the gateway's certificate with its chain, for HTTPS (default: HTTP).",
    ),
]
HttpKey = Annotated[
    str,
    typer.Option(
        rich_help_panel=_ADDRESSES,
        metavar="FILE",
        envvar="HEARTH_HTTP_KEY",
        help="Its private key.",
    ),
]
Nats = Annotated[
    str | None,
    typer.Option(
        rich_help_panel=_ADDRESSES, metavar="URL", envvar="HEARTH_NATS_URL", help="A running NATS."
    ),
]
Redis = Annotated[
    str | None,
    typer.Option(
        rich_help_panel=_ADDRESSES,
        metavar="URL",
        envvar="HEARTH_REDIS_URL",
        help="A running Redis.",
    ),
]
NatsPort = Annotated[
    int | None,
    typer.Option(
        rich_help_panel=_ADDRESSES,
        metavar="PORT",
        min=1,
        max=65535,
        help="Port of the NATS that is started, for workers on other hosts (default: a free one).",
    ),
]
DataPlanePort = Annotated[
    int | None,
    typer.Option(
        rich_help_panel=_ADDRESSES,
        metavar="PORT",
        min=1,
        max=65535,
        envvar="HEARTH_DATA_PLANE_PORT",
        help="First port for KV and images: each worker takes one per rank and one more, decode "
        "workers first (default: free ones).",
    ),
]
State = Annotated[
    Path | None,
    typer.Option(
        rich_help_panel=_STATE,
        metavar="DIR",
        help="Folder that keeps tenants, keys, usage, models, passwords and ports for the next "
        "start with it (default: one that is removed at the end).",
    ),
]
ApiKey = Annotated[
    str,
    typer.Option(
        rich_help_panel=_STATE,
        metavar="KEY",
        envvar="HEARTH_API_KEY",
        help="API key of the tenant default (default: that of the last start, else a new one).",
    ),
]
Advertise = Annotated[
    str,
    typer.Option(
        rich_help_panel=_ADDRESSES,
        metavar="HOST",
        help="This machine's address for workers on other hosts.",
    ),
]
Dtype = Annotated[
    str,
    typer.Option(
        autocompletion=among(*VALUES["dtype"]),
        rich_help_panel=_MODEL,
        help="auto, bfloat16, float16 or float32.",
    ),
]
KvDtype = Annotated[
    str,
    typer.Option(
        autocompletion=among(*VALUES["kv_dtype"]),
        rich_help_panel=_MODEL,
        envvar="HEARTH_KV_DTYPE",
        help="Of stored KV: auto (fp8 if the checkpoint declares it), bf16 or fp8 (half the size).",
    ),
]
Device = Annotated[
    str,
    typer.Option(
        autocompletion=among(*VALUES["device"]),
        rich_help_panel=_WORKERS,
        envvar="HEARTH_DEVICE",
        help="auto (one GPU per worker, else the CPU), cpu, cuda or cuda:N.",
    ),
]
LoadFormat = Annotated[
    str,
    typer.Option(
        autocompletion=among(*VALUES["load_format"]),
        rich_help_panel=_MODEL,
        envvar="HEARTH_LOAD_FORMAT",
        help="auto, or dummy: seeded weights from config.json alone.",
    ),
]
Weights = Annotated[
    str,
    typer.Option(
        autocompletion=among(*VALUES["weights"]),
        rich_help_panel=_MODEL,
        envvar="HEARTH_WEIGHTS",
        help="Weight format in memory: auto, dense or compressed (lossless).",
    ),
]
KvCacheBytes = Annotated[
    int | None,
    size_option(
        rich_help_panel=_WORKERS,
        envvar="HEARTH_KV_CACHE_BYTES",
        help="KV cache of each worker (default: 256 MiB on the CPU, free memory on CUDA).",
    ),
]
GpuMemory = Annotated[
    str,
    typer.Option(
        rich_help_panel=_WORKERS,
        envvar="HEARTH_GPU_MEMORY",
        metavar="SIZE|SHARE",
        show_default=False,
        help="Of its GPU, for each worker in all: 36GiB, 0.45 or 45% (default: what is free).",
    ),
]
MaxBatchTokens = Annotated[
    int | None,
    typer.Option(
        rich_help_panel=_WORKERS,
        envvar="HEARTH_MAX_BATCH_TOKENS",
        help="Tokens per step (default: 512; on CUDA 2048, prefill alone 8192).",
    ),
]
Tp = Annotated[
    int,
    typer.Option(
        rich_help_panel=_RANKS, help="Ranks of each worker that share its layers: 1, 2, 4 or 8."
    ),
]
Pp = Annotated[int, typer.Option(rich_help_panel=_RANKS, help="Pipeline stages of each worker.")]
PrefillTp = Annotated[
    int | None,
    typer.Option(rich_help_panel=_RANKS, help="The same of prefill workers (default: --tp)."),
]
DecodeTp = Annotated[
    int | None,
    typer.Option(rich_help_panel=_RANKS, help="The same of decode workers (default: --tp)."),
]
Experts = Annotated[
    str,
    typer.Option(
        autocompletion=among(*VALUES["experts"]),
        rich_help_panel=_RANKS,
        envvar="HEARTH_EXPERTS",
        help="ep: each rank holds whole experts; tp: columns of all of them; auto.",
    ),
]
Activations = Annotated[
    str,
    typer.Option(
        autocompletion=among(*VALUES["activations"]),
        rich_help_panel=_RANKS,
        envvar="HEARTH_ACTIVATIONS",
        help="plain, or bf16-exchange: ranks send half the bytes; other bits.",
    ),
]
LogLevel = Annotated[
    str,
    typer.Option(
        autocompletion=among(*VALUES["log_level"]),
        envvar="HEARTH_LOG_LEVEL",
        help="Of its processes: debug, info, warning or error.",
    ),
]
LogFormat = Annotated[
    str,
    typer.Option(
        autocompletion=among(*VALUES["log_format"]),
        envvar="HEARTH_LOG_FORMAT",
        help="Of their logs: auto (JSON in files) or text.",
    ),
]
Site = Annotated[
    str,
    typer.Option(
        rich_help_panel=_SITES, metavar="NAME", help="Name of this site, which --link needs."
    ),
]
Region = Annotated[
    str,
    typer.Option(
        rich_help_panel=_SITES, metavar="NAME", help="Region of all its processes (default: none)."
    ),
]
RegionClasses = Annotated[
    list[str] | None,
    typer.Option(
        "--class",
        rich_help_panel=_SITES,
        metavar="NAME=REGION,...",
        help="Class of regions, as in hearth nats-config. Repeatable.",
    ),
]
Links = Annotated[
    list[str] | None,
    typer.Option(
        "--link",
        rich_help_panel=_SITES,
        metavar="SITE[@REGION][=HOST:PORT]",
        help="Another site, in REGION: it connects to --link-port of this one, or this one to its "
        "HOST:PORT. Each serves requests of the other that find no room there.",
    ),
]
LinkPort = Annotated[
    int,
    typer.Option(rich_help_panel=_SITES, min=1, max=65535, help="Port on which links arrive."),
]
Check = Annotated[bool, typer.Option("--check", help="Ask two questions, then stop.")]


class GivenModels(msgspec.Struct, frozen=True):
    """The models of the command line. `text` is the one `--model`; unused if there are
    `several`.
    """

    text: str
    name: str
    several: tuple[NamedModel, ...]


def given_models(texts: Sequence[str] | None, name: str) -> GivenModels:
    """Returns the models of the command line. Raises ConfigError."""
    texts = [_with_folder(each) for each in texts or [str(DEMO_MODEL_DIR)]]
    several = named_models(texts) if len(texts) > 1 or "=" in texts[0] else ()
    if len(several) == 1:
        return GivenModels(several[0].source, name or several[0].name, ())
    return GivenModels(texts[0], name, several)


def _with_folder(text: str) -> str:
    """Returns NAME=DIR for the name of a model that comes with Hearth, unless a folder has it."""
    folder = demo_folder(Path(text))
    return text if folder is None else f"{text}={folder}"


def num_workers(
    models: GivenModels,
    *,
    prefill: int | None,
    decode: int | None,
    both: int | None,
    role: UpRole | None,
    device: str,
    num_gpus: int,
) -> tuple[int, int, int]:
    """Returns the numbers of prefill, decode and both-role workers; none for several models.

    Raises ConfigError.
    """
    if models.several and {prefill, decode, both, role} != {None}:
        raise ConfigError("--prefill, --decode, --both and --role are for one --model")
    if models.several:
        return 0, 0, 0
    if both is None and role is not None:
        both = int(role is UpRole.both)
    return worker_counts(prefill, decode, both, device=device, num_gpus=num_gpus)


def source_of(models: GivenModels, *, needs_weights: bool) -> tuple[Path, str]:
    """Returns the directory and name of the model. For several models the demo model stands for
    them. Raises ConfigError.
    """
    if models.several:
        return DEMO_MODEL_DIR, models.name
    path = Path(models.text)
    return local_model(path, needs_weights=needs_weights), model_name_for(path, models.name)


def host_and_port(text: str | None) -> tuple[str, int | None]:
    """Returns the host and the port. The port None stands for 8000, or a free one.
    Raises ConfigError.
    """
    if text is None:
        return "127.0.0.1", None
    host, separator, port = text.rpartition(":")
    if not separator or not port.isdecimal() or int(port) > 65535:
        raise ConfigError(f"--http {text!r} is not HOST:PORT")
    return host.strip("[]") or "127.0.0.1", int(port)
