"""The files of a checkpoint folder, and those that a bundle contains unchanged."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import xxhash

from shared.engine.codec.manifest import MANIFEST, SUFFIX, StoredFile
from shared.engine.codec.shard import OnBytes
from shared.errors import CheckpointError, ConfigError
from shared.tokenizer.checkpoint_file import open_checkpoint_file

# Folders of the tools that fetched the checkpoint: not part of it.
SKIPPED_FOLDERS = frozenset({".git", ".cache"})
_CHUNK_BYTES = 1 << 22


@dataclass(frozen=True, slots=True)
class ModelFolder:
    """Files of a model's folder: sorted paths relative to `root`, separated by `/`."""

    root: Path
    shards: tuple[str, ...]
    files: tuple[str, ...]

    def num_bytes(self) -> int:
        return sum((self.root / name).stat().st_size for name in (*self.shards, *self.files))


def list_model_folder(root: Path) -> ModelFolder:
    """Lists the files of a checkpoint. Raises ConfigError if it is not a checkpoint, or has a file
    that a bundle cannot contain.
    """
    if not root.is_dir():
        raise ConfigError(f"{root} is not a directory")
    if (root / MANIFEST).exists():
        raise ConfigError(f"{root} is a bundle already: it has a {MANIFEST}")
    found: list[str] = []
    for folder, below, names in os.walk(root, onerror=_raise):
        below[:] = [name for name in below if name not in SKIPPED_FOLDERS]
        for name in below:
            if Path(folder, name).is_symlink():
                raise ConfigError(f"{Path(folder, name)}: a link to a folder is not supported")
        for name in names:
            path = Path(folder, name)
            if not path.is_file():
                raise ConfigError(f"{path}: not a file, or a broken link")
            found.append(path.relative_to(root).as_posix())
    shards = tuple(sorted(name for name in found if name.endswith(SUFFIX)))
    if not shards:
        raise ConfigError(f"{root}: there is no *{SUFFIX} in it")
    return ModelFolder(root, shards, tuple(sorted(set(found) - set(shards))))


def copy_file(source: Path, file: IO[bytes], on_bytes: OnBytes) -> tuple[int, str]:
    """Returns size and xxh3-128 of the copied bytes. Raises OSError."""
    digest, num_bytes = xxhash.xxh3_128(), 0
    with open_checkpoint_file(source) as opened:
        while chunk := opened.read(_CHUNK_BYTES):
            file.write(chunk)
            digest.update(chunk)
            num_bytes += len(chunk)
            on_bytes(len(chunk))
    return num_bytes, digest.hexdigest()


def digest_of(path: Path) -> tuple[int, str]:
    """Returns the size and xxh3-128. Raises OSError."""
    with open_checkpoint_file(path) as file:
        digest = xxhash.xxh3_128()
        while chunk := file.read(_CHUNK_BYTES):
            digest.update(chunk)
        return file.tell(), digest.hexdigest()


def check_file(path: Path, file: StoredFile) -> None:
    """Raises CheckpointError if the file is missing or its content differs."""
    try:
        found = digest_of(path)
    except FileNotFoundError:
        raise CheckpointError(f"{path}: no such file") from None
    if found != (file.num_bytes, file.digest):
        raise CheckpointError(f"{path}: damaged: it differs from the bundled file")


def _raise(error: OSError) -> None:
    raise ConfigError(f"{error.filename}: {error.strerror}")
