"""Restores the checkpoint folder of a bundle, byte by byte."""

from __future__ import annotations

from functools import partial
from itertools import chain
from pathlib import Path

from shared.engine.codec.compress import ByteProgress
from shared.engine.codec.manifest import (
    Manifest,
    StoredFile,
    StoredShard,
    bundle_path,
    read_manifest,
)
from shared.engine.codec.model_folder import check_file, copy_file
from shared.engine.codec.safetensors_layout import LENGTH, map_safetensors
from shared.engine.codec.shard import BundleShard, checksum, original_parts
from shared.engine.codec.threads import coding_threads
from shared.engine.codec.work_folder import WorkFolder, work_folder
from shared.errors import CheckpointError


def decompress_folder(
    bundle: Path, target: Path, progress: ByteProgress, *, num_threads: int | None = None
) -> None:
    """Writes `target`, the folder that was bundled; resumes the work of a killed process.

    Raises ConfigError and CheckpointError with one line that names the file or the tensor; `target`
    then does not exist.
    """
    manifest = read_manifest(bundle)
    with work_folder(target, bundle) as work, coding_threads(num_threads) as executor:
        progress.expect(_num_bytes(manifest))
        shards = [
            BundleShard(bundle / bundle_path(record.path), record, executor)
            for record in manifest.shards
        ]
        for file in manifest.files:
            check_file(bundle / file.path, file)
        names = [shard.record.path for shard in shards], [file.path for file in manifest.files]
        work.retain_only(chain(*names))
        for shard in shards:
            _restore(shard, work, progress)
        for file in manifest.files:
            _copy(bundle, file, work, progress)
        work.publish()


def _restore(shard: BundleShard, work: WorkFolder, progress: ByteProgress) -> None:
    record = shard.record
    if _is_restored(work.path(record.path), record):
        progress.advance(f"{record.path}, kept", _shard_bytes(record))
        return
    with work.written(record.path) as file:
        for part in original_parts(shard):
            file.write(part)
            progress.advance(record.path, len(part))


def _is_restored(path: Path, record: StoredShard) -> bool:
    """Whether an earlier run has written the file and its content is correct."""
    try:
        found = map_safetensors(path)
    except (CheckpointError, FileNotFoundError):
        return False
    return found.header.text == record.header and all(
        checksum(found.bytes_of(tensor.name)) == tensor.digest for tensor in record.tensors
    )


def _copy(bundle: Path, file: StoredFile, work: WorkFolder, progress: ByteProgress) -> None:
    with work.written(file.path) as copy:
        copied = copy_file(bundle / file.path, copy, partial(progress.advance, file.path))
    if copied != (file.num_bytes, file.digest):
        raise CheckpointError(f"{bundle / file.path}: the file changed while it was copied")


def _num_bytes(manifest: Manifest) -> int:
    """Returns the size of the bundled folder."""
    shards = sum(_shard_bytes(shard) for shard in manifest.shards)
    return shards + sum(file.num_bytes for file in manifest.files)


def _shard_bytes(record: StoredShard) -> int:
    header_bytes = LENGTH.size + len(record.header.encode())
    return header_bytes + sum(tensor.num_bytes for tensor in record.tensors)
