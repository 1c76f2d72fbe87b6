"""The models of `hearth up --model A --model B`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec

from services.local.hub_download import is_hub_id
from shared.errors import ConfigError
from shared.tokenizer.checkpoint_folder import check_folder


class NamedModel(msgspec.Struct, frozen=True):
    """A model to serve. `source` is a directory, or a hub id."""

    name: str
    source: str


def named_models(texts: Sequence[str]) -> tuple[NamedModel, ...]:
    """Parses `DIR`, `org/name` or `NAME=DIR`. Raises ConfigError, and CheckpointError for a
    source that is no directory.
    """
    found = tuple(map(_named, texts))
    for each in found:
        source = Path(each.source)
        if not (source.is_dir() or is_hub_id(source)):
            check_folder(source, needs_weights=True)
        same = [other.source for other in found if other.name == each.name]
        if len(same) > 1:
            raise ConfigError(
                f"--model {same[0]} and {same[1]} have the name {each.name!r}: "
                "give one another, as NAME=DIR"
            )
    return found


def _named(text: str) -> NamedModel:
    name, separator, source = text.partition("=")
    if separator and "/" not in name:
        if not (name and source):
            raise ConfigError(f"--model {text!r} is not NAME=DIR")
        return NamedModel(name, _absolute(source))
    return NamedModel(text if is_hub_id(Path(text)) else Path(text).resolve().name, _absolute(text))


def _absolute(source: str) -> str:
    path = Path(source).expanduser()
    return source if is_hub_id(path) else str(path.resolve())
