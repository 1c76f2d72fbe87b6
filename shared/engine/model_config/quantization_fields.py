"""What readers of quantization_config share: fields, names of layers, and refusals of one line."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any, TypeVar

import msgspec

from shared.errors import CheckpointError
from shared.tokenizer.checkpoint_folder import SERVED

FIELD = "quantization_config"
SUPPORTED = f"{SERVED}: take one of these, or run `hearth quantize` on a dense one"
_T = TypeVar("_T")


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
        if name.startswith("re:"):
            try:
                re.compile(name.removeprefix("re:"))
            except re.error as error:
                raise CheckpointError(f"{FIELD}: {name!r} is no pattern: {error}") from None


def patterns_of_parts(parts: Iterable[str]) -> tuple[str, ...]:
    """Returns patterns of layers whose names have one of the parts, of full components: "gate" is
    none of "gate_proj".
    """
    return tuple(rf"re:(.*\.)?{re.escape(each.strip('.'))}(\.|$)" for each in parts)
