"""The files of a checkpoint: one, or shards that an index names. No torch."""

from __future__ import annotations

from pathlib import Path

import msgspec

from shared.engine.codec.manifest import bundle_path
from shared.errors import CheckpointError
from shared.tokenizer.checkpoint_file import MAX_TENSOR_LIST_BYTES, exists, read_checkpoint_file
from shared.transport.wire_errors import UNREADABLE, one_line

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"


class _Index(msgspec.Struct):
    weight_map: dict[str, str]


def read_index(model_dir: Path) -> dict[str, str] | None:
    """Returns tensor -> file; None without an index, or beside a file with all tensors, which has
    priority as in transformers. Raises CheckpointError.
    """
    path = model_dir / INDEX_FILE
    if not exists(path):
        return None
    try:
        data = read_checkpoint_file(path, max_bytes=MAX_TENSOR_LIST_BYTES)
        found = msgspec.json.decode(data, type=_Index).weight_map
    except (OSError, *UNREADABLE) as error:
        if has_single_file(model_dir):
            return None
        raise CheckpointError(f"{path}: {one_line(error)}") from None
    is_older = has_single_file(model_dir) and SINGLE_FILE not in found.values()
    return None if is_older else found


def has_single_file(model_dir: Path) -> bool:
    """Whether the weights are one file, also in a bundle."""
    return any((model_dir / name).exists() for name in (SINGLE_FILE, bundle_path(SINGLE_FILE)))


def file_names(model_dir: Path, index: dict[str, str] | None) -> list[str]:
    """Raises CheckpointError for a name that is no file of the folder."""
    if index is None:
        return [SINGLE_FILE]
    found = set(index.values())
    for file_name in found:
        is_name = Path(file_name).name == file_name and "\0" not in file_name
        if not is_name or not file_name.endswith(".safetensors"):
            raise CheckpointError(f"{model_dir / INDEX_FILE}: {file_name!r} is not a file name")
    return sorted(found)
