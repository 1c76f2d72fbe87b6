"""One file of a checkpoint, plain or as a shard of a bundle: both yield the same tensors."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from concurrent.futures import Executor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from threading import Lock
from typing import Protocol

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from shared.engine.codec.manifest import (
    MANIFEST,
    StoredShard,
    bundle_path,
    is_bundle,
    read_manifest,
)
from shared.engine.codec.shard import BundleShard
from shared.engine.codec.threads import coding_threads
from shared.engine.parallel.cuts import WHOLE, Cut
from shared.engine.weights.reading.digest_cache import DigestCache
from shared.engine.weights.reading.staging import LocalStaging, WeightStaging
from shared.engine.weights.shared_file import FileIdentity
from shared.engine.weights.tensor_bytes import TensorBytes, row_cuts
from shared.engine.weights.weight_source import DTYPES, Content, TensorInfo, check_part
from shared.errors import CheckpointError
from shared.tokenizer.checkpoint_file import open_unbuffered
from shared.transport.wire_errors import one_line

CHECKED_BYTES = 256 << 20  # bytes of the tensor that shows whether remembered digests are a file's


class TensorFile(Protocol):
    """All methods but `names` raise CheckpointError with the file and the tensor."""

    def names(self) -> list[str]: ...
    def info(self, name: str) -> TensorInfo: ...
    def read_into(self, name: str, cut: Cut, out: Tensor) -> None: ...
    def row_cuts(self, name: str) -> Sequence[Cut]: ...
    def content(self, name: str) -> Content: ...
    def check_unchanged(self) -> None: ...


@dataclass(frozen=True)
class Reading:
    """Options of reading files. Without `digests` each is computed."""

    staging: WeightStaging = field(default_factory=LocalStaging)
    digests: DigestCache | None = None


class SafetensorsFile:
    """A safetensors file. Parts of tensors are read, not mapped: a process never holds what belongs
    to another rank, and a file that is cut short meanwhile is an error.
    """

    def __init__(self, path: Path, stack: ExitStack, reading: Reading | None = None) -> None:
        self._path = path
        self._reading = reading or Reading()
        self._digests: dict[str, str] = {}
        self._found: dict[str, str] | None = None
        self._lock = Lock()  # guards `_found`
        try:
            self._ctime_ns = path.stat().st_ctime_ns
            self._source = FileIdentity.of(path)
            # first: the library's own open waits at a pipe
            file = stack.enter_context(open_unbuffered(path))
            self._handle = stack.enter_context(safe_open(path, framework="pt"))
            self._bytes = TensorBytes(file, self._reading.staging)
        except FileNotFoundError:
            raise CheckpointError(f"{path}: no such file") from None
        except (SafetensorError, OSError) as error:
            reason = one_line(error)
            raise CheckpointError(f"{path}: invalid safetensors file: {reason}") from None

    def names(self) -> list[str]:
        return list(self._handle.keys())

    def info(self, name: str) -> TensorInfo:
        with self._named(name):
            described = self._handle.get_slice(name)
            return TensorInfo(described.get_dtype(), tuple(described.get_shape()))

    def read_into(self, name: str, cut: Cut, out: Tensor) -> None:
        dtype, shape = self.info(name)
        check_part(name, shape, cut, out)
        with self._named(name):
            self._bytes.read_into(name, DTYPES[dtype], shape, cut, out)

    def row_cuts(self, name: str) -> Sequence[Cut]:
        """Returns cuts of a slot each, or of a row."""
        shape = self.info(name).shape
        with self._named(name):
            return row_cuts(shape, self._bytes.size(name), self._reading.staging.num_bytes)

    def content(self, name: str) -> Content:
        with self._named(name):
            known = self._remembered.get(name) or self._digests.get(name)
            digest = known or self._bytes.digest(name)
        self._digests[name] = digest
        return Content(*self.info(name), digest)

    def check_unchanged(self) -> None:
        """Raises CheckpointError if the file is another one than when it was opened. Remembers its
        digests if `content` was called for all tensors.
        """
        if not self._source.is_current:
            raise CheckpointError(f"{self._path}: the file changed while it was read")
        cache, digests = self._reading.digests, dict(self._digests)
        is_new = digests != self._remembered and digests.keys() == set(self.names())
        if cache is not None and is_new:
            cache.remember(self._source, self._ctime_ns, digests)

    @property
    def _remembered(self) -> dict[str, str]:
        """Digests of all tensors, of which one was computed again; empty if there are none. All
        readers of the file get the same.
        """
        with self._lock:
            if self._found is None:
                self._found = self._checked()
            return self._found

    def _checked(self) -> dict[str, str]:
        if self._reading.digests is None:
            return {}
        found = self._reading.digests.of(self._source, self._ctime_ns)
        small = [name for name in self.names() if self._bytes.size(name) <= CHECKED_BYTES]
        if found.keys() != set(self.names()) or not small:
            return {}
        checked = random.choice(small)
        return found if self._bytes.digest(checked) == found[checked] else {}

    @contextmanager
    def _named(self, name: str) -> Iterator[None]:
        try:
            yield
        except (SafetensorError, OSError, AttributeError, KeyError) as error:
            raise CheckpointError(f"{self._path}: tensor {name}: {one_line(error)}") from None


class BundledFile:
    """A shard of a bundle: each read decodes a whole tensor on all threads and verifies it, one at
    a time.
    """

    def __init__(self, shard: BundleShard, lock: Lock) -> None:
        self._shard = shard
        self._lock = lock

    def names(self) -> list[str]:
        return list(self._shard.tensors)

    def info(self, name: str) -> TensorInfo:
        stored = self._shard.tensors[name]
        return TensorInfo(stored.dtype, stored.shape)

    def read_into(self, name: str, cut: Cut, out: Tensor) -> None:
        stored = self._shard.tensors[name]
        check_part(name, stored.shape, cut, out)
        dtype = DTYPES.get(stored.dtype)
        if dtype is None:
            where = f"{self._shard.path}: tensor {name}"
            raise CheckpointError(f"{where}: dtype {stored.dtype!r} is not supported")
        if not stored.num_bytes:
            return
        with self._lock:
            data = torch.from_numpy(self._shard.original_bytes(name))
            tensor = data.view(dtype).view(stored.shape)
            if cut.is_whole:
                out.copy_(tensor)
                return
            for part, rows in cut.slices(stored.shape):
                out[rows].copy_(tensor[part])

    def row_cuts(self, name: str) -> Sequence[Cut]:
        return (WHOLE,)

    def content(self, name: str) -> Content:
        """Returns the content in the bundle's manifest; every read is verified against it."""
        return Content(*self.info(name), self._shard.tensors[name].digest)

    def check_unchanged(self) -> None:
        """Every read has been verified."""


class SafetensorsFolder:
    def __init__(self, model_dir: Path, reading: Reading) -> None:
        self._model_dir = model_dir
        self._reading = reading

    def path(self, file_name: str) -> Path:
        return self._model_dir / file_name

    def open(self, file_name: str, stack: ExitStack) -> TensorFile:
        """Raises CheckpointError."""
        return SafetensorsFile(self.path(file_name), stack, self._reading)

    def others(self) -> list[Path]:
        """Files without tensors that determine the tensors."""
        return []


class BundleFolder:
    def __init__(self, model_dir: Path, executor: Executor) -> None:
        """Raises CheckpointError."""
        self._model_dir = model_dir
        self._executor = executor
        self._lock = Lock()
        shards = read_manifest(model_dir).shards
        self._shards: dict[str, StoredShard] = {shard.path: shard for shard in shards}

    def path(self, file_name: str) -> Path:
        return self._model_dir / bundle_path(file_name)

    def open(self, file_name: str, stack: ExitStack) -> TensorFile:
        """Returns the shard of the original file `file_name`. Raises CheckpointError."""
        path, shard = self.path(file_name), self._shards.get(file_name)
        if shard is None:
            raise CheckpointError(f"{path}: not a shard of this bundle")
        return BundledFile(BundleShard(path, shard, self._executor), self._lock)

    def others(self) -> list[Path]:
        return [self._model_dir / MANIFEST]


def checkpoint_folder(
    model_dir: Path, stack: ExitStack, reading: Reading
) -> SafetensorsFolder | BundleFolder:
    """Raises CheckpointError."""
    if not is_bundle(model_dir):
        return SafetensorsFolder(model_dir, reading)
    return BundleFolder(model_dir, stack.enter_context(coding_threads()))
