"""The options of `hearth tenant add` and `limits`: one per field of a tenant."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Annotated, Any, get_type_hints

import typer

from services.cli.options import ALL, UNLIMITED
from services.local.credentials import check_name, check_region
from shared.errors import ConfigError
from shared.tenancy.tenant import LIMITS, MAX_PRIORITY

NO_SITES = "none"
NO_CLASS = "none"
HELP = {
    "requests_per_min": f"Requests per minute: a number, or {UNLIMITED}.",
    "input_tokens_per_min": "Prompt tokens per minute.",
    "output_tokens_per_min": "Generated tokens per minute; max_tokens is reserved at first.",
    "concurrency": "Concurrent requests.",
    "kv_quota_tokens": "Tokens in one worker's cache.",
    "allowed_models": f"Comma-separated names, or {ALL}.",
    "allowed_regions": f"Regions for its requests: comma-separated names, or {ALL}.",
    "region_class": "Class of regions that its data stays in, of hearth nats-config --class, or "
    f"{NO_CLASS}.",
    "sites": "Linked sites that may serve it besides this one: comma-separated names, or "
    f"{NO_SITES} (default: this one alone).",
    "priority": f"Highest priority of its requests, {-MAX_PRIORITY} to {MAX_PRIORITY}.",
    "weight": "Share of a full queue, relative to others of the same priority.",
    "zero_retention": "Retain no data of its requests after their end.",
}
_TYPES: dict[str, Any] = {"priority": int, "weight": float, "zero_retention": bool}


def with_limits(command: Callable[..., None]) -> Callable[..., None]:
    """Adds all these options to a command, which receives the given ones as `changes`."""
    hints = get_type_hints(command, include_extras=True)
    own = [
        each.replace(annotation=hints[each.name], kind=inspect.Parameter.KEYWORD_ONLY)
        for each in inspect.signature(command).parameters.values()
        if each.name != "changes"
    ]

    def wrapped(**options: Any) -> None:
        said = {name: options.pop(name) for name in HELP}
        command(**options, changes=changes_of(said))

    parameters = [*own, *map(_parameter, HELP)]
    wrapped.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    wrapped.__annotations__ = {each.name: each.annotation for each in parameters}
    wrapped.__doc__ = command.__doc__
    wrapped.__name__ = command.__name__
    return wrapped


def changes_of(said: dict[str, Any]) -> dict[str, Any]:
    """Converts options to fields of a TenantRecord. Raises ConfigError."""
    changes: dict[str, Any] = {}
    for name, value in said.items():
        if value is None:
            continue
        if name in LIMITS:
            changes[name] = _number(name, value)
        elif name == "allowed_models":
            changes[name] = _names(value)
        elif name == "allowed_regions":
            changes[name] = _names(value)
            for each in changes[name] or ():
                check_region(each)
        elif name == "region_class":
            changes[name] = "" if value == NO_CLASS else value
            check_name(value, "region class")
        elif name == "sites":
            changes[name] = () if value == NO_SITES else _names(value)
        else:
            changes["is_zero_retention" if name == "zero_retention" else name] = value
    return changes


def _number(name: str, text: str) -> int | None:
    if text == UNLIMITED:
        return None
    if not text.isdecimal():
        option = f"--{name.replace('_', '-')}"
        raise ConfigError(f"{option} {text!r} is neither an integer >= 0 nor {UNLIMITED!r}")
    return int(text)


def _names(text: str) -> tuple[str, ...] | None:
    if text == ALL:
        return None
    return tuple(dict.fromkeys(each.strip() for each in text.split(",") if each.strip()))


def _parameter(name: str) -> inspect.Parameter:
    flag = f"--{name.replace('_', '-')}"
    if name == "zero_retention":
        flag = f"{flag}/--no-zero-retention"
    option = typer.Option(flag, help=HELP[name], show_default=False)
    return inspect.Parameter(
        name,
        inspect.Parameter.KEYWORD_ONLY,
        default=None,
        annotation=Annotated[_TYPES.get(name, str) | None, option],
    )
