"""Writes the bundle of a checkpoint folder: encodes every tensor, decodes it and compares."""

from __future__ import annotations

from concurrent.futures import Executor
from functools import partial
from pathlib import Path
from typing import Protocol

from shared.engine.codec.manifest import (
    MANIFEST,
    Manifest,
    StoredFile,
    StoredShard,
    bundle_path,
    encode_manifest,
)
from shared.engine.codec.model_folder import (
    ModelFolder,
    check_file,
    copy_file,
    digest_of,
    list_model_folder,
)
from shared.engine.codec.safetensors_layout import MappedFile, map_safetensors
from shared.engine.codec.shard import BundleShard, OnBytes, checksum, read_record, write_shard
from shared.engine.codec.threads import coding_threads
from shared.engine.codec.work_folder import UNDER_WORK, WorkFolder, work_folder
from shared.errors import CheckpointError


class ByteProgress(Protocol):
    """Receives the progress of the work."""

    def expect(self, num_bytes: int) -> None:
        """Sets the total number of bytes."""

    def advance(self, what: str, num_bytes: int) -> None: ...


def compress_folder(
    source: Path, target: Path, progress: ByteProgress, *, num_threads: int | None = None
) -> Manifest:
    """Writes `target`, a bundle of `source`, which is not changed.

    Finished shards of a killed run are verified and reused. Each byte of the original counts twice
    as progress: when written, and when verified. Raises ConfigError and CheckpointError with one
    line; `target` then does not exist.
    """
    folder = list_model_folder(source)
    with work_folder(target, source) as work, coding_threads(num_threads) as executor:
        manifest = _bundle(folder, work, executor, progress)
        work.publish()
    return manifest


def _bundle(
    folder: ModelFolder, work: WorkFolder, executor: Executor, progress: ByteProgress
) -> Manifest:
    progress.expect(2 * folder.num_bytes())
    work.retain_only((*map(bundle_path, folder.shards), *folder.files))
    sources = [map_safetensors(folder.root / name) for name in folder.shards]  # checks all first
    shards = tuple(
        _shard(name, source, work, executor, progress)
        for name, source in zip(folder.shards, sources, strict=True)
    )
    files = tuple(_carried(folder, name, work, progress) for name in folder.files)
    manifest = Manifest(shards=shards, files=files)
    with work.written(MANIFEST) as file:
        file.write(encode_manifest(manifest))
    return manifest


def _shard(
    name: str, source: MappedFile, work: WorkFolder, executor: Executor, progress: ByteProgress
) -> StoredShard:
    stored = bundle_path(name)

    progress.advance(name, 2 * source.header.data_start)
    finished = _finished(work.path(stored), name, source, executor)
    if finished is not None:
        progress.advance(f"{name}, kept", 2 * source.header.num_data_bytes)
        return finished
    with work.written(stored) as file:
        record = write_shard(file, source, name, executor, partial(progress.advance, name))
        file.flush()
        done = partial(progress.advance, f"{name}, verified")
        _verify(work.path(stored + UNDER_WORK), record, executor, done)
    return record


def _finished(path: Path, name: str, source: MappedFile, executor: Executor) -> StoredShard | None:
    """Returns the record of this file's shard from an earlier run, or None if missing or
    damaged.
    """
    try:
        record = read_record(path)
        if (record.path, record.header) != (name, source.header.text):
            return None
        for tensor in record.tensors:
            if checksum(source.bytes_of(tensor.name)) != tensor.digest:
                return None
        _verify(path, record, executor, lambda _: None)
    except CheckpointError:
        return None
    return record


def _verify(path: Path, record: StoredShard, executor: Executor, on_bytes: OnBytes) -> None:
    """Reads the shard like a worker. Raises CheckpointError."""
    shard = BundleShard(path, record, executor)
    for tensor in record.tensors:
        shard.original_bytes(tensor.name)
        on_bytes(tensor.num_bytes)


def _carried(
    folder: ModelFolder, name: str, work: WorkFolder, progress: ByteProgress
) -> StoredFile:
    source, copy = folder.root / name, work.path(name)
    if copy.is_file() and digest_of(copy) == digest_of(source):
        num_bytes, digest = digest_of(copy)
        progress.advance(name, num_bytes)
    else:
        with work.written(name) as file:
            num_bytes, digest = copy_file(source, file, partial(progress.advance, name))
    stored = StoredFile(path=name, num_bytes=num_bytes, digest=digest)
    check_file(copy, stored)
    progress.advance(name, num_bytes)
    return stored
