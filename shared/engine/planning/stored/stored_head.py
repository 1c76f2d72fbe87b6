"""The output head as the files have it, where these and the config disagree. No torch.

As transformers loads them: a tied model with another head is not tied, and of a tied model either
of the two tensors may be missing. A model without a head gives embeddings.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple

import structlog
from msgspec.structs import replace

from shared.engine.codec.manifest import is_bundle, read_manifest
from shared.engine.model_config.checkpoint_form import model_names
from shared.engine.model_config.model_config import ModelConfig
from shared.engine.planning.headers import HeaderTensor, file_tensors, has_files
from shared.engine.weights.checkpoint_index import SINGLE_FILE, file_names, read_index
from shared.errors import CheckpointError
from shared.tokenizer.checkpoint_file import open_checkpoint_file

log = structlog.get_logger(__name__)

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
_CHUNK_BYTES = 1 << 22


class _Stored(NamedTuple):
    """Stored embedding and head. `is_copy` tells whether the head has the embedding's content."""

    has_embedding: bool
    has_head: bool
    is_copy: Callable[[], bool]


def with_stored_head(config: ModelConfig, model_dir: Path) -> ModelConfig:
    """Returns the config of the model that the folder's tensors make; unchanged if they cannot be
    read, which loading them reports.
    """
    try:
        stored = _stored(config, model_dir)
        if stored is None:
            return config
        if config.has_tied_embeddings:
            return _tied(config, model_dir, stored)
    except (CheckpointError, OSError):
        return config
    if stored.has_head or not stored.has_embedding:
        return config
    log.warning("no_output_head", path=str(model_dir), served="embeddings only")
    return replace(config, has_tied_embeddings=True, has_head=False)


def _tied(config: ModelConfig, model_dir: Path, stored: _Stored) -> ModelConfig:
    if not stored.has_head:
        return config
    if not stored.has_embedding:
        form = config.checkpoint
        renames = (*form.renames, (rf"^{HEAD}$", EMBEDDING))
        return replace(config, checkpoint=replace(form, renames=renames))
    if stored.is_copy():
        return config
    log.warning(
        "output_head_not_tied",
        path=str(model_dir),
        reason=f"{HEAD} differs from {EMBEDDING}, although the config ties them",
    )
    return replace(config, has_tied_embeddings=False)


def _stored(config: ModelConfig, model_dir: Path) -> _Stored | None:
    """Returns None for a folder without weights."""
    if is_bundle(model_dir):
        shards = read_manifest(model_dir).shards
        coded = {each.name: each for shard in shards for each in shard.tensors}
        places = _places(config, coded)
        contents = [
            (each.dtype, each.shape, each.digest)
            for each in (coded[name] for name in places.values())
        ]
        return _Stored(EMBEDDING in places, HEAD in places, lambda: contents[0] == contents[-1])
    if not has_files(model_dir):
        return None
    index = read_index(model_dir)
    file_names(model_dir, index)  # raises CheckpointError for a name outside of the folder
    if index is None:
        found = {each.name: each for each in file_tensors(model_dir / SINGLE_FILE)}
    else:
        files = {index[name] for name in _places(config, index).values()}
        found = {each.name: each for name in files for each in file_tensors(model_dir / name)}
    places = _places(config, found)
    pair = [found[name] for name in places.values()]
    return _Stored(EMBEDDING in places, HEAD in places, lambda: _are_equal(pair[0], pair[-1]))


def _places(config: ModelConfig, names: Iterable[str]) -> dict[str, str]:
    """Returns the checkpoint's names of the two tensors."""
    found = model_names(names, config.checkpoint)
    return {name: given for given, name in found if name in (EMBEDDING, HEAD)}


def _are_equal(one: HeaderTensor, other: HeaderTensor) -> bool:
    """Raises OSError."""
    if (one.dtype, one.shape) != (other.dtype, other.shape):
        return False
    with open_checkpoint_file(one.path) as first, open_checkpoint_file(other.path) as second:
        first.seek(one.start)
        second.seek(other.start)
        for at in range(0, one.num_bytes, _CHUNK_BYTES):
            size = min(_CHUNK_BYTES, one.num_bytes - at)
            if first.read(size) != second.read(size):
                return False
    return True
