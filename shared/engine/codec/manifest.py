"""The manifest of a bundle: `hearth_bundle.json` in its folder.

    DIR/config.json, tokenizer.json, …      unchanged
    DIR/model.safetensors              ->   model.hearth.safetensors, its planes
                                            hearth_bundle.json

The manifest contains each shard's original header, each tensor's codec and the xxh3-128 of its
bytes, and a digest of the manifest. A change of the format changes the version number.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path, PurePosixPath
from typing import Annotated

import msgspec
import xxhash

from shared.engine.codec.safetensors_layout import SafetensorsHeader, parse_header
from shared.errors import CheckpointError
from shared.tokenizer.checkpoint_file import exists, read_checkpoint_file
from shared.transport.wire_errors import UNREADABLE, one_line

MANIFEST = "hearth_bundle.json"
FORMAT = "hearth bundle"
VERSION = 1
MAX_MANIFEST_BYTES = 256 << 20  # of the largest checkpoints, with 200,000 tensors: 110 MB
SUFFIX, BUNDLE_SUFFIX = ".safetensors", ".hearth.safetensors"

Count = Annotated[int, msgspec.Meta(ge=0)]


class ManifestTensor(msgspec.Struct, frozen=True, kw_only=True):
    """A tensor of the original. `digest` is the xxh3-128 of its bytes; `entropy_bytes` is its size
    with an ideal code.
    """

    name: str
    dtype: str
    shape: tuple[Count, ...]
    num_bytes: Count
    digest: str
    codec: str
    coded_planes: tuple[str, ...]
    num_stored_bytes: Count
    entropy_bytes: Count


class StoredShard(msgspec.Struct, frozen=True, kw_only=True):
    """An original file: its `path` relative to its folder, and the text of its `header`."""

    path: str
    header: str
    tensors: tuple[ManifestTensor, ...]


class StoredFile(msgspec.Struct, frozen=True, kw_only=True):
    """A file that the bundle contains unchanged."""

    path: str
    num_bytes: Count
    digest: str


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    format: str = FORMAT
    version: int = VERSION
    shards: tuple[StoredShard, ...]
    files: tuple[StoredFile, ...]
    digest: str = ""


class _Kind(msgspec.Struct):
    format: str
    version: int


def is_bundle(folder: Path) -> bool:
    return exists(folder / MANIFEST)


def bundle_path(path: str) -> str:
    """Returns the path in the bundle of the shard for `path`; unique for each path."""
    return path.removesuffix(SUFFIX) + BUNDLE_SUFFIX


def encode_manifest(manifest: Manifest) -> bytes:
    sealed = msgspec.structs.replace(manifest, digest=_digest(manifest))
    return msgspec.json.format(msgspec.json.encode(sealed), indent=1) + b"\n"


def read_manifest(folder: Path) -> Manifest:
    """Reads the manifest of a bundle. Raises CheckpointError with one line if it is no bundle, or a
    newer or damaged one.
    """
    path = folder / MANIFEST
    try:
        encoded = read_checkpoint_file(path, max_bytes=MAX_MANIFEST_BYTES)
    except FileNotFoundError:
        raise CheckpointError(f"{folder}: not a bundle: there is no {MANIFEST}") from None
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror}") from None
    try:
        kind = msgspec.json.decode(encoded, type=_Kind)
    except UNREADABLE as error:
        raise CheckpointError(f"{path}: not a bundle's manifest: {one_line(error)}") from None
    if kind.format != FORMAT:
        raise CheckpointError(f"{path}: format {kind.format!r} is not {FORMAT!r}")
    if kind.version != VERSION:
        age = "newer" if kind.version > VERSION else "older"
        raise CheckpointError(
            f"{path}: version {kind.version} of the format is {age} than this Hearth, "
            f"which reads version {VERSION}"
        )
    return _checked(path, encoded)


def _checked(path: Path, encoded: bytes) -> Manifest:
    try:
        manifest = msgspec.json.decode(encoded, type=Manifest)
    except UNREADABLE as error:
        raise CheckpointError(f"{path}: damaged: {one_line(error)}") from None
    if manifest.digest != _digest(manifest):
        raise CheckpointError(f"{path}: damaged: its digest differs")
    for shard in manifest.shards:
        check_shard(path, shard)
    shards, files = [each.path for each in manifest.shards], [each.path for each in manifest.files]
    for name in (*shards, *files):
        _check_path(path, name)
    _check_unique(path, [*shards, *files])
    _check_unique(path, [MANIFEST, *map(bundle_path, shards), *files])
    return manifest


def check_shard(path: Path, shard: StoredShard) -> SafetensorsHeader:
    """Raises CheckpointError unless header and tensors agree. `path` is the file
    that they are from.
    """
    try:
        header = parse_header(shard.header.encode())
    except ValueError as error:
        raise CheckpointError(f"{path}: {shard.path}: {error}") from None
    said = [(each.name, each.dtype, each.shape, each.num_bytes) for each in shard.tensors]
    spans = header.spans.items()
    if said != [(name, span.dtype, span.shape, span.num_bytes) for name, span in spans]:
        raise CheckpointError(f"{path}: {shard.path}: its tensors differ from its header")
    return header


def _check_path(manifest: Path, path: str) -> None:
    """Raises CheckpointError for a path outside the folder: manifests are untrusted."""
    parts = PurePosixPath(path).parts
    is_below = parts and ".." not in parts and not path.startswith("/") and "\0" not in path
    if not is_below or str(PurePosixPath(path)) != path or "\\" in path:
        raise CheckpointError(f"{manifest}: {path!r} is not a relative path inside the folder")


def _check_unique(manifest: Path, paths: list[str]) -> None:
    if len(set(paths)) != len(paths):
        twice = Counter(paths).most_common(1)[0][0]
        raise CheckpointError(f"{manifest}: {twice!r} is listed twice")


def _digest(manifest: Manifest) -> str:
    return xxhash.xxh3_128_hexdigest(
        msgspec.json.encode(msgspec.structs.replace(manifest, digest=""))
    )
