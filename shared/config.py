"""The configuration of each process: frozen, and checked with all errors reported together."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from fractions import Fraction
from ipaddress import ip_address, ip_network
from itertools import pairwise
from math import inf
from pathlib import Path
from typing import Literal
from urllib.parse import urlsplit

import msgspec

from shared.errors import ConfigError
from shared.messages import MAX_WEIGHT, WORKER_ROLES
from shared.nats_urls import nats_servers
from shared.numerics import (
    ACTIVATIONS,
    KV_DTYPES,
    MODES,
    Activations,
    KvDtype,
    ModeChoice,
)
from shared.regions.region_classes import region_classes
from shared.secrets.option_files import OptionFile
from shared.secrets.secret import Secret
from shared.sizes import parse_size_or_share
from shared.tls import TlsFiles

DTYPES = ("auto", "bfloat16", "float16", "float32")
WEIGHT_FORMS = ("auto", "dense", "compressed")
LOAD_FORMATS = ("auto", "dummy")
TP_SIZES = (1, 2, 4, 8)  # ranks that can share a layer
ExpertSplit = Literal["auto", "ep", "tp"]
EXPERT_SPLITS: tuple[ExpertSplit, ...] = ("auto", "ep", "tp")
ExecutorChoice = Literal["auto", "plain"]
EXECUTORS: tuple[ExecutorChoice, ...] = ("auto", "plain")
ParkedWeights = Literal["host", "device"]
PARKED_WEIGHTS: tuple[ParkedWeights, ...] = ("host", "device")
AttentionChoice = Literal["auto", "triton", "cudnn"]
ATTENTIONS: tuple[AttentionChoice, ...] = ("auto", "triton", "cudnn")
ExpertKernels = Literal["auto", "triton", "grouped"]
EXPERT_KERNELS: tuple[ExpertKernels, ...] = ("auto", "triton", "grouped")
Residency = Literal["demand", "lru"]
RESIDENCIES: tuple[Residency, ...] = ("demand", "lru")
KV_COMPRESSIONS = ("auto", "off")
KV_TRANSPORTS = ("own", "nixl")
DATA_PLANE_SECURITIES = ("aead", "mac", "none")
TOOL_FORMATS = ("template", "hermes")
LOG_LEVELS = ("debug", "info", "warning", "error")
LOG_FORMATS = ("auto", "json", "text")
DEVICES = "auto, cpu, cuda or cuda:N"
_DEVICE = re.compile(r"auto|cpu|cuda(:\d{1,3})?")
_BUDGET_DEVICE = re.compile(r"cpu|cuda:\d{1,3}")
_SUBJECT_TOKEN = re.compile(r"[^\s.*>]+")
_PROCESS_ID = re.compile(rf"{_SUBJECT_TOKEN.pattern}(\.{_SUBJECT_TOKEN.pattern})?")
CPU_KV_CACHE_BYTES = 256 * 1024 * 1024
CPU_BATCH_TOKENS = 512
# A CUDA step of 512 tokens is bound by kernel launches, not by arithmetic. Decode has a smaller
# limit because its steps also generate tokens that users wait for.
CUDA_BATCH_TOKENS = 2048
CUDA_PREFILL_BATCH_TOKENS = 8192


SECRETS = ("cluster_secret", "operator_token", "metrics_token")


class ProcessConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Configuration of a process. `nats_url` carries the credential, whose user name is the first
    part of the process id. It may be a comma list of servers.
    """

    nats_url: str
    process_id: str
    nats_ca: str = ""  # PEM files, for tls:// URLs; empty: the authorities of the system
    nats_cert: str = ""
    nats_key: str = ""
    is_nats_tls_first: bool = False  # the handshake precedes all that the server sends
    region: str = ""
    # NAME=REGION,REGION,… of each class of regions, as in nats-config; empty: there are none
    region_classes: tuple[str, ...] = ()
    # requests still running then are returned or end with an error: a gateway's longest answers
    drain_timeout_s: float = 300.0
    metrics_host: str = "127.0.0.1"
    metrics_port: int = 0  # port of probes and metrics; 0: none
    log_level: str = "info"
    log_format: str = "auto"  # text on a terminal, JSON lines elsewhere
    # by the names of options whose values come from files
    option_files: Mapping[str, OptionFile] = {}

    def secret(self, option: str) -> Secret:
        """Returns the secret of an option; of SECRETS it is read again if it is in a file."""
        return Secret(getattr(self, option), self.option_files.get(option))

    @property
    def secret_files(self) -> list[OptionFile]:
        """Returns the files that are read again while the process runs."""
        return [each for name, each in self.option_files.items() if name in SECRETS]

    @property
    def own_classes(self) -> tuple[str, ...]:
        """The region classes that contain this process's region. Raises ConfigError."""
        return region_classes(self.region_classes).with_region(self.region)

    @property
    def leave_timeout_s(self) -> float:
        """The seconds from SIGTERM to the stop."""
        return self.drain_timeout_s

    @property
    def metrics_address(self) -> tuple[str, int] | None:
        return (self.metrics_host, self.metrics_port) if self.metrics_port else None

    @property
    def nats_tls(self) -> TlsFiles:
        return TlsFiles(ca=self.nats_ca, cert=self.nats_cert, key=self.nats_key)

    def problems(self) -> Iterator[str]:
        try:
            nats_servers(self.nats_url)
        except ConfigError as error:
            yield error.message
        yield from positive_problems(self, "drain_timeout_s")
        if not 0 <= self.metrics_port < 65536:
            yield f"metrics_port {self.metrics_port} is not in [0, 65536)"
        yield from log_problems(self.log_level, self.log_format)
        yield from self.nats_tls.problems("nats")
        if (
            self.is_nats_tls_first or self.nats_tls != TlsFiles()
        ) and "tls://" not in self.nats_url:
            yield "nats_ca, nats_cert, nats_key and nats_tls_first are for tls:// URLs"
        if not _PROCESS_ID.fullmatch(self.process_id):
            yield (
                f"process_id {self.process_id!r} must be CREDENTIAL or CREDENTIAL.INSTANCE, "
                "of names without spaces . * >"
            )
        if self.region and not _SUBJECT_TOKEN.fullmatch(self.region):
            yield f"region {self.region!r} must be a name without spaces . * >"
        try:
            region_classes(self.region_classes)
        except ConfigError as error:
            yield error.message


def log_problems(level: str, log_format: str) -> Iterator[str]:
    if level not in LOG_LEVELS:
        yield f"log_level {level!r} is none of {', '.join(LOG_LEVELS)}"
    if log_format not in LOG_FORMATS:
        yield f"log_format {log_format!r} is none of {', '.join(LOG_FORMATS)}"


class ModelProcessConfig(ProcessConfig, frozen=True, kw_only=True):
    """The checkpoint directory, and the model name in the API (default: the directory's)."""

    model_dir: Path
    model_name: str = ""

    @property
    def served_name(self) -> str:
        return self.model_name or self.model_dir.resolve().name

    def problems(self) -> Iterator[str]:
        yield from super().problems()
        if not self.model_dir.is_dir():
            yield f"model_dir {self.model_dir} is not a directory"


class GatewayConfig(ProcessConfig, frozen=True, kw_only=True):
    """Configuration of a gateway. `model_dir` is its own model; None: it serves the models of the
    registry alone.
    """

    redis_url: str
    model_dir: Path | None = None
    model_name: str = ""
    max_loaded_models: int = 16  # tokenizers and templates of the registry, beside those in use
    redis_read_url: str = ""  # a near replica, for API keys; empty: none
    redis_ca: str = ""  # PEM files, for rediss:// URLs
    redis_cert: str = ""
    redis_key: str = ""
    http_host: str = "127.0.0.1"
    http_port: int = 8000
    http_cert: str = ""  # PEM files, for HTTPS
    http_key: str = ""
    request_timeout_s: float = 600.0
    max_body_bytes: int = 4 * 1024 * 1024
    max_image_body_bytes: int = 32 * 1024 * 1024  # of a body with images, where a model takes some
    max_images: int = 20  # of one request
    max_image_pixels: int = 50_000_000  # of one image, before it is resized
    max_requests: int = 4096  # open at once; a request above the limit gets 429
    preparations_per_tenant: int = 2  # requests that are rendered and tokenized at once
    default_max_tokens: int = 1024
    cluster_secret: str = ""  # equal in all gateways and the index; workers have none
    cold_start_s: float = 0.0  # as of schedulers: keeps the card of a model without workers
    # Time after SIGTERM in which balancers see /ready; then come drain and stop
    lame_duck_s: float = 5.0
    write_timeout_s: float = 30.0  # time without a byte taken by the client
    keep_alive_s: float = 10.0  # silence of a stream before its head and each empty event
    max_unsent_bytes: int = 8 * 1024 * 1024  # text and packed logprobs of one stream
    max_tenant_unsent_bytes: int = 128 * 1024 * 1024  # bytes of all responses of a tenant
    metrics_token: str = ""  # required to read /metrics; empty: none is required
    operator_token: str = ""  # required to read /v1/cluster; empty: nobody may
    page: bool = True  # serves a page at /
    # Through which `hearth up` on loopback kills and freezes its workers for operators; empty: none
    fault_socket: str = ""
    fault_token: str = ""
    tool_format: str = "template"  # hermes: as text, for a chat template without tools
    chat_template: str = ""  # a file, in place of the checkpoint's templates
    response_template: str = ""  # how calls and reasoning are written; empty: by the checkpoint
    response_ttl_s: float = 24 * 3600.0  # life of stored responses (Responses API)
    max_stored_response_bytes: int = 0  # part of Redis for all tenants; 0: half of its maxmemory
    max_stored_prefix_bytes: int = 0  # the limit for named prefixes; 0: a quarter
    # Pads the events of Workers AI's streams: their sizes show tokens otherwise
    padding: bool = True
    # origins such as https://example.com whose pages may call, or * for all; empty: none
    cors_origin: tuple[str, ...] = ()
    image_host: tuple[str, ...] = ()  # hosts that images are fetched from; empty: none is
    # the name of this gateway's site, where its NATS has links to other sites; empty: it has none
    site: str = ""
    # sites to which it has links, each with the weight of its requests here, as `b` or `b=0.5`; one
    # that has never been heard is reported as cut
    linked_site: tuple[str, ...] = ()
    # networks of other sites' decode workers, to which the prefill workers here may push KV; empty:
    # none, and this site computes no prompts for others
    kv_networks: tuple[str, ...] = ()
    # where the collector of traces and its store are: spans of tenants bound to other regions are
    # not exported; empty: in the region of this gateway
    trace_region: str = ""
    # seconds for which tenants of other sites are served after their last confirmation
    stale_s: float = 300.0
    max_pixel_bytes: int = 1024**3  # processed images of open requests, in memory
    max_tenant_pixel_bytes: int = 256 * 1024 * 1024  # of one tenant
    # the least security of links over which workers get pixels
    data_plane_security: str = "aead"
    receipt_ttl_s: float = 3600.0  # life of receipts; 0: there are none
    max_receipt_bytes: int = 64 * 1024 * 1024  # memory of the receipts of all tenants

    @property
    def served_name(self) -> str:
        """The name of the gateway's own model; empty without one."""
        if self.model_dir is None:
            return ""
        return self.model_name or self.model_dir.resolve().name

    @property
    def http_tls(self) -> TlsFiles:
        return TlsFiles(cert=self.http_cert, key=self.http_key)

    @property
    def leave_timeout_s(self) -> float:
        return self.lame_duck_s + self.drain_timeout_s

    def problems(self) -> Iterator[str]:
        yield from super().problems()
        yield from url_problems("redis_url", self.redis_url, schemes=("redis", "rediss", "unix"))
        if self.redis_read_url:
            schemes = ("redis", "rediss", "unix")
            yield from url_problems("redis_read_url", self.redis_read_url, schemes=schemes)
        yield from redis_tls_of(self).problems("redis")
        yield from self.http_tls.problems("http")
        yield from positive_problems(
            self,
            *("request_timeout_s", "max_body_bytes", "max_requests", "preparations_per_tenant"),
            *("max_image_body_bytes", "max_images", "max_image_pixels"),
            *("default_max_tokens", "write_timeout_s", "keep_alive_s", "max_loaded_models"),
            *("max_unsent_bytes", "max_tenant_unsent_bytes", "response_ttl_s", "stale_s"),
            *("max_pixel_bytes", "max_tenant_pixel_bytes", "max_receipt_bytes"),
        )
        if self.data_plane_security not in DATA_PLANE_SECURITIES:
            yield (
                f"data_plane_security {self.data_plane_security!r} is none of "
                f"{', '.join(DATA_PLANE_SECURITIES)}"
            )
        if not 0 <= self.receipt_ttl_s < inf:
            yield f"receipt_ttl_s {self.receipt_ttl_s} is not a duration of at least 0"
        for name in ("max_stored_response_bytes", "max_stored_prefix_bytes"):
            if getattr(self, name) < 0:
                yield f"{name} {getattr(self, name)} is negative"
        if self.model_dir is not None and not self.model_dir.is_dir():
            yield f"model_dir {self.model_dir} is not a directory"
        if self.model_name and self.model_dir is None:
            yield f"model_name {self.model_name!r} needs a model_dir"
        if self.tool_format not in TOOL_FORMATS:
            yield f"tool_format {self.tool_format!r} is none of {', '.join(TOOL_FORMATS)}"
        if self.chat_template and not Path(self.chat_template).is_file():
            yield f"chat_template {self.chat_template} is not a file"
        if self.chat_template and self.model_dir is None:
            yield "chat_template needs a model_dir: it is of the gateway's own model"
        yield from _origin_problems(self.cors_origin)
        for each in self.image_host:
            if IMAGE_HOST.fullmatch(each) is None:
                yield f"image_host {each!r} is no host such as images.example.com or a.example:444"
        if "*" in self.cors_origin and not self.metrics_token:
            yield "cors_origin * needs a metrics_token: every page could read /metrics"
        if self.trace_region and not _SUBJECT_TOKEN.fullmatch(self.trace_region):
            yield f"trace_region {self.trace_region!r} must be a name without spaces . * >"
        if not 0 <= self.lame_duck_s < inf:
            yield f"lame_duck_s {self.lame_duck_s} is not a duration of at least 0"
        yield from _site_problems(self.site)
        yield from _linked_problems(self.linked_site, self.site)
        if self.kv_networks and not self.site:
            yield "kv_networks needs a site: they are networks of other sites"
        yield from _network_problems(self.kv_networks)
        if not 0 <= self.http_port < 65536:
            yield f"http_port {self.http_port} is not in [0, 65536)"
        if self.fault_socket and not is_loopback(self.http_host):
            yield f"fault_socket needs an http_host on loopback, not {self.http_host}"
        if self.fault_socket and not (self.operator_token and self.fault_token):
            yield "fault_socket needs an operator_token and a fault_token"


class SchedulerConfig(ProcessConfig, frozen=True, kw_only=True):
    max_queued_requests: int = 1024
    max_queued_tokens: int = 4_000_000
    local_prefill_tokens: int = 4  # up to this many uncached tokens, decode computes the prompt
    max_local_prefill_tokens: int = 1_000_000  # the limit where no prefill worker can take it
    automatic_roles: str = "off"  # "on": workers with both handlers change roles with the work
    min_role_workers: int = 1  # automatic changes leave as many in each role
    role_change_min_s: float = 15.0  # time between two automatic changes of one model
    target_itl_s: float = 0.05  # a decode worker with longer steps counts as full
    # time that requests wait for the first worker of a model, which an autoscaler starts: then an
    # idle model needs no worker; 0: each needs one
    cold_start_s: float = 0.0
    residency: Residency = "demand"  # the choice of hot models: by expected demand, or lru
    # requests of a parked model gather as long as this time to first token allows, if waking it
    # parks another one in use
    wake_ttft_s: float = 2.0
    # the name of this scheduler's site, where its NATS has links to other sites; empty: it has none
    site: str = ""

    def problems(self) -> Iterator[str]:
        yield from super().problems()
        yield from positive_problems(
            self,
            *("max_queued_requests", "max_queued_tokens", "min_role_workers", "target_itl_s"),
            "wake_ttft_s",
        )
        yield from _site_problems(self.site)
        yield from _cold_start_problems(self.cold_start_s)
        if self.automatic_roles not in ("off", "on"):
            yield f"automatic_roles {self.automatic_roles!r} is not off or on"
        if not 0 <= self.role_change_min_s < inf:
            yield f"role_change_min_s {self.role_change_min_s} is not a duration of at least 0"
        if self.residency not in RESIDENCIES:
            yield f"residency {self.residency!r} is none of {', '.join(RESIDENCIES)}"
        if self.local_prefill_tokens < 0:
            yield f"local_prefill_tokens {self.local_prefill_tokens} is negative"
        if self.max_local_prefill_tokens < self.local_prefill_tokens:
            yield (
                f"max_local_prefill_tokens {self.max_local_prefill_tokens} is less than "
                f"local_prefill_tokens, {self.local_prefill_tokens}"
            )


class KvIndexConfig(ProcessConfig, frozen=True, kw_only=True):
    redis_url: str
    redis_ca: str = ""  # PEM files, for rediss:// URLs
    redis_cert: str = ""
    redis_key: str = ""
    cluster_secret: str = ""  # secret of the gateways
    max_prefixes_per_tenant: int = 1000
    prefix_ttl_s: int = 86_400

    def problems(self) -> Iterator[str]:
        yield from super().problems()
        yield from url_problems("redis_url", self.redis_url, schemes=("redis", "rediss", "unix"))
        yield from redis_tls_of(self).problems("redis")
        yield from positive_problems(self, "max_prefixes_per_tenant", "prefix_ttl_s")


class HostConfig(ProcessConfig, frozen=True, kw_only=True):
    """The models of one machine. `worker_nats_url` carries the credential of all its workers."""

    worker_nats_url: str
    redis_url: str
    redis_ca: str = ""  # PEM files, for rediss:// URLs
    redis_cert: str = ""
    redis_key: str = ""
    # DEVICE=SIZE or SHARE; empty: half of this machine's memory, or on CUDA 0.9 of what is free
    budget: tuple[str, ...] = ()
    # of this machine, for weights of parked models on CUDA; None: half, with the CPU's budget
    parked_weights_bytes: int | None = None
    state_dir: str = ""  # cards, digests, times and logs; empty: a folder of this user's state
    num_threads: int = 0  # threads of each worker; 0: all cores, which few workers use at once
    data_plane_host: str = "127.0.0.1"  # address of its workers
    data_plane_advertised_host: str = ""
    data_plane_security: str = "aead"
    site: str = ""  # the name of its workers' site, to which other sites may push KV; empty: none

    def problems(self) -> Iterator[str]:
        yield from super().problems()
        try:
            nats_servers(self.worker_nats_url)
        except ConfigError as error:
            yield f"worker_{error.message}"
        yield from url_problems("redis_url", self.redis_url, schemes=("redis", "rediss", "unix"))
        yield from redis_tls_of(self).problems("redis")
        try:
            device_budgets(self.budget)
        except ConfigError as error:
            yield error.message
        if (self.parked_weights_bytes or 0) < 0:
            yield f"parked_weights_bytes {self.parked_weights_bytes} is negative"
        if self.num_threads < 0:
            yield f"num_threads {self.num_threads} is negative"
        yield from _site_problems(self.site)


def device_budgets(texts: Iterable[str]) -> dict[str, int | Fraction | None]:
    """Returns the bytes, or the share of the memory, by device of texts such as `cpu=12GiB` or
    `cuda:0=45%`. Of `cpu` alone it is None: the device's default. Raises ConfigError.
    """
    budgets: dict[str, int | Fraction | None] = {}
    for text in texts:
        device, separator, size = text.partition("=")
        if not _BUDGET_DEVICE.fullmatch(device):
            raise ConfigError(
                f"budget {text!r} is not DEVICE=SIZE|SHARE with the device cpu or cuda:N"
            )
        if device in budgets:
            raise ConfigError(f"budget {text!r}: {device} has a budget already")
        if not separator:
            budgets[device] = None
            continue
        try:
            budgets[device] = parse_size_or_share(size)
        except ConfigError as error:
            raise ConfigError(f"budget {text!r}: {error.message}") from None
    return budgets


def expert_split(text: str) -> ExpertSplit:
    """Returns how experts are split. Raises ConfigError."""
    for split in EXPERT_SPLITS:
        if text == split:
            return split
    raise ConfigError(f"experts {text!r} is none of {', '.join(EXPERT_SPLITS)}", param="experts")


class EncodeConfig(ModelProcessConfig, frozen=True, kw_only=True):
    """A worker that encodes images alone; all workers have these fields."""

    dtype: str = "auto"
    device: str = "auto"  # CUDA if a device is present
    load_format: str = "auto"  # the directory's weights, or "dummy": made from its config.json
    num_threads: int = 0  # 0: share the cores of this host
    mode: ModeChoice = "auto"  # fast: resumed responses may differ, unlike hardware shares KV
    data_plane_host: str = "127.0.0.1"  # where decode listens for KV, and encode for pixels
    # of the first rank, the others have the next ones, then come pixels; 0: free ports
    data_plane_port: int = 0
    data_plane_advertised_host: str = ""  # address that prefill workers dial; default: the same
    # KV over TCP is encrypted and authenticated (aead), only authenticated (mac), or neither
    # (none).
    data_plane_security: str = "aead"
    image_cache_bytes: int = 256 * 1024 * 1024  # encoded images of all tenants, in host memory

    @property
    def pixel_port(self) -> int:
        """The port at which pixels arrive; 0: a free one."""
        return self.data_plane_port

    @property
    def is_on_loopback(self) -> bool:
        """Whether neither KV nor its keys leave this host."""
        hosts = (self.data_plane_host, self.data_plane_advertised_host or self.data_plane_host)
        return is_on_loopback(self.nats_url) and all(map(is_loopback, hosts))

    def problems(self) -> Iterator[str]:
        yield from super().problems()
        if self.dtype not in DTYPES:
            yield f"dtype {self.dtype!r} is none of {', '.join(DTYPES)}"
        if not is_device_name(self.device):
            yield f"device {self.device!r} is not {DEVICES}"
        if self.load_format not in LOAD_FORMATS:
            yield f"load_format {self.load_format!r} is none of {', '.join(LOAD_FORMATS)}"
        if self.mode not in MODES:
            yield f"mode {self.mode!r} is none of {', '.join(MODES)}"
        if self.data_plane_security not in DATA_PLANE_SECURITIES:
            yield (
                f"data_plane_security {self.data_plane_security!r} is none of "
                f"{', '.join(DATA_PLANE_SECURITIES)}"
            )
        elif self.data_plane_security != "none" and not _hides_keys(self.nats_url):
            yield (
                "nats_url must be tls:// off this host, because NATS carries the keys of the KV "
                "data plane; or data_plane_security must be none"
            )
        if not 0 <= self.data_plane_port < 65536:
            yield f"data_plane_port {self.data_plane_port} is not in [0, 65536)"
        if self.num_threads < 0:
            yield f"num_threads {self.num_threads} is negative"


class WorkerConfig(EncodeConfig, frozen=True, kw_only=True):
    """A prefill worker, a decode worker, or both over one engine."""

    announce: str = ""  # subset of the roles that it handles: prefill, decode or both; empty: all
    kv_dtype: KvDtype = "auto"  # dtype of stored KV: fp8 holds twice the tokens of bf16
    weights: str = "auto"  # dense, or compressed in memory: bit-identical, fewer bytes
    tp: int = 1  # ranks that share each layer: 1, 2, 4 or 8
    pp: int = 1  # pipeline stages
    experts: ExpertSplit = "auto"  # ep: ranks hold whole experts; tp: columns of all of them
    device_process: bool = False  # a rank process also for a worker of one rank
    remote_ranks: int = 0  # the last ranks of tp x pp, which `hearth rank` runs on other hosts
    rank_host: str = "127.0.0.1"  # where those join; this host's ranks advertise it
    is_trusted_network: bool = False  # ranks of several hosts exchange without encryption
    executor: ExecutorChoice = "auto"  # CUDA graphs of decode steps; plain: without them
    attention: AttentionChoice = "auto"  # of prompts on CUDA; auto: triton
    expert_kernels: ExpertKernels = "auto"  # of many rows on CUDA; auto: triton
    activations: Activations = "plain"  # bf16-exchange: ranks send sums of lanes in BF16
    block_size: int | None = None  # tokens; None: 16 on the CPU, 64 on CUDA
    kv_cache_bytes: int | None = None  # None: 256 MiB on the CPU, 0.9 of the free memory on CUDA
    kv_floor_bytes: int | None = None  # it never has less while it serves; None: what it needs
    kv_ceiling_bytes: int | None = None  # nor more; None: kv_cache_bytes
    is_parked: bool = False  # starts in standby, without a KV cache
    gpu_memory: str = ""  # most of the device that it takes in all, a size or a share; empty: any
    parked_weights: ParkedWeights = "host"  # where they are in standby, on CUDA
    max_context_tokens: int | None = None  # limit of a sequence; None: the model's
    max_batch_tokens: int | None = None  # None: 512 on the CPU, 2048 or (prefill) 8192 on CUDA
    max_sequences: int = 256
    max_reserved_share: float = 0.5
    zero_freed_blocks: bool = False
    max_pinned_share: float = 0.25  # share of the cache for pinned prefixes
    kv_compression: str = (
        "auto"  # auto: compresses BF16 KV to other hosts if it is faster; or "off"
    )
    # nixl: where both ends have it, over TCP links without security, as it does not encrypt
    kv_transport: str = "own"
    # the name of this worker's site, to which other sites may push KV; empty: none may
    site: str = ""

    @property
    def pixel_port(self) -> int:
        """The port at which pixels arrive; 0: a free one."""
        return self.data_plane_port and self.data_plane_port + self.tp * self.pp

    @property
    def has_ranks(self) -> bool:
        """Whether other processes than the worker's own compute."""
        return self.device_process or self.tp * self.pp > 1

    @property
    def may_be_parked(self) -> bool:
        """Whether this worker shares its device's memory with others."""
        return self.is_parked or (self.kv_floor_bytes or self.kv_ceiling_bytes) is not None

    def problems(self) -> Iterator[str]:
        yield from super().problems()
        yield from positive_problems(
            *(self, "block_size", "kv_cache_bytes", "kv_floor_bytes", "kv_ceiling_bytes"),
            *("max_context_tokens", "max_batch_tokens", "max_sequences"),
        )
        yield from self._kv_size_problems()
        yield from gpu_memory_problems(self.gpu_memory, self.device)
        if self.announce not in ("", *WORKER_ROLES):
            yield f"announce {self.announce!r} is none of {', '.join(WORKER_ROLES)}"
        if self.kv_dtype not in KV_DTYPES:
            yield f"kv_dtype {self.kv_dtype!r} is none of {', '.join(KV_DTYPES)}"
        if self.weights not in WEIGHT_FORMS:
            yield f"weights {self.weights!r} is none of {', '.join(WEIGHT_FORMS)}"
        if self.executor not in EXECUTORS:
            yield f"executor {self.executor!r} is none of {', '.join(EXECUTORS)}"
        if self.parked_weights not in PARKED_WEIGHTS:
            yield f"parked_weights {self.parked_weights!r} is none of {', '.join(PARKED_WEIGHTS)}"
        if self.attention not in ATTENTIONS:
            yield f"attention {self.attention!r} is none of {', '.join(ATTENTIONS)}"
        if self.expert_kernels not in EXPERT_KERNELS:
            allowed = ", ".join(EXPERT_KERNELS)
            yield f"expert_kernels {self.expert_kernels!r} is none of {allowed}"
        if self.experts not in EXPERT_SPLITS:
            yield f"experts {self.experts!r} is none of {', '.join(EXPERT_SPLITS)}"
        if self.activations not in ACTIVATIONS:
            yield f"activations {self.activations!r} is none of {', '.join(ACTIVATIONS)}"
        if self.kv_compression not in KV_COMPRESSIONS:
            yield f"kv_compression {self.kv_compression!r} is none of {', '.join(KV_COMPRESSIONS)}"
        if self.kv_transport not in KV_TRANSPORTS:
            yield f"kv_transport {self.kv_transport!r} is none of {', '.join(KV_TRANSPORTS)}"
        elif self.kv_transport == "nixl" and self.data_plane_security != "none":
            yield (
                "kv_transport nixl does not encrypt: it needs data_plane_security none, for a "
                f"network that is trusted, not {self.data_plane_security}"
            )
        if self.tp not in TP_SIZES:
            yield f"tp {self.tp} is none of 1, 2, 4, 8"
        if self.pp < 1:
            yield f"pp {self.pp} must be at least 1"
        if not 0 <= self.remote_ranks < max(1, self.tp * self.pp):
            ranks = f"tp x pp, {self.tp * self.pp} ranks"
            yield f"remote_ranks {self.remote_ranks} is not in [0, {ranks})"
        elif self.remote_ranks and not self.is_trusted_network:
            yield from _rank_network_problems(self.nats_url, self.rank_host)
        yield from _site_problems(self.site)
        if not 0 < self.max_reserved_share <= 1:
            yield f"max_reserved_share {self.max_reserved_share} is not in (0, 1]"
        if not 0 <= self.max_pinned_share <= 1:
            yield f"max_pinned_share {self.max_pinned_share} is not in [0, 1]"

    def _kv_size_problems(self) -> Iterator[str]:
        names = ("kv_floor_bytes", "kv_cache_bytes", "kv_ceiling_bytes")
        given = [(name, size) for name in names if (size := getattr(self, name)) is not None]
        for (name, size), (next_name, next_size) in pairwise(given):
            if size > next_size:
                yield f"{name} {size} is more than {next_name} {next_size}"

    def with_defaults_of(self, device: str, *, is_prefill_only: bool) -> WorkerConfig:
        """Replaces None by the defaults of `device`, which is "cpu", "cuda" or "cuda:N".

        On CUDA `kv_cache_bytes` stays None: the executor measures the free memory.
        """
        kv_cache_bytes, max_batch_tokens = self.kv_cache_bytes, self.max_batch_tokens
        if device == "cpu" and kv_cache_bytes is None:
            ceiling = self.kv_ceiling_bytes or CPU_KV_CACHE_BYTES
            kv_cache_bytes = max(min(CPU_KV_CACHE_BYTES, ceiling), self.kv_floor_bytes or 0)
        if max_batch_tokens is None:
            max_batch_tokens = default_batch_tokens(device, is_prefill_only=is_prefill_only)
        return msgspec.structs.replace(
            self,
            device=device,
            block_size=default_block_size(device) if self.block_size is None else self.block_size,
            kv_cache_bytes=kv_cache_bytes,
            max_batch_tokens=max_batch_tokens,
        )


def default_batch_tokens(device: str, *, is_prefill_only: bool = False) -> int:
    """Returns the tokens of a step at most on `device`: "cpu", "cuda" or "cuda:N"."""
    on_cuda = CUDA_PREFILL_BATCH_TOKENS if is_prefill_only else CUDA_BATCH_TOKENS
    return CPU_BATCH_TOKENS if device == "cpu" else on_cuda


def default_block_size(device: str) -> int:
    """Returns the tokens of a block on `device`: "cpu", "cuda" or "cuda:N".

    A block of 64 fills the tiles of attention on GPUs, and tables are a quarter as long.
    """
    return 16 if device == "cpu" else 64


class RankConfig(ModelProcessConfig, frozen=True, kw_only=True):
    """Ranks of a worker on another host. The NATS credential is the worker's."""

    worker: str = ""  # process id of the worker; empty: the only one of the credential
    ranks: int = 1
    num_threads: int = 0  # 0: all cores of this host
    is_trusted_network: bool = False  # must equal that of the worker

    @property
    def leader_id(self) -> str:
        return self.worker or self.process_id.partition(".")[0]

    def problems(self) -> Iterator[str]:
        yield from super().problems()
        yield from positive_problems(self, "ranks")
        if not self.is_trusted_network:
            yield from _rank_network_problems(self.nats_url, "127.0.0.1")
        if self.num_threads < 0:
            yield f"num_threads {self.num_threads} is negative"
        if self.worker and not _PROCESS_ID.fullmatch(self.worker):
            yield f"worker {self.worker!r} must be CREDENTIAL or CREDENTIAL.INSTANCE"


def _rank_network_problems(nats_url: str, rank_host: str) -> Iterator[str]:
    if not _hides_keys(nats_url):
        yield (
            "nats_url must be tls:// off this host, because NATS carries the key of ranks on other "
            "hosts; or give trusted_network"
        )
    if not is_loopback(rank_host):
        yield (
            f"rank_host {rank_host}: ranks of several hosts send activations and KV without "
            "encryption; give trusted_network if every host of that network may read them"
        )


def gpu_memory_problems(gpu_memory: str, device: str) -> Iterator[str]:
    if not gpu_memory:
        return
    try:
        parse_size_or_share(gpu_memory)
    except ConfigError as error:
        yield f"gpu_memory {error.message}"
    if device == "cpu":
        yield f"gpu_memory {gpu_memory} is for CUDA devices, and the device is cpu"


def is_device_name(name: str) -> bool:
    return _DEVICE.fullmatch(name) is not None


def redis_tls_of(config: GatewayConfig | KvIndexConfig | HostConfig) -> TlsFiles:
    return TlsFiles(ca=config.redis_ca, cert=config.redis_cert, key=config.redis_key)


def check(config: ProcessConfig) -> None:
    """Checks all fields. Raises a ConfigError that lists every problem."""
    problems = list(config.problems())
    if problems:
        raise ConfigError("; ".join(problems))


def url_problems(name: str, url: str, *, schemes: tuple[str, ...]) -> Iterator[str]:
    try:
        parts = urlsplit(url)
        scheme, _ = parts.scheme, parts.port
    except ValueError as error:
        yield f"{name}: {error}"
        return
    if scheme not in schemes:
        yield f"{name} must start with {' or '.join(f'{each}://' for each in schemes)}"
    elif scheme.startswith("http") and not parts.hostname:
        yield f"{name} names no host"
    elif scheme.startswith("redis") and not re.fullmatch(r"/?\d*", parts.path):
        yield f"{name}: database {parts.path.removeprefix('/')!r} is not a number"  # redis-py: 0


_SITE = re.compile(r"[A-Za-z0-9_-]+")


def _cold_start_problems(cold_start_s: float) -> Iterator[str]:
    if not 0 <= cold_start_s < inf:
        yield f"cold_start_s {cold_start_s} is not a duration of at least 0"


def _site_problems(site: str) -> Iterator[str]:
    if site and _SITE.fullmatch(site) is None:
        yield f"site {site!r} may have letters, digits, - and _ only"


def weights_of_sites(linked_sites: Iterable[str]) -> dict[str, float]:
    """Returns the weights of `SITE` or `SITE=WEIGHT` by site. Raises ValueError."""
    pairs = (each.partition("=") for each in linked_sites)
    return {site: float(weight) if has_weight else 1.0 for site, has_weight, weight in pairs}


def _linked_problems(linked_sites: tuple[str, ...], site: str) -> Iterator[str]:
    if linked_sites and not site:
        yield "linked_site needs a site, the name of this one"
    for each in linked_sites:
        try:
            ((name, weight),) = weights_of_sites([each]).items()
        except ValueError:
            name, weight = "", 0.0
        if _SITE.fullmatch(name) is None or not 0 < weight <= MAX_WEIGHT:
            yield f"linked_site {each!r} is not SITE or SITE=WEIGHT, of up to {MAX_WEIGHT:g}"
        elif name == site:
            yield f"linked_site {each!r} is this site"


def _network_problems(networks: Iterable[str]) -> Iterator[str]:
    for each in networks:
        try:
            ip_network(each)
        except ValueError as error:
            yield f"kv_networks {each!r} is no network such as 10.2.0.0/16: {error}"


_ORIGIN = re.compile(r"https?://([a-z0-9.-]+|\[[0-9a-f:]+\])(:[1-9][0-9]{0,4})?")


# Scheme, name and port: of these only the name is required.
IMAGE_HOST = re.compile(
    r"(?:(https?)://)?([a-z0-9](?:[a-z0-9.-]{0,251}[a-z0-9])?)(?::([1-9]\d{0,4}))?", re.ASCII
)


def _origin_problems(origins: Iterable[str]) -> Iterator[str]:
    """Returns the problems of an origin, which is compared as text: browsers send it in lower case
    and without a path.
    """
    for each in origins:
        if each != "*" and _ORIGIN.fullmatch(each) is None:
            yield f"cors_origin {each!r} is neither * nor an origin such as https://app.example"


def is_loopback(host: str) -> bool:
    """Whether packets to this host or address do not leave this machine."""
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def is_on_loopback(url: str) -> bool:
    """Whether the URL's host is on loopback; False for a URL without a valid host."""
    try:
        return is_loopback(urlsplit(url).hostname or "")
    except ValueError:
        return False


def _hides_keys(nats_url: str) -> bool:
    """Whether each server of the list is on this host or required to use TLS."""
    urls = nats_url.split(",")
    return all(url.strip().startswith("tls://") or is_on_loopback(url.strip()) for url in urls)


def positive_problems(config: ProcessConfig, *names: str) -> Iterator[str]:
    """Yields a problem for each field that is not positive. It skips None: that default
    is chosen later.
    """
    for name in names:
        value = getattr(config, name)
        if value is not None and value <= 0:
            yield f"{name} must be positive, not {value}"
