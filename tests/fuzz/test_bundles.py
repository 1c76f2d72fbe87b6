"""Hostile or damaged bundles: read, or rejected with one clear error."""

from __future__ import annotations

import json
import shutil
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from shared.engine.codec.compress import compress_folder
from shared.engine.codec.decompress import decompress_folder
from shared.engine.codec.manifest import MANIFEST, Manifest, encode_manifest
from shared.engine.weights.load import open_checkpoint, weights_digest
from shared.engine.weights.weight_source import read_tensor
from shared.errors import CheckpointError, HearthError
from tests.fuzz.mutations import anything, spoiled, torn
from tests.fuzz.profile import fuzz
from tests.shared.engine.codec.folders import Silent, bf16, contents, normal, safetensors_of

MAX_MESSAGE_CHARS = 200_000  # an error may repeat a name
SHARD = "model.hearth.safetensors"


@cache
def scratch() -> Path:
    return Path(tempfile.mkdtemp(prefix="hearth-fuzz-bundles-"))


@cache
def good() -> tuple[bytes, bytes]:
    """Manifest and shard of a small bundle."""
    source = scratch() / "model"
    source.mkdir()
    tensors = {
        "a.weight": ("BF16", (40, 30), bf16(normal(0, 40, 30))),
        "b.weight": ("F16", (3000,), normal(1, 3000).astype("<f2").tobytes()),
        "c": ("F32", (), normal(2, 1).tobytes()),
    }
    (source / "model.safetensors").write_bytes(safetensors_of(tensors))
    (source / "config.json").write_text("{}")
    compress_folder(source, scratch() / "bundle", Silent())
    bundle = scratch() / "bundle"
    return (bundle / MANIFEST).read_bytes(), (bundle / SHARD).read_bytes()


def sealed(tree: Any) -> bytes:
    """A manifest with a matching digest, if it is valid: an attacker can compute one, too."""
    try:
        return encode_manifest(msgspec.convert(tree, Manifest))
    except (msgspec.ValidationError, UnicodeEncodeError, OverflowError):
        return json.dumps(tree).encode()


@st.composite
def manifests(draw: st.DrawFn) -> bytes:
    tree = json.loads(good()[0])
    lies = spoiled([tree, tree["shards"][0]], has_bytes=False).map(
        lambda each: (
            sealed(each if "shards" in (each or {}) else tree | {"shards": [each]})
            if isinstance(each, dict)
            else json.dumps(each).encode()
        )
    )
    return draw(lies | lies | lies | torn([good()[0]]) | anything)


def _written(manifest: bytes | None, shard: bytes | None) -> Path:
    folder = scratch() / "spoilt"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    (folder / MANIFEST).write_bytes(good()[0] if manifest is None else manifest)
    (folder / SHARD).write_bytes(good()[1] if shard is None else shard)
    (folder / "config.json").write_text("{}")
    return folder


@fuzz(120)
@given(st.none() | st.deferred(manifests), st.none() | torn([good()[1]]))
def test_bundle_is_read_or_rejected(manifest: bytes | None, shard: bytes | None) -> None:
    bundle = _written(manifest, shard)
    try:
        with open_checkpoint(bundle) as tensors:
            weights_digest(tensors, b"")
            for name in tensors.names():
                content, tensor = tensors.content(name), read_tensor(tensors, name)
                assert tuple(tensor.shape) == content.shape
    except CheckpointError as error:
        assert error.message
        assert len(error.message) < MAX_MESSAGE_CHARS


@fuzz(40)
@given(st.none() | st.deferred(manifests), st.none() | torn([good()[1]]))
def test_decompress_writes_only_its_output_folder(
    manifest: bytes | None, shard: bytes | None
) -> None:
    bundle, out = _written(manifest, shard), scratch() / "out"
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir()
    try:
        decompress_folder(bundle, out / "model", Silent())
        assert {path.name for path in out.iterdir()} == {"model"}
        if manifest is None:
            assert contents(out / "model") == contents(scratch() / "model")
    except HearthError as error:
        assert error.message
        assert {path.name for path in out.iterdir()} <= {"model.partial"}
