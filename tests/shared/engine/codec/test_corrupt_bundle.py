"""A corrupt, truncated, foreign or newer bundle is rejected; the error names the file or tensor."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path
from typing import Any

import msgspec
import pytest

from shared.engine.codec.decompress import decompress_folder
from shared.engine.codec.manifest import (
    MANIFEST,
    VERSION,
    Manifest,
    bundle_path,
    encode_manifest,
)
from shared.errors import CheckpointError
from tests.shared.engine.codec.folders import (
    Silent,
    bundled,
    contents,
    require_error,
)


def test_flipped_bit_is_rejected_or_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, bundle, _ = bundled(tmp_path, num_shards=1)
    monkeypatch.setattr("os.fsync", lambda _: None)  # takes most of the time and is not under test
    before, stored = contents(source), contents(bundle)
    rng = random.Random(0)
    num_rejected = 0
    for name, content in stored.items():
        positions = range(len(content))
        for position in rng.sample(positions, min(len(positions), 60)):
            flipped = bytearray(content)
            flipped[position] ^= 1 << rng.randrange(8)
            (bundle / name).write_bytes(flipped)
            target = tmp_path / "again"
            try:
                decompress_folder(bundle, target, Silent())
                assert contents(target) == before, (name, position)
            except CheckpointError as error:
                num_rejected += 1
                assert "\n" not in error.message
                assert str(bundle) in error.message
                assert not target.exists()
            shutil.rmtree(target, ignore_errors=True)
            shutil.rmtree(tmp_path / "again.partial", ignore_errors=True)
        (bundle / name).write_bytes(content)
    assert num_rejected > 150


def test_corrupt_tensor_is_named(tmp_path: Path) -> None:
    _, bundle, manifest = bundled(tmp_path, num_shards=1)
    shard = next(each for each in manifest.shards if each.path == "model-0.safetensors")
    path = bundle / bundle_path(shard.path)
    content = path.read_bytes()
    end = len(content)
    for tensor in reversed(shard.tensors):
        if tensor.num_stored_bytes:
            corrupt = bytearray(content)
            corrupt[end - 1] ^= 0x10
            path.write_bytes(corrupt)
            run = lambda: decompress_folder(bundle, tmp_path / "again", Silent())  # noqa: E731
            require_error(CheckpointError, f"{path}: tensor {tensor.name}: damaged", run)
            path.write_bytes(content[: end - 1])
            require_error(CheckpointError, f"tensor {tensor.name}", run)
        end -= tensor.num_stored_bytes


def test_missing_file_is_named(tmp_path: Path) -> None:
    source, bundle, _ = bundled(tmp_path)
    run = lambda: decompress_folder(bundle, tmp_path / "again", Silent())  # noqa: E731
    for name in ("model-1.hearth.safetensors", "config.json", ".hidden"):
        (bundle / name).rename(tmp_path / "aside")
        require_error(CheckpointError, f"{bundle / name}: no such file", run)
        assert not (tmp_path / "again.partial").exists()
        (tmp_path / "aside").rename(bundle / name)
    run()
    assert contents(tmp_path / "again") == contents(source)


def test_corrupt_file_is_named_before_anything_is_written(tmp_path: Path) -> None:
    _, bundle, _ = bundled(tmp_path)
    (bundle / "config.json").write_text('{"a": 2 }\n')
    run = lambda: decompress_folder(bundle, tmp_path / "again", Silent())  # noqa: E731
    require_error(
        CheckpointError, f"{bundle}/config.json: damaged: it differs from the bundled", run
    )
    assert not (tmp_path / "again.partial").exists()


def test_shard_of_another_bundle_is_rejected(tmp_path: Path) -> None:
    _, bundle, _ = bundled(tmp_path)
    shutil.copy(bundle / "model-0.hearth.safetensors", bundle / "model-1.hearth.safetensors")
    run = lambda: decompress_folder(bundle, tmp_path / "again", Silent())  # noqa: E731
    require_error(CheckpointError, "tensor model.layers.1.mlp.up_proj.weight: there is no", run)


def _with(manifest: Manifest, **changes: Any) -> bytes:
    return encode_manifest(msgspec.structs.replace(manifest, **changes))


def test_invalid_or_newer_manifest_is_rejected(tmp_path: Path) -> None:
    _, bundle, manifest = bundled(tmp_path)
    path, file, shard = bundle / MANIFEST, manifest.files[0], manifest.shards[0]

    def renamed(name: str) -> bytes:
        return _with(manifest, files=(msgspec.structs.replace(file, path=name),))

    newer = {"format": "hearth bundle", "version": VERSION + 1, "shards": "of another form"}
    tensor = msgspec.structs.replace(shard.tensors[0], codec="bf16-magic")
    unknown = msgspec.structs.replace(shard, tensors=(tensor, *shard.tensors[1:]))
    fewer = msgspec.structs.replace(shard, tensors=shard.tensors[1:])
    for content, message in (
        (b"", "not a bundle's manifest"),
        (b"[]", "not a bundle's manifest"),
        (b"\xff", "not a bundle's manifest"),
        (path.read_bytes()[:-100], "not a bundle's manifest"),
        (json.dumps(newer).encode(), f"version {VERSION + 1} of the format is newer"),
        (_with(manifest, version=0), "version 0 of the format is older"),
        (_with(manifest, format="other"), "format 'other'"),
        (b'{"format": "hearth bundle", "version": 1}', "damaged: Object missing"),
        (path.read_bytes().replace(file.digest.encode(), b"0" * 32), "damaged: its digest"),
        *((renamed(name), "is not a relative path") for name in ("../a", "/a", "a/../b", ".", "")),
        (renamed("a//b"), "is not a relative path"),
        (renamed("a\\b"), "is not a relative path"),
        (renamed(MANIFEST), "is listed twice"),
        (renamed(shard.path), "is listed twice"),
        (renamed(bundle_path(shard.path)), "is listed twice"),
        (_with(manifest, files=(file, file)), "is listed twice"),
        (_with(manifest, shards=(fewer,)), "its tensors differ from its header"),
        (_with(manifest, shards=(unknown,)), f"tensor {tensor.name}: codec 'bf16-magic'"),
    ):
        path.write_bytes(content)
        run = lambda: decompress_folder(bundle, tmp_path / "again", Silent())  # noqa: E731
        require_error(CheckpointError, message, run)
        shutil.rmtree(tmp_path / "again.partial", ignore_errors=True)
