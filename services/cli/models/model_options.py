"""Reads the options of `hearth model`: settings of a model, and its source, which it checks."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from services.cli.cluster.service_options import demo_folder
from services.cli.model_check import check_source
from services.cli.options import ALL, UNLIMITED
from services.local.hub_download import is_hub_id
from shared.errors import ConfigError

_PATH_STARTS = (".", "/", "~")


def settings_of(
    tenants: Sequence[str] | None,
    max_context: str | None,
    *,
    weights: str | None,
    kv_dtype: str | None,
    standby: int | None,
    priority: int | None,
) -> dict[str, Any]:
    """Returns the options that were given, as fields of a RegisteredModel. Raises ConfigError."""
    given: dict[str, Any] = {}
    if tenants:
        given["tenants"] = _tenants(tenants)
    if max_context is not None:
        given["max_context_tokens"] = _tokens(max_context)
    others = {
        "weights": weights,
        "kv_dtype": kv_dtype,
        "num_standby": standby,
        "priority": priority,
    }
    return given | {name: value for name, value in others.items() if value is not None}


def checked_source(text: str) -> tuple[str, str]:
    """Returns the source as the model registry stores it, paths absolute, and a note if
    hosts may lack it.

    Raises ConfigError, and CheckpointError for a path that this machine has, but not as a
    checkpoint that can be served.
    """
    path = demo_folder(Path(text)) or Path(text).expanduser()
    if not text or not text.isprintable():
        raise ConfigError(f"invalid source {text[:64]!r}: expected a directory or a hub id")
    is_path = text.startswith(_PATH_STARTS) or path.exists()
    if is_hub_id(path) and not is_path:
        return text, ""
    absolute = str(path.resolve())
    if not path.exists():
        return absolute, f"{absolute} does not exist on this machine: hosts must have it"
    check_source(path.resolve())
    return absolute, ""


def _tenants(names: Sequence[str]) -> tuple[str, ...] | None:
    if ALL not in names:
        return tuple(dict.fromkeys(names))
    if len(set(names)) > 1:
        raise ConfigError(f"--tenant {ALL} allows every tenant: give it alone")
    return None


def _tokens(text: str) -> int | None:
    if text == UNLIMITED:
        return None
    if not text.isdecimal() or int(text) == 0:
        raise ConfigError(f"--max-context {text!r} is neither an integer >= 1 nor {UNLIMITED!r}")
    return int(text)
