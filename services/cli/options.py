"""Shared parts of options: panels of the help, words of values, sizes, files that they name."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from shared.errors import ConfigError
from shared.sizes import parse_size, shortest_size

START, OPERATE = "Start and use", "Operate"  # panels of the help
UNLIMITED, ALL = "unlimited", "all"
MAX_BYTES = 4 << 20

GatewayUrl = Annotated[
    str | None, typer.Option(envvar="HEARTH_URL", help="Gateway URL (default: the local cluster).")
]
ApiKey = Annotated[
    str | None, typer.Option(envvar="HEARTH_API_KEY", help="Key (default: local cluster's).")
]
OperatorNatsUrl = Annotated[
    str | None,
    typer.Option(
        envvar="HEARTH_NATS_URL",
        help="NATS URL with an operator's credential (default: local cluster).",
    ),
]


def among(*values: str) -> Callable[[str], list[str]]:
    """Returns a completion of these values."""
    return lambda incomplete: [each for each in values if each.startswith(incomplete)]


def size_option(*, default: int | None = None, **settings: Any) -> Any:
    """Returns the option of a size in bytes, which may have a unit. `default` is shown in short."""
    shown = shortest_size(default) if default else False
    return typer.Option(parser=_size, metavar="SIZE", show_default=shown, **settings)


def _size(given: str | int) -> int:
    try:
        return parse_size(str(given))
    except ConfigError as error:
        raise typer.BadParameter(error.message) from None


def read_given_file(path: Path, *, what: str, max_bytes: int = MAX_BYTES) -> bytes:
    """Reads a file that an operator names, up to `max_bytes`. It may be a pipe; `-` is standard
    input.

    `what` begins the error messages, such as the option's name. Raises ConfigError.
    """
    try:
        if str(path) == "-":
            data = sys.stdin.buffer.read(max_bytes + 1)
        else:
            with path.open("rb") as file:
                data = file.read(max_bytes + 1)
    except OSError as error:
        raise ConfigError(f"{what} {path}: {error.strerror}") from None
    if len(data) > max_bytes:
        raise ConfigError(f"{what} {path} has more than {max_bytes} bytes")
    return data
