"""A folder is bundled and restored to the byte; an error names the file in one line."""

from __future__ import annotations

from concurrent.futures import Executor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors import safe_open

from shared.engine.codec.byte_planes import Bytes
from shared.engine.codec.compress import compress_folder
from shared.engine.codec.decompress import decompress_folder
from shared.engine.codec.huffman import encode_plane
from shared.engine.codec.manifest import (
    MANIFEST,
    bundle_path,
    read_manifest,
)
from shared.engine.codec.shard import read_record
from shared.engine.codec.tensor import AS_IS
from shared.errors import CheckpointError, ConfigError
from tests.shared.engine.codec.folders import (
    Silent,
    bundled,
    contents,
    require_error,
    safetensors_of,
    tensors_of_all_kinds,
    write_folder,
)


def test_round_trip_restores_every_file(tmp_path: Path) -> None:
    source, bundle, manifest = bundled(tmp_path)
    before = contents(source)
    decompress_folder(bundle, tmp_path / "again", Silent())
    assert contents(tmp_path / "again") == before == contents(source)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["again", "bundle", "model"]
    assert read_manifest(bundle).shards == manifest.shards


def test_stored_shards_match_the_manifest(tmp_path: Path) -> None:
    _, bundle, manifest = bundled(tmp_path)
    assert {"config.json", ".hidden", "below/deeper/empty.txt"} <= set(contents(bundle))
    assert not list(bundle.rglob("model-?.safetensors"))
    codecs = {}
    for shard in manifest.shards:
        path = bundle / bundle_path(shard.path)
        assert read_record(path) == shard
        with safe_open(path, framework="np") as opened:  # any reader of safetensors can open it
            sizes = {name: opened.get_tensor(name).size for name in opened.keys()}  # noqa: SIM118
        assert sum(sizes.values()) == sum(each.num_stored_bytes for each in shard.tensors)
        codecs |= {tensor.name.rpartition(".")[0]: tensor.codec for tensor in shard.tensors}
    assert {codecs["model.layers.0.norm"], codecs["model.layers.0"]} == {AS_IS}
    assert codecs["model.layers.1.mlp.up_proj"] == "bf16-huffman"
    assert codecs["model.layers.1.self_attn.q_proj"] == "fp16-huffman"


def test_progress_reaches_the_expected_bytes(tmp_path: Path) -> None:
    source = write_folder(tmp_path / "model")
    for run in (
        lambda progress: compress_folder(source, tmp_path / "bundle", progress),
        lambda progress: decompress_folder(tmp_path / "bundle", tmp_path / "again", progress),
    ):
        progress = Silent()
        run(progress)
        assert progress.num_done == progress.num_expected > 0


def test_faulty_coder_is_detected_before_bundle_exists(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = write_folder(tmp_path / "model")

    def faulty(plane: Bytes, executor: Executor) -> list[bytes]:
        return encode_plane(np.where(plane == plane[77], plane[77] ^ 1, plane), executor)

    monkeypatch.setattr("shared.engine.codec.tensor.encode_plane", faulty)
    message = "tensor model.layers.9.mlp.up_proj.weight: damaged: its checksum differs"
    require_error(
        CheckpointError, message, lambda: compress_folder(source, tmp_path / "bundle", Silent())
    )
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model"]


def test_bundle_does_not_depend_on_thread_count(tmp_path: Path) -> None:
    source = write_folder(tmp_path / "model")
    for number in (1, 3):
        compress_folder(source, tmp_path / f"{number}", Silent(), num_threads=number)
    assert contents(tmp_path / "1") == contents(tmp_path / "3")


def test_links_to_files_are_followed(tmp_path: Path) -> None:
    """The hub's cache has such links."""
    source = write_folder(tmp_path / "blobs")
    linked = tmp_path / "snapshot"
    linked.mkdir()
    for path in source.iterdir():
        if path.is_file():
            (linked / path.name).symlink_to(path)
    compress_folder(linked, tmp_path / "bundle", Silent())
    decompress_folder(tmp_path / "bundle", tmp_path / "again", Silent())
    assert contents(tmp_path / "again") == contents(linked)


# ── rejected before anything is written ──────────────────────────────────────────────────────────


def test_invalid_folders_are_rejected(tmp_path: Path) -> None:
    source, bundle, _ = bundled(tmp_path)
    before = contents(tmp_path)

    def to(start: Path, target: Path) -> Any:
        return lambda: compress_folder(start, target, Silent())

    def back(start: Path, target: Path) -> Any:
        return lambda: decompress_folder(start, target, Silent())

    require_error(ConfigError, "bundle exists already", to(source, bundle))
    require_error(ConfigError, "model exists already", back(bundle, source))
    require_error(ConfigError, "inside of", to(source, source / "bundle"))
    require_error(ConfigError, "inside of", to(source, source / "below" / "bundle"))
    require_error(ConfigError, "inside of", back(bundle, bundle / "model"))
    require_error(ConfigError, "is a bundle already", to(bundle, tmp_path / "new"))
    require_error(ConfigError, "is not a directory", to(tmp_path / "no", tmp_path / "new"))
    require_error(ConfigError, "is not a folder", to(source, tmp_path / "no" / "new"))
    require_error(
        ConfigError, "no *.safetensors in it", to(source / "below" / "deeper", tmp_path / "n")
    )
    require_error(CheckpointError, f"there is no {MANIFEST}", back(source, tmp_path / "new"))
    assert contents(tmp_path) == before


def test_unsupported_file_is_named(tmp_path: Path) -> None:
    source = write_folder(tmp_path / "model")
    (source / "dangling").symlink_to(tmp_path / "nowhere")
    run = lambda: compress_folder(source, tmp_path / "new", Silent())  # noqa: E731
    require_error(ConfigError, "dangling: not a file", run)
    (source / "dangling").unlink()
    (source / "loop").symlink_to(source)
    require_error(ConfigError, "loop: a link to a folder", run)
    (source / "loop").unlink()
    content = safetensors_of(tensors_of_all_kinds(1))
    (source / "model-1.safetensors").write_bytes(content[:-2000])
    require_error(CheckpointError, "model-1.safetensors: incomplete safetensors file: tensor ", run)
    assert not (tmp_path / "new.partial").exists()


def test_foreign_work_folder_is_not_touched(tmp_path: Path) -> None:
    source = write_folder(tmp_path / "model")
    (tmp_path / "new.partial").mkdir()
    (tmp_path / "new.partial" / "diary").write_text("mine")
    message = "new.partial exists and is not from"
    require_error(ConfigError, message, lambda: compress_folder(source, tmp_path / "new", Silent()))
    assert contents(tmp_path / "new.partial") == {"diary": b"mine"}


def test_git_and_cache_folders_are_not_bundled(tmp_path: Path) -> None:
    source = write_folder(tmp_path / "model")
    before = contents(source)
    for name in (".git", ".cache"):
        (source / name).mkdir()
        (source / name / "large").touch()
    compress_folder(source, tmp_path / "bundle", Silent())
    decompress_folder(tmp_path / "bundle", tmp_path / "again", Silent())
    assert contents(tmp_path / "again") == before
