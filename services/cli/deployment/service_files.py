"""The files of one process under systemd: the unit of all, its drop-in, its options.

systemd reads the secrets as root and gives the process copies, in a folder that no other user or
process sees (`LoadCredential=`; `%d` is that folder).
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Literal, NamedTuple
from urllib.parse import urlsplit

from services.cli.deployment.secret_folder import FILES_OF_ROLE, HUB_TOKEN
from shared.errors import ConfigError
from shared.subjects import CredentialRole

SHIPPED = Path(__file__).parents[2] / "deploy" / "systemd"
UNITS = Path("etc/systemd/system")
OPTIONS = Path("etc/hearth")
SHIPPED_COMMAND = "/opt/hearth/.venv/bin/hearth"
# `rank`: ranks of a worker that is on another host, with the worker's credential
ServiceRole = CredentialRole | Literal["rank"]
COMMANDS: dict[ServiceRole, str] = {
    "gateway": "gateway",
    "scheduler": "scheduler",
    "kv_index": "kv-index",
    "encode": "encode",
    "prefill": "prefill",
    "decode": "decode",
    "worker": "worker",
    "host": "host",
    "rank": "rank",
}
TLS_FILES = {"nats-ca": "ca.crt", "nats-cert": "{name}.crt", "nats-key": "{name}.key"}
WITH_DEVICES = ("encode", "prefill", "decode", "worker", "host")
GPU = ("PrivateDevices=no", "DevicePolicy=closed", "DeviceAllow=char-nvidia* rw")
_NOT_IN_UNITS = re.compile(r"[\s%]")  # parts of a line, specifiers
WORKERS_OF_A_HOST = "worker"  # the credential that all workers of a host share


class ServiceProcess(NamedTuple):
    """A process. `nats` is the address of the server, `secrets` and `tls` are folders; without
    `tls` the server has none.
    """

    role: ServiceRole
    name: str
    nats: str
    secrets: Path
    tls: Path | None
    executable: Path
    has_gpu: bool = False


def service_files(process: ServiceProcess) -> dict[Path, str]:
    """Returns texts by path below the root. Raises ConfigError."""
    if process.role not in COMMANDS:
        raise ConfigError(f"role {process.role!r} is no service: one of {', '.join(COMMANDS)}")
    if process.has_gpu and process.role not in WITH_DEVICES:
        raise ConfigError(f"role {process.role!r} uses no GPU: one of {', '.join(WITH_DEVICES)}")
    _check_paths(process)
    unit = (SHIPPED / "hearth@.service").read_text()
    command = COMMANDS[process.role]
    options = f"# A line for each option, as a variable of `hearth {command} --help`.\n"
    return {
        UNITS / "hearth@.service": unit.replace(SHIPPED_COMMAND, str(process.executable)),
        UNITS / "hearth.target": (SHIPPED / "hearth.target").read_text(),
        UNITS / f"hearth@{process.name}.service.d" / "process.conf": _drop_in(process),
        OPTIONS / f"{process.name}.env": options,
    }


def _check_paths(process: ServiceProcess) -> None:
    """Raises ConfigError for a path that systemd would not read as it is."""
    paths = {"secrets": process.secrets, "tls": process.tls, "executable": process.executable}
    for name, path in paths.items():
        if path is not None and (not path.is_absolute() or _NOT_IN_UNITS.search(str(path))):
            raise ConfigError(f"{name} {str(path)!r} is not an absolute path without spaces and %")


def _drop_in(process: ServiceProcess) -> str:
    """Names the executable, too: the unit is of all processes, which an upgrade replaces one by
    one.
    """
    lines = [f"# {_installed_by(process)}", "[Service]"]
    lines += [f"Environment=HEARTH_COMMAND={COMMANDS[process.role]}"]
    lines += ["ExecStart=", f"ExecStart={process.executable} $HEARTH_COMMAND"]
    lines += _nats(process, "HEARTH_NATS_URL", process.name)
    if process.role == "host":
        lines += _nats(process, "HEARTH_WORKER_NATS_URL", WORKERS_OF_A_HOST)
    files = {HUB_TOKEN: HUB_TOKEN} if process.role == "rank" else FILES_OF_ROLE[process.role]
    for option, file in files.items():
        variable = f"HEARTH_{option.upper().replace('-', '_')}_FILE"
        if option == HUB_TOKEN:
            variable = "HF_TOKEN_PATH"
        lines += _credential(option, process.secrets / file, variable)
    if process.tls is not None:
        for option, file in TLS_FILES.items():
            variable = f"HEARTH_{option.upper().replace('-', '_')}"
            lines += _credential(option, process.tls / file.format(name=process.name), variable)
    lines += GPU if process.has_gpu else ()
    return "\n".join(lines) + "\n"


def _installed_by(process: ServiceProcess) -> str:
    """Returns the command that writes the same files again, by any release."""
    words = ["hearth", "install-service", process.role, process.name, "--nats", process.nats]
    words += ["--secrets", str(process.secrets)]
    words += [] if process.tls is None else ["--tls", str(process.tls)]
    words += ["--gpu"] if process.has_gpu else []
    return shlex.join(words)


def _nats(process: ServiceProcess, variable: str, name: str) -> Iterator[str]:
    """Yields the URL of NATS with the seed of a credential. Raises ConfigError."""
    scheme = "nats" if process.tls is None else "tls"
    if not _is_address(process.nats):
        raise ConfigError(f"nats {process.nats!r} is not HOST or HOST:PORT")
    address = process.nats.replace("%", "%%")
    yield f"LoadCredential={name}.nk:{process.secrets / f'{name}.nk'}"
    yield f"Environment={variable}={scheme}://{name}@{address}?seed=%d/{name}.nk"


def _is_address(text: str) -> bool:
    try:
        parts = urlsplit(f"nats://{text}")
        is_bare = parts.netloc == text and "@" not in text and parts.port != 0
    except ValueError:  # no IPv6 address, no port
        return False
    return is_bare and bool(parts.hostname) and len(text.split()) == 1


def _credential(option: str, file: Path, variable: str) -> Iterator[str]:
    yield f"LoadCredential={option}:{file}"
    yield f"Environment={variable}=%d/{option}"
