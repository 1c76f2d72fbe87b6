"""Checkpoint folders with every kind of file, and functions to compare them."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shared.engine.codec.compress import compress_folder
from shared.engine.codec.manifest import Manifest
from shared.errors import HearthError

Tensors = dict[str, tuple[str, tuple[int, ...], bytes]]


class Silent:
    def __init__(self) -> None:
        self.num_expected = self.num_done = 0
        self.steps: list[str] = []

    def expect(self, num_bytes: int) -> None:
        self.num_expected += num_bytes

    def advance(self, what: str, num_bytes: int) -> None:
        self.num_done += num_bytes
        self.steps.append(what)


def bf16(values: np.ndarray) -> bytes:
    return (np.ascontiguousarray(values, np.float32).view(np.uint32) >> 16).astype("<u2").tobytes()


def normal(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).normal(0, 0.02, shape).astype(np.float32)


def tensors_of_all_kinds(seed: int) -> Tensors:
    rng = np.random.default_rng(seed)
    return {
        f"model.layers.{seed}.mlp.up_proj.weight": ("BF16", (33, 401), bf16(normal(seed, 33, 401))),
        f"model.layers.{seed}.self_attn.q_proj.weight": (
            *("F16", (50, 100)),
            normal(seed, 50, 100).astype("<f2").tobytes(),
        ),
        f"model.layers.{seed}.norm.weight": ("BF16", (7,), bf16(np.ones(7))),
        f"model.layers.{seed}.scale": ("F32", (19,), normal(seed, 19).tobytes()),
        f"model.layers.{seed}.qweight": ("I32", (5, 9), rng.bytes(180)),
        f"model.layers.{seed}.noise": ("BF16", (3000,), rng.bytes(6000)),
        f"model.layers.{seed}.none": ("BF16", (0, 4), b""),
        f"model.layers.{seed}.odd": ("F4", (3,), b"xyz"),
        f'model.layers.{seed}."ünusual" .weight': ("BF16", (2000,), bf16(normal(seed, 2000))),
    }


def safetensors_of(tensors: Tensors, *, padding: int = 0) -> bytes:
    """A safetensors file with a header that no library writes in the same form."""
    header: dict[str, object] = {"__metadata__": {"format": "pt", "by": "a test"}}
    offset = 0
    for name, (dtype, shape, data) in tensors.items():
        end = offset + len(data)
        header[name] = {"shape": shape, "data_offsets": [offset, end], "dtype": dtype}
        offset = end
    encoded = json.dumps(header, ensure_ascii=False, indent=0).encode() + b" " * padding
    payload = b"".join(data for _, _, data in tensors.values())
    return struct.pack("<Q", len(encoded)) + encoded + payload


def write_folder(folder: Path, *, num_shards: int = 2) -> Path:
    """Writes shards, an index and files of other kinds, some of them in subfolders."""
    folder.mkdir(parents=True)
    weight_map = {}
    for number in range(num_shards):
        name, tensors = f"model-{number}.safetensors", tensors_of_all_kinds(number)
        (folder / name).write_bytes(safetensors_of(tensors, padding=number))
        weight_map |= dict.fromkeys(tensors, name)
    index = json.dumps({"metadata": {}, "weight_map": weight_map})
    (folder / "model.safetensors.index.json").write_text(index)
    (folder / "config.json").write_text('{"a": 1 }\n')
    (folder / "below" / "deeper").mkdir(parents=True)
    (folder / "below" / "deeper" / "empty.txt").touch()
    (folder / "below" / "part.safetensors").write_bytes(safetensors_of(tensors_of_all_kinds(9)))
    (folder / ".hidden").write_bytes(bytes(range(256)))
    return folder


def contents(folder: Path) -> dict[str, bytes]:
    files = (path for path in folder.rglob("*") if path.is_file())
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in files}


def bundled(tmp_path: Path, *, num_shards: int = 2) -> tuple[Path, Path, Manifest]:
    """A checkpoint folder, its bundle, and the bundle's manifest."""
    source = write_folder(tmp_path / "model", num_shards=num_shards)
    target = tmp_path / "bundle"
    return source, target, compress_folder(source, target, Silent())


def require_error(kind: type[HearthError], message: str, run: Any) -> str:
    with pytest.raises(kind) as caught:
        run()
    assert message in caught.value.message
    assert "\n" not in caught.value.message
    return caught.value.message
