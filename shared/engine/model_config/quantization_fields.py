"""What readers of quantization_config share: fields, names of layers, and refusals of one line."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any, TypeVar

import msgspec

from shared.engine.model_config.quantization import PATTERN
from shared.errors import CheckpointError
from shared.tokenizer.checkpoint_folder import SERVED

FIELD = "quantization_config"
SUPPORTED = f"{SERVED}: take one of these, or run `hearth quantize` on a dense one"
_T = TypeVar("_T")
# Layers that servers compute as one, by the name that their configs use -> the parts' names.
_FUSED = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
}


def read_fields(written: dict[str, Any], kind: type[_T]) -> _T:
    """Raises CheckpointError."""
    try:
        return msgspec.convert(written, kind)
    except msgspec.ValidationError as error:
        raise CheckpointError(f"{FIELD}: {error}") from None


def refused(reason: str) -> CheckpointError:
    return CheckpointError(f"{FIELD}: {reason}; {SUPPORTED}")


def check_patterns(names: Iterable[str]) -> None:
    """Raises CheckpointError for what is no regular expression."""
    for name in names:
        if name.startswith(PATTERN):
            try:
                re.compile(name.removeprefix(PATTERN))
            except re.error as error:
                raise CheckpointError(f"{FIELD}: {name!r} is no pattern: {error}") from None


def patterns_of_parts(parts: Iterable[str]) -> tuple[str, ...]:
    """Returns patterns of layers whose names have one of the parts, of full components: "gate" is
    none of "gate_proj". `*` in a part is any component; `re:` and an expression is a pattern.

    Raises CheckpointError for what is no regular expression.
    """
    full = with_fused_parts(parts)
    check_patterns(full)
    return tuple(each if each.startswith(PATTERN) else _part(each) for each in full)


def _part(name: str) -> str:
    written = re.escape(name.removesuffix(".weight").strip("."))
    return rf"{PATTERN}(.*\.)?{written.replace(re.escape('*'), '[^.]*')}(\.|$)"


def with_fused_parts(names: Iterable[str]) -> tuple[str, ...]:
    """Returns the names and, after each one of a fused layer, those of the layers that checkpoints
    have in its place.
    """
    found: dict[str, None] = {}
    for name in names:
        parent, dot, last = name.rpartition(".")
        is_pattern = name.startswith(PATTERN)
        parts = () if is_pattern else _FUSED.get(last, ())
        found |= dict.fromkeys((name, *(f"{parent}{dot}{part}" for part in parts)))
    return tuple(found)
