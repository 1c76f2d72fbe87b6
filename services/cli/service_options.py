"""A command line for a configuration Struct: one option and one environment variable a field."""

from __future__ import annotations

import inspect
import os
import sys
from collections.abc import Callable
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, NoReturn, TypeVar

import msgspec
import typer

import shared
from services.local.credentials import process_id_for
from services.local.hub_download import is_hub_id, local_copy
from shared.config import ProcessConfig, WorkerConfig, check

DEMO_MODEL_DIR = Path(shared.__file__).parent / "demo_model"
DEMO_MODEL_NAME = "hearth-demo"

HELP = {
    "nats_url": "NATS server, with this process's credential: nats://ID:PASSWORD@HOST:PORT.",
    "process_id": "Name of this process; else the NATS URL's user, else ROLE-<6 hex digits>.",
    "region": "Where this process runs; placement prefers and residency obeys it.",
    "drain_timeout_s": "Seconds that a stop waits for what runs.",
    "redis_url": "Redis server: redis://:PASSWORD@HOST:PORT/0.",
    "model_dir": "Checkpoint directory in Hugging Face form, or a hub id such as org/name.",
    "model_name": "Name that clients ask for; else the hub id, or the directory's name.",
    "http_host": "Address that the HTTP door listens on.",
    "http_port": "Port that the HTTP door listens on.",
    "request_timeout_s": "Longest life of a request, seconds.",
    "max_body_bytes": "Largest request body.",
    "max_requests": "Requests open at once; one more is answered 429.",
    "default_max_tokens": "Tokens to generate where a request does not say.",
    "metrics_token": "Bearer token without which /metrics is refused; empty: open.",
    "max_queued_requests": "Requests waiting for a worker; one more is answered 429.",
    "max_queued_tokens": "Prompt tokens waiting for a worker.",
    "local_prefill_tokens": "An uncached rest this short is computed by the decode worker itself.",
    "max_local_prefill_tokens": "A longer one is computed there only if no other worker can.",
    "max_prefixes_per_tenant": "Prefixes whose metadata is kept in Redis for each tenant.",
    "prefix_ttl_s": "Seconds after its last use that a prefix's metadata is kept.",
    "dtype": "auto (as in the checkpoint), bfloat16, float16 or float32.",
    "device": "auto (CUDA where there is a device), cpu, cuda or cuda:N.",
    "load_format": "auto (what the directory has) or dummy: seeded weights from config.json alone, "
    "for measurements.",
    "weights": "auto (compressed if the checkpoint is), dense, or compressed: matrices in some "
    "11.4 bits a weight instead of 16, the same bits when they are used.",
    "num_threads": "Math threads; 0 shares the cores of this host.",
    "is_batch_invariant": "A token's bits depend neither on its batch nor on chunking. Without "
    "it CUDA is a little faster, and a resumed answer may go on differently.",
    "block_size": "Tokens in a KV block.",
    "kv_cache_bytes": "Memory for the KV cache (default: 256 MiB on the CPU; on CUDA 0.9 of "
    "what is free after weights and the largest step).",
    "max_batch_tokens": "Tokens computed in one step (default: 512 on the CPU; on CUDA 2048, and "
    "8192 for prefill alone).",
    "max_sequences": "Sequences running at once.",
    "max_reserved_share": "Share of the KV cache that waiting handoffs may hold.",
    "zero_freed_blocks": "Zero the KV of blocks that nobody can find or holds any more.",
    "max_pinned_share": "Share of the KV cache that pinned prefixes may hold.",
    "kv_compression": "BF16 KV over TCP: auto (compressed on links where that is faster) or off.",
    "data_plane_host": "Address that this worker's KV data plane listens on.",
    "data_plane_advertised_host": "Address at which others reach it; else the one it listens on.",
}
_DEFAULTS = {"model_dir": DEMO_MODEL_DIR, "process_id": None}

C = TypeVar("C", bound=ProcessConfig)


class WorkerRole(StrEnum):
    """What `--role` of a worker command may say."""

    own = "own"
    both = "both"


def service_command(
    config_type: type[C],
    role: str,
    run: Callable[..., int],
    *,
    has_role_option: bool = False,
) -> Callable[..., None]:
    """A typer command that fills a `config_type`, checks it as a whole and calls `run(config)`.

    With `has_role_option` it calls `run(config, is_both)`. The process ends with the status that
    `run` gives.
    """

    def command(**options: Any) -> None:
        arguments = () if not has_role_option else (options.pop("role") is WorkerRole.both,)
        if options["process_id"] is None:
            options["process_id"] = process_id_for(role, options["nats_url"])
        if "model_dir" in options:
            given, is_worker = options["model_dir"], issubclass(config_type, WorkerConfig)
            needs_weights = is_worker and options["load_format"] != "dummy"
            options["model_name"] = model_name_for(given, options["model_name"])
            options["model_dir"] = local_copy(given, needs_weights=needs_weights)
        config = config_type(**options)
        check(config)
        _leave(run(config, *arguments))

    parameters = [_parameter(field) for field in msgspec.structs.fields(config_type)]
    if has_role_option:
        parameters.append(_role_parameter(role))
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {each.name: each.annotation for each in parameters}
    return command


def model_name_for(model_dir: Path, name: str) -> str:
    """The demo model has one name in every cluster, a hub model its id; empty: the directory's."""
    if name:
        return name
    if is_hub_id(model_dir):
        return str(model_dir)
    return DEMO_MODEL_NAME if _is_demo(model_dir) else ""


def _is_demo(model_dir: Path) -> bool:
    return model_dir.resolve() == DEMO_MODEL_DIR.resolve()


def _leave(status: int) -> NoReturn:
    """All is closed: taking torch apart module by module would cost a second more."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def _parameter(field: msgspec.structs.FieldInfo) -> inspect.Parameter:
    name = field.name
    option_type = str | None if name == "process_id" else field.type
    option = typer.Option(
        _flag(name, is_switch=field.type is bool),
        help=HELP.get(name, ""),
        envvar=f"HEARTH_{name.removeprefix('is_').upper()}",
        show_default=name != "process_id",
    )
    default = _DEFAULTS.get(name, inspect.Parameter.empty if field.required else field.default)
    return inspect.Parameter(
        name,
        inspect.Parameter.KEYWORD_ONLY,
        default=default,
        annotation=Annotated[option_type, option],
    )


def _flag(name: str, *, is_switch: bool) -> str:
    words = name.removeprefix("is_").replace("_", "-")
    return f"--{words}/--no-{words}" if is_switch else f"--{words}"


def _role_parameter(role: str) -> inspect.Parameter:
    option = typer.Option(
        "--role", help=f"own: {role} only; both: prefill and decode over one engine."
    )
    return inspect.Parameter(
        "role",
        inspect.Parameter.KEYWORD_ONLY,
        default=WorkerRole.own,
        annotation=Annotated[WorkerRole, option],
    )
