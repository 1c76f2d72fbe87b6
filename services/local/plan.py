"""Which processes a local cluster has, and what each is told. Pure."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path

import msgspec

import services
from services.local.child_processes import ProcessSpec
from services.local.credentials import Credential, random_process_id
from services.local.servers import LOOPBACK
from shared.config import WEIGHT_FORMS
from shared.errors import ConfigError
from shared.subjects import CredentialRole

_ROOT = Path(services.__file__).resolve().parent.parent
_COMMANDS: dict[CredentialRole, str] = {
    "gateway": "gateway",
    "scheduler": "scheduler",
    "kv_index": "kv-index",
    "prefill": "prefill",
    "decode": "decode",
    "worker": "worker",
}
DRAIN_TIMEOUT_S = 10.0  # a service's, and less than the grace before SIGKILL
_WORKER_ROLES = ("prefill", "decode", "worker")


class UpOptions(msgspec.Struct, frozen=True, kw_only=True):
    model_dir: Path
    model_name: str = ""  # empty: the directory's
    num_prefill: int = 1
    num_decode: int = 1
    num_both: int = 0
    http_host: str = LOOPBACK
    http_port: int | None = None  # None: 8000, or a free one where it is taken
    nats_url: str | None = None
    redis_url: str | None = None
    advertise_host: str = LOOPBACK  # NATS and the KV data plane listen here
    dtype: str = "auto"
    device: str = "cpu"
    weights: str = "auto"
    tenant_id: str = "default"


class Endpoints(msgspec.Struct, frozen=True, kw_only=True):
    """Where the cluster's servers are; `nats_url` is set if it is an external one."""

    nats_host: str
    nats_port: int
    redis_url: str
    http_host: str
    http_port: int
    nats_url: str | None = None

    @property
    def http_url(self) -> str:
        """Where a client on this machine finds the gateway."""
        host = LOOPBACK if self.http_host in ("0.0.0.0", "::", "") else self.http_host
        return f"http://{host}:{self.http_port}"

    def nats_url_of(self, credential: Credential) -> str:
        return self.nats_url or credential.nats_url(self.nats_host, self.nats_port)


def check_options(options: UpOptions) -> None:
    """Raises ConfigError that names every problem."""
    counts = {
        "prefill": options.num_prefill,
        "decode": options.num_decode,
        "both": options.num_both,
    }
    problems = [f"--{name} {count} is negative" for name, count in counts.items() if count < 0]
    if not problems and options.num_decode + options.num_both == 0:
        problems.append("no decode worker: nothing could answer")
    if not options.model_dir.is_dir():
        problems.append(f"--model {options.model_dir} is not a directory")
    if options.weights not in WEIGHT_FORMS:
        problems.append(f"--weights {options.weights!r} is none of {', '.join(WEIGHT_FORMS)}")
    if problems:
        raise ConfigError("; ".join(problems))


def plan_credentials(options: UpOptions) -> tuple[Credential, ...]:
    """One a process. On an external NATS other clusters may live, so names are random there."""
    counts: tuple[tuple[CredentialRole, int], ...] = (
        ("kv_index", 1),
        ("scheduler", 1),
        ("prefill", options.num_prefill),
        ("decode", options.num_decode),
        ("worker", options.num_both),
        ("gateway", 1),
    )
    return tuple(
        Credential(
            role, f"{role}-{number}" if options.nats_url is None else random_process_id(role)
        )
        for role, count in counts
        for number in range(1, count + 1)
    )


def expected_workers(credentials: tuple[Credential, ...]) -> dict[str, set[str]]:
    """The ids that the gateway must know, by role, before the cluster is ready."""
    return {
        role: {each.process_id for each in credentials if each.role in (role, "worker")}
        for role in ("prefill", "decode")
    }


def plan_services(
    options: UpOptions,
    credentials: tuple[Credential, ...],
    endpoints: Endpoints,
    *,
    num_cores: int,
    environ: Mapping[str, str],
) -> list[ProcessSpec]:
    num_workers = sum(each.role in _WORKER_ROLES for each in credentials)
    num_threads = max(1, num_cores // num_workers)
    return [
        _service(each, options, endpoints, num_threads=num_threads, environ=environ)
        for each in credentials
    ]


def _service(
    credential: Credential,
    options: UpOptions,
    endpoints: Endpoints,
    *,
    num_threads: int,
    environ: Mapping[str, str],
) -> ProcessSpec:
    is_worker = credential.role in _WORKER_ROLES
    arguments = ["--process-id", credential.process_id]
    arguments += ["--drain-timeout-s", f"{DRAIN_TIMEOUT_S:g}"]
    if is_worker or credential.role == "gateway":
        arguments += ["--model-dir", str(options.model_dir.resolve())]
        arguments += ["--model-name", options.model_name]
    if is_worker:
        arguments += ["--dtype", options.dtype, "--device", options.device]
        arguments += ["--weights", options.weights]
        arguments += ["--num-threads", str(num_threads)]
        arguments += ["--data-plane-host", options.advertise_host]
    if credential.role == "gateway":
        arguments += ["--http-host", endpoints.http_host, "--http-port", str(endpoints.http_port)]
    return ProcessSpec(
        process_id=credential.process_id,
        argv=(sys.executable, "-m", "services", _COMMANDS[credential.role], *arguments),
        environ={
            **environ,
            **thread_environ(num_threads if is_worker else 1),
            "PYTHONPATH": python_path(environ),
            "HEARTH_NATS_URL": endpoints.nats_url_of(credential),
            "HEARTH_REDIS_URL": endpoints.redis_url,
        },
        start_order={"kv_index": 1, "scheduler": 1, "gateway": 3}.get(credential.role, 2),
    )


def thread_environ(num_threads: int) -> dict[str, str]:
    """Few cores, several processes: no more math threads than cores, and none of them spins."""
    return {
        "OMP_NUM_THREADS": str(num_threads),
        "MKL_NUM_THREADS": str(num_threads),
        "OMP_WAIT_POLICY": "PASSIVE",
        "KMP_BLOCKTIME": "0",
        "TOKENIZERS_PARALLELISM": "false",
    }


def python_path(environ: Mapping[str, str]) -> str:
    """Finds this very copy of the packages, installed or not."""
    inherited = environ.get("PYTHONPATH")
    return str(_ROOT) if not inherited else f"{_ROOT}:{inherited}"
