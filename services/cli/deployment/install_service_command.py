"""`hearth install-service`: a process under systemd."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from services.cli.options import OPERATE
from shared.errors import ConfigError

app = typer.Typer()
HOMES = ("/home", "/root", "/run/user")


@app.command(
    "install-service",
    rich_help_panel=OPERATE,
    epilog="Example:  hearth install-service decode decode-1 --nats 10.0.0.1:4222",
)
def install_service(
    role: Annotated[
        str,
        typer.Argument(
            help="gateway, scheduler, kv_index, encode, prefill, decode, worker, host or rank."
        ),
    ],
    name: Annotated[
        str | None,
        typer.Argument(help="The process's credential, and its unit's instance (default: ROLE)."),
    ] = None,
    nats: Annotated[
        str, typer.Option(metavar="HOST:PORT", help="Address of NATS.")
    ] = "127.0.0.1:4222",
    secrets: Annotated[
        Path, typer.Option(metavar="DIRECTORY", help="Made by hearth credential --folder.")
    ] = Path("/etc/hearth/secrets"),
    tls: Annotated[
        Path | None,
        typer.Option(
            metavar="DIRECTORY", help="NATS has TLS: ca.crt, NAME.crt and NAME.key are there."
        ),
    ] = None,
    has_gpu: Annotated[bool, typer.Option("--gpu", help="Let it use the GPUs of NVIDIA.")] = False,
    root: Annotated[
        Path, typer.Option(metavar="DIRECTORY", help="Write below it, as for an image.")
    ] = Path("/"),
    executable: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="The hearth command of the unit (default: this one)."),
    ] = None,
) -> None:
    """Write the systemd unit of a process: hearth@NAME.

    Files: the unit of all processes and hearth.target, a drop-in with the command and credentials
    of NAME, and /etc/hearth/NAME.env for its options, which is kept if it exists.
    """
    from services.cli.deployment.service_files import (
        OPTIONS,
        ServiceProcess,
        ServiceRole,
        service_files,
    )
    from services.local.credentials import check_name, role_of

    command = executable or Path(sys.executable).with_name("hearth")
    if role == "rank" and name is None:
        raise ConfigError(
            "ranks need the credential of their worker: hearth install-service rank NAME"
        )
    found: ServiceRole = "rank" if role == "rank" else role_of(role)
    own_name = name or found.replace("_", "-")
    check_name(own_name)
    process = ServiceProcess(found, own_name, nats, secrets, tls, command, has_gpu)
    for path, text in service_files(process).items():
        _write(root / path, text, is_kept=path.is_relative_to(OPTIONS))
    if str(command).startswith(HOMES):
        print(
            f"note: services cannot read {command}: install Hearth in /opt/hearth", file=sys.stderr
        )
    print(f"systemctl daemon-reload && systemctl enable --now hearth.target hearth@{process.name}")


def _write(path: Path, text: str, *, is_kept: bool) -> None:
    """Raises ConfigError."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if not (is_kept and path.exists()):
            path.write_text(text)
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from None
    print(path, file=sys.stderr)
