"""Plans the processes of a local cluster and their options. No I/O."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import msgspec

from services.local.credentials import Credential, check_region, random_process_id
from services.local.model_list import NamedModel
from services.local.processes.child_processes import ProcessSpec
from services.local.processes.environ import thread_environ
from services.local.redis_acl import REDIS_ROLES
from services.local.servers import LOOPBACK
from shared.config import (
    DEVICES,
    DTYPES,
    EXPERT_SPLITS,
    LOAD_FORMATS,
    TP_SIZES,
    WEIGHT_FORMS,
    gpu_memory_problems,
    is_device_name,
    is_loopback,
    log_problems,
    url_problems,
)
from shared.errors import ConfigError
from shared.lifecycle.child_process import python_path
from shared.nats_urls import authority, nats_servers
from shared.numerics import ACTIVATIONS, KV_DTYPES
from shared.sizes import parse_size_or_share
from shared.subjects import NO_INSTANCE, CredentialRole
from shared.tls import TlsFiles
from shared.transport.link_config import SiteLinks

_COMMANDS: dict[CredentialRole, str] = {
    "gateway": "gateway",
    "scheduler": "scheduler",
    "kv_index": "kv-index",
    "encode": "encode",
    "prefill": "prefill",
    "decode": "decode",
    "worker": "worker",
    "host": "host",
}
# A handoff of fewer tokens costs more than it saves (layer-wise push: TTFT +18 % at 256 tokens,
# -48 % at 1,024); a longer prompt would delay every token that its decode worker generates.
MAX_LOCAL_PREFILL_TOKENS = 512
LOOPBACK_NETWORK = "127.0.0.0/8"  # of sites on one machine
DRAIN_TIMEOUT_S = 10.0  # limit of a service; less than the grace period before SIGKILL
MIN_KEY_CHARS, MAX_KEY_CHARS = 8, 512
SECRET_VARIABLE = "HEARTH_CLUSTER_SECRET"
METRICS_VARIABLE = "HEARTH_METRICS_PORT"
REDIS_VARIABLE = "HEARTH_REDIS_URL"
OPERATOR_VARIABLE = "HEARTH_OPERATOR_TOKEN"
FAULT_SOCKET_VARIABLE = "HEARTH_FAULT_SOCKET"
FAULT_TOKEN_VARIABLE = "HEARTH_FAULT_TOKEN"
# Variables that only some processes get
SECRETS = frozenset(
    {SECRET_VARIABLE, OPERATOR_VARIABLE, FAULT_SOCKET_VARIABLE, FAULT_TOKEN_VARIABLE}
)
ROLES_WITH_PROCESS = frozenset(_COMMANDS)
WORKER_ROLES = ("encode", "prefill", "decode", "worker")
PORT_ORDER = ("decode", "worker", "prefill", "encode")  # those first that other hosts dial for KV
LAST_PORT = 65_535
LINKED_ROLES = (*WORKER_ROLES, "host", "gateway", "scheduler")


class UpOptions(msgspec.Struct, frozen=True, kw_only=True):
    model_dir: Path
    model_name: str = ""  # empty: the directory's
    num_prefill: int = 1
    num_decode: int = 1
    num_both: int = 0
    num_encode: int = 0
    http_host: str = LOOPBACK
    http_port: int | None = None  # None: 8000, or a free port if 8000 is in use
    nats_url: str | None = None
    redis_url: str | None = None
    nats_port: int | None = None  # None: a free one
    data_plane_port: int | None = None  # the first of its workers; None: free ones
    chat_template: str = ""  # a file, in place of the checkpoint's
    http_cert: str = ""  # PEM files of the gateway, for HTTPS
    http_key: str = ""
    advertise_host: str = LOOPBACK  # NATS and the KV data plane listen here
    dtype: str = "auto"
    kv_dtype: str = "auto"
    device: str = "auto"
    num_gpus: int = 0  # visible on this machine; with 0, "auto" is the CPU
    load_format: str = "auto"
    weights: str = "auto"
    kv_cache_bytes: int | None = None  # None means the worker's default
    gpu_memory: str = ""  # that each worker may use, a size or a share; empty: what is free
    max_batch_tokens: int | None = None
    tenant_id: str = "default"
    api_key: str = ""  # of the tenant; empty: a new one, or that of the last start
    state_dir: Path | None = None  # outlives the cluster; None: a folder that ends with it
    tp: int = 1  # ranks that share each layer, of workers for both roles
    prefill_tp: int = 1
    decode_tp: int = 1
    pp: int = 1  # pipeline stages of every worker
    activations: str = "plain"  # or "bf16-exchange"; for every worker
    experts: str = "auto"  # ep or tp, of every worker of several ranks
    log_level: str = "info"
    log_format: str = "auto"
    region: str = ""  # of all processes
    region_classes: tuple[str, ...] = ()  # NAME=REGION,REGION,…
    links: SiteLinks | None = None  # to other sites
    link_seeds: dict[str, str] = {}  # of the links that this site opens, by variable
    models: tuple[NamedModel, ...] = ()  # several: a host runs their workers, by the model registry

    def tp_of(self, role: CredentialRole) -> int:
        return {"prefill": self.prefill_tp, "decode": self.decode_tp}.get(role, self.tp)

    def num_ports_of(self, role: CredentialRole) -> int:
        """The data plane's ports of a worker: one for each rank, and one for images."""
        return 1 if role == "encode" else self.tp_of(role) * self.pp + 1


class Endpoints(msgspec.Struct, frozen=True, kw_only=True):
    """Addresses of the cluster's servers; `nats_url` is set for an external NATS.

    `cluster_secret` is for gateways and the index alone.
    """

    nats_host: str
    nats_port: int
    redis_url: str
    redis_urls: dict[str, str] = {}  # URLs of Redis users by role; empty for an external Redis
    http_host: str
    http_port: int
    is_https: bool = False
    nats_url: str | None = None
    cluster_secret: str = ""
    operator_token: str = ""
    fault_socket: str = ""  # empty: the gateway cannot ask for faults
    fault_token: str = ""

    @property
    def http_url(self) -> str:
        """The gateway's URL for clients on this machine."""
        host = LOOPBACK if self.http_host in ("0.0.0.0", "::", "") else self.http_host
        return f"http{'s' if self.is_https else ''}://{authority(host, self.http_port)}"

    def redis_url_of(self, role: str) -> str:
        return self.redis_urls.get(role, self.redis_url)

    def nats_url_of(self, credential: Credential) -> str:
        return self.nats_url or credential.nats_url(self.nats_host, self.nats_port)


def offers_faults(options: UpOptions) -> bool:
    """Whether an operator may kill and freeze workers from the page: only of one model, and if
    gateway, NATS and workers are all on loopback.
    """
    is_local = is_loopback(options.http_host) and is_loopback(options.advertise_host)
    return is_local and options.nats_url is None and not options.models


def check_options(options: UpOptions) -> None:
    """Checks all options. Raises a ConfigError that names every problem."""
    check_region(options.region)
    counts = {
        "prefill": options.num_prefill,
        "decode": options.num_decode,
        "both": options.num_both,
        "encode": options.num_encode,
    }
    problems = [f"--{name} {count} is negative" for name, count in counts.items() if count < 0]
    if options.models:
        problems += _several_models_problems(options)
    elif not problems and options.num_decode + options.num_both == 0:
        problems.append("no decode worker: nothing could answer")
    if not options.model_dir.is_dir():
        problems.append(f"--model {options.model_dir} is not a directory")
    if options.dtype not in DTYPES:
        problems.append(f"--dtype {options.dtype!r} is none of {', '.join(DTYPES)}")
    if options.weights not in WEIGHT_FORMS:
        problems.append(f"--weights {options.weights!r} is none of {', '.join(WEIGHT_FORMS)}")
    if options.load_format not in LOAD_FORMATS:
        problems.append(
            f"--load-format {options.load_format!r} is none of {', '.join(LOAD_FORMATS)}"
        )
    for name in ("kv_cache_bytes", "max_batch_tokens"):
        value = getattr(options, name)
        if value is not None and value <= 0:
            problems.append(f"--{name.replace('_', '-')} {value} is not positive")
    for name in ("tp", "prefill_tp", "decode_tp"):
        if getattr(options, name) not in TP_SIZES:
            option = name.replace("_", "-")
            problems.append(f"--{option} {getattr(options, name)} is none of 1, 2, 4, 8")
    if options.pp < 1:
        problems.append(f"--pp {options.pp} must be at least 1")
    if options.experts not in EXPERT_SPLITS:
        problems.append(f"--experts {options.experts!r} is none of {', '.join(EXPERT_SPLITS)}")
    if options.activations not in ACTIVATIONS:
        names = ", ".join(ACTIVATIONS)
        problems.append(f"--activations {options.activations!r} is none of {names}")
    if options.kv_dtype not in KV_DTYPES:
        names = ", ".join(KV_DTYPES)
        problems.append(f"--kv-dtype {options.kv_dtype!r} is none of {names}")
    if options.nats_port is not None and options.nats_url is not None:
        problems.append("--nats-port is of the NATS that is started: --nats names a running one")
    if options.links is not None and options.nats_url is not None:
        problems.append("--link is of the NATS that is started: --nats names a running one")
    log_fields = log_problems(options.log_level, options.log_format)
    problems += [f"--{each.replace('_', '-', 1)}" for each in log_fields]
    if options.chat_template and not Path(options.chat_template).is_file():
        problems.append(f"--chat-template {options.chat_template} is not a file")
    tls = TlsFiles(cert=options.http_cert, key=options.http_key)
    problems += [f"--{each.replace('_', '-')}" for each in tls.problems("http")]
    if options.api_key:
        problems += key_problems(options.api_key)
    problems += _device_problems(options)
    problems += _port_problems(options)
    problems += _server_problems(options)
    if problems:
        raise ConfigError("; ".join(problems))


def _server_problems(options: UpOptions) -> Iterator[str]:
    """Yields what is wrong with the URLs of running servers."""
    if options.redis_url is not None:
        yield from url_problems("--redis", options.redis_url, schemes=("redis", "rediss", "unix"))
    if options.nats_url is not None:
        try:
            nats_servers(options.nats_url)
        except ConfigError as error:
            yield f"--nats: {error.message}"


def key_problems(api_key: str) -> list[str]:
    """Returns what is wrong with an API key, without the key in it."""
    is_word = api_key.isascii() and api_key.isprintable() and " " not in api_key
    if is_word and MIN_KEY_CHARS <= len(api_key) <= MAX_KEY_CHARS:
        return []
    return [f"--api-key is not a word of {MIN_KEY_CHARS} to {MAX_KEY_CHARS} ASCII characters"]


def _several_models_problems(options: UpOptions) -> list[str]:
    """Returns the given options that contradict several models, as a host chooses them."""
    fixed = (
        *("dtype", "load_format", "kv_cache_bytes", "max_batch_tokens", "tp", "pp"),
        *("prefill_tp", "decode_tp", "activations", "experts", "model_name", "nats_url"),
        *("chat_template", "num_encode", "data_plane_port"),
    )
    fields = {each.name: each.default for each in msgspec.structs.fields(UpOptions)}
    named = {"model_name": "name", "nats_url": "nats", "num_encode": "encode"}
    given = [name for name in fixed if getattr(options, name) != fields[name]]
    return [
        f"--{named.get(name, name).replace('_', '-')} is for one --model, and {len(options.models)}"
        " are given"
        for name in given
    ]


def _device_problems(options: UpOptions) -> list[str]:
    device, num_gpus = options.device, options.num_gpus
    if not is_device_name(device):
        return [f"--device {device!r} is not {DEVICES}"]
    is_on_cpu = device == "cpu" or (device == "auto" and num_gpus == 0)
    if options.gpu_memory:
        named = gpu_memory_problems(options.gpu_memory, "cpu" if is_on_cpu else device)
        if problems := [f"--{each.replace('_', '-', 1)}" for each in named]:
            return problems
    if is_on_cpu:
        return []
    if num_gpus == 0:
        return [f"--device {device}: this machine shows no CUDA device to torch"]
    index = device.partition(":")[2]
    if index and int(index) >= num_gpus:
        return [f"--device {device}: there are {num_gpus} CUDA devices, 0 to {num_gpus - 1}"]
    num_workers = options.num_prefill + options.num_decode + options.num_both + options.num_encode
    num_usable = 1 if index else num_gpus
    if options.gpu_memory:
        return _share_problems(options.gpu_memory, num_workers, num_usable)
    if num_workers > num_usable and options.kv_cache_bytes is None:
        return [
            f"{num_workers} workers on {num_usable} CUDA device(s): each sizes its KV cache by the "
            "memory that is free; start at most one a device (--both 1), or give --gpu-memory, or "
            "--kv-cache-bytes"
        ]
    return []


def _share_problems(gpu_memory: str, num_workers: int, num_devices: int) -> list[str]:
    """Returns the problem of workers that share a device, if their shares are more than all."""
    amount = parse_size_or_share(gpu_memory)
    num_sharing = -(-num_workers // num_devices)
    if isinstance(amount, int) or num_sharing * amount <= 1:
        return []
    return [
        f"--gpu-memory {gpu_memory}: {num_sharing} workers share a device, and {num_sharing} times "
        f"{gpu_memory} is more than all of it"
    ]


def worker_counts(
    prefill: int | None,
    decode: int | None,
    both: int | None,
    *,
    device: str,
    num_gpus: int,
) -> tuple[int, int, int]:
    """Returns the numbers of prefill, decode and both-role workers, with defaults for None.

    The default is one worker per role; on a single GPU it is one worker with both roles.
    """
    is_on_cuda = device.startswith("cuda") or (device == "auto" and num_gpus > 0)
    is_single = is_on_cuda and (":" in device or num_gpus == 1)
    if prefill is None and decode is None and both is None and is_single:
        return 0, 0, 1
    num_both = 0 if both is None else both
    default = int(num_both == 0)
    return (
        default if prefill is None else prefill,
        default if decode is None else decode,
        num_both,
    )


def worker_devices(options: UpOptions, num_workers: int) -> list[str]:
    """Returns the device of each worker: GPUs in turn if there are more workers than GPUs."""
    device = options.device
    if device == "auto":
        device = "cuda" if options.num_gpus else "cpu"
    if device != "cuda":
        return [device] * num_workers
    return [f"cuda:{number % options.num_gpus}" for number in range(num_workers)]


def plan_credentials(options: UpOptions) -> tuple[Credential, ...]:
    """Returns one per process. Names are random on an external NATS, which clusters may share."""
    workers: tuple[tuple[CredentialRole, int], ...] = (
        ("prefill", options.num_prefill),
        ("decode", options.num_decode),
        ("worker", options.num_both),
        ("encode", options.num_encode),
    )
    if options.models:
        workers = (("host", 1), ("worker", 1))
    counts: tuple[tuple[CredentialRole, int], ...]
    counts = (("kv_index", 1), ("scheduler", 1), *workers, ("gateway", 1))
    return tuple(
        Credential(
            role,
            f"{role}-{number}" if options.nats_url is None else random_process_id(role),
            region=options.region,
        )
        for role, count in counts
        for number in range(1, count + 1)
    )


def data_plane_ports(
    options: UpOptions, credentials: Iterable[Credential]
) -> dict[Credential, int]:
    """Returns the first port of each worker, in PORT_ORDER without gaps; none without a given
    port.
    """
    if options.data_plane_port is None:
        return {}
    workers = (each for each in credentials if each.role in WORKER_ROLES)
    ports, port = {}, options.data_plane_port
    for each in sorted(workers, key=lambda worker: PORT_ORDER.index(worker.role)):
        ports[each] = port
        port += options.num_ports_of(each.role)
    return ports


def _port_problems(options: UpOptions) -> list[str]:
    first = options.data_plane_port
    if first is None or options.models:
        return []
    workers = (each for each in plan_credentials(options) if each.role in WORKER_ROLES)
    last = first + sum(options.num_ports_of(each.role) for each in workers) - 1
    if last <= LAST_PORT:
        return []
    return [f"--data-plane-port {first}: its workers need the ports to {last}, over {LAST_PORT}"]


def expected_workers(credentials: tuple[Credential, ...]) -> dict[str, set[str]]:
    """Returns, by role, the ids that the gateway must know before the cluster is ready."""
    handled = {"worker": ("prefill", "decode")}
    return {
        role: {e.process_id for e in credentials if role in handled.get(e.role, (e.role,))}
        for role in ("prefill", "decode", "encode")
    }


def plan_services(
    options: UpOptions,
    credentials: tuple[Credential, ...],
    endpoints: Endpoints,
    *,
    num_cores: int,
    environ: Mapping[str, str],
) -> list[ProcessSpec]:
    if options.models:
        return _several_models_services(options, credentials, endpoints, environ=environ)
    workers = [each for each in credentials if each.role in WORKER_ROLES]
    num_threads = max(1, num_cores // len(workers))
    devices = dict(zip(workers, worker_devices(options, len(workers)), strict=True))
    ports = data_plane_ports(options, workers)
    return [
        _service(
            each,
            options,
            endpoints,
            device=devices.get(each),
            data_plane_port=ports.get(each),
            num_threads=num_threads,
            environ=environ,
        )
        for each in credentials
    ]


def _several_models_services(
    options: UpOptions,
    credentials: tuple[Credential, ...],
    endpoints: Endpoints,
    *,
    environ: Mapping[str, str],
) -> list[ProcessSpec]:
    """Returns the services for several models. Their workers are the host's, with a credential but
    no process here.
    """
    worker = next(each for each in credentials if each.role == "worker")
    of_host = {"HEARTH_WORKER_NATS_URL": endpoints.nats_url_of(worker)}
    if budget := _host_budget(options):
        of_host["HEARTH_BUDGET"] = budget
    return [
        _service(
            each,
            options,
            endpoints,
            device=None,
            num_threads=1,
            environ={**environ, **(of_host if each.role == "host" else {})},
        )
        for each in credentials
        if each.role in _COMMANDS and each.role != "worker"
    ]


def _host_budget(options: UpOptions) -> str:
    """Returns the budgets of the host; empty: its defaults, as has a device alone."""
    device = options.device
    if not options.gpu_memory:
        return "" if device == "auto" else device
    devices = [device] if ":" in device else [f"cuda:{n}" for n in range(options.num_gpus)]
    return " ".join(f"{each}={options.gpu_memory}" for each in devices)


def _service(
    credential: Credential,
    options: UpOptions,
    endpoints: Endpoints,
    *,
    device: str | None,
    num_threads: int,
    environ: Mapping[str, str],
    data_plane_port: int | None = None,
) -> ProcessSpec:
    """Returns the process of a service. `device` is None without an engine, and the port for a free
    one.
    """
    arguments = ["--process-id", credential.process_id, "--instance", NO_INSTANCE]
    arguments += ["--drain-timeout-s", f"{DRAIN_TIMEOUT_S:g}"]
    arguments += ["--log-level", options.log_level, "--log-format", options.log_format]
    if options.region:
        arguments += ["--region", options.region]
    for text in options.region_classes:
        arguments += ["--region-classes", text]
    if options.links is not None and credential.role in LINKED_ROLES:
        arguments += ["--site", options.links.site]
        if credential.role == "gateway":
            for each in options.links.links:
                arguments += ["--linked-site", each.peer]
            if is_loopback(options.advertise_host):
                arguments += ["--kv-networks", LOOPBACK_NETWORK]
    if options.models and credential.role == "gateway":
        arguments += ["--model-dir", ""]
    elif device is not None or credential.role == "gateway":
        arguments += ["--model-dir", str(options.model_dir.resolve())]
        arguments += ["--model-name", options.model_name]
    if device is not None:
        arguments += ["--dtype", options.dtype, "--device", device]
        arguments += ["--num-threads", str(num_threads)]
        arguments += ["--data-plane-host", options.advertise_host]
        if data_plane_port is not None:
            arguments += ["--data-plane-port", str(data_plane_port)]
        if credential.role != "encode":
            arguments += ["--kv-dtype", options.kv_dtype, "--weights", options.weights]
        arguments += ["--load-format", options.load_format]
    if device is not None and credential.role != "encode":
        if options.kv_cache_bytes is not None:
            arguments += ["--kv-cache-bytes", str(options.kv_cache_bytes)]
        if options.gpu_memory:
            arguments += ["--gpu-memory", options.gpu_memory]
        if options.max_batch_tokens is not None:
            arguments += ["--max-batch-tokens", str(options.max_batch_tokens)]
        arguments += ["--tp", str(options.tp_of(credential.role)), "--pp", str(options.pp)]
        arguments += ["--activations", options.activations, "--experts", options.experts]
    if credential.role == "scheduler" and options.num_prefill:
        environ = {"HEARTH_MAX_LOCAL_PREFILL_TOKENS": f"{MAX_LOCAL_PREFILL_TOKENS}", **environ}
    if options.nats_url is None and not is_loopback(options.advertise_host):
        environ = {"HEARTH_DATA_PLANE_SECURITY": "none", **environ}  # no TLS to carry keys
    # several processes cannot have one port, and not all need Redis
    hidden = {*SECRETS, METRICS_VARIABLE, REDIS_VARIABLE}
    environ = {name: value for name, value in environ.items() if name not in hidden}
    if credential.role in ("gateway", "kv_index"):
        environ[SECRET_VARIABLE] = endpoints.cluster_secret
    if credential.role == "gateway":
        arguments += ["--http-host", endpoints.http_host, "--http-port", str(endpoints.http_port)]
        environ[OPERATOR_VARIABLE] = endpoints.operator_token
        if options.chat_template:
            arguments += ["--chat-template", str(Path(options.chat_template).resolve())]
        if options.http_cert:
            arguments += ["--http-cert", str(Path(options.http_cert).resolve())]
            arguments += ["--http-key", str(Path(options.http_key).resolve())]
        if endpoints.fault_socket:
            environ[FAULT_SOCKET_VARIABLE] = endpoints.fault_socket
            environ[FAULT_TOKEN_VARIABLE] = endpoints.fault_token
        arguments += ["--lame-duck-s", "0"]  # no balancer polls a local gateway
    redis = {}
    if credential.role in REDIS_ROLES:  # the others need none
        redis[REDIS_VARIABLE] = endpoints.redis_url_of(credential.role)
    return ProcessSpec(
        process_id=credential.process_id,
        argv=(sys.executable, "-m", "services", _COMMANDS[credential.role], *arguments),
        environ={
            **environ,
            **thread_environ(1 if device is None else num_threads),
            "PYTHONPATH": python_path(environ),
            "HEARTH_NATS_URL": endpoints.nats_url_of(credential),
            **redis,
        },
        start_order={"kv_index": 1, "scheduler": 1, "gateway": 3}.get(credential.role, 2),
    )


def plan_warming(options: UpOptions, environ: Mapping[str, str]) -> ProcessSpec | None:
    """Returns the process that compiles CPU kernels during a first start.

    None if the cache holds any machine code: if it is for another model or release, the workers
    compile what they need.
    """
    if options.models:
        return None  # the first start of each does it
    home = environ.get("XDG_CACHE_HOME") or Path(environ.get("HOME", ""), ".cache")
    root = Path(environ.get("HEARTH_CACHE_DIR") or Path(home, "hearth"))
    if options.device not in ("cpu", "auto") or any(root.glob("kernels/*/compiled-layers-*")):
        return None
    arguments = ["--model", str(options.model_dir.resolve()), "--dtype", options.dtype]
    arguments += ["--kv-dtype", options.kv_dtype]
    arguments += ["--weights", options.weights, "--no-rows"]
    return ProcessSpec(
        process_id="warm",
        argv=(sys.executable, "-m", "services", "warm", *arguments),
        environ={**environ, **thread_environ(1), "PYTHONPATH": python_path(environ)},
    )
