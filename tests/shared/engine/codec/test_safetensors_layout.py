"""Headers and bytes of safetensors files; errors for invalid and truncated ones."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

from shared.engine.codec.safetensors_layout import map_safetensors, parse_header
from shared.errors import CheckpointError
from tests.shared.engine.codec.folders import safetensors_of, tensors_of_all_kinds


def test_header_and_bytes_match_the_file(tmp_path: Path) -> None:
    path, tensors = tmp_path / "a.safetensors", tensors_of_all_kinds(0)
    content = safetensors_of(tensors, padding=3)
    path.write_bytes(content)
    mapped = map_safetensors(path)
    assert list(mapped.header.spans) == list(tensors)
    assert content[8 : mapped.header.data_start].decode() == mapped.header.text
    for name, (dtype, shape, data) in tensors.items():
        span = mapped.header.spans[name]
        assert (span.dtype, span.shape, span.num_bytes) == (dtype, shape, len(data))
        assert mapped.bytes_of(name).tobytes() == data
    assert mapped.header.metadata == {"format": "pt", "by": "a test"}


def test_layout_matches_the_safetensors_library(tmp_path: Path) -> None:
    path = Path("shared/demo_model/model.safetensors")
    mapped = map_safetensors(path)
    with safe_open(path, framework="pt") as opened:
        assert sorted(mapped.header.spans) == sorted(opened.keys())
        for name, span in mapped.header.spans.items():
            assert list(span.shape) == opened.get_slice(name).get_shape()
    name = "model.norm.weight"
    with safe_open(path, framework="pt") as opened:
        expected = opened.get_tensor(name).view(torch.uint8)
    assert mapped.bytes_of(name).tolist() == expected.tolist()


def _header(**spans: Any) -> bytes:
    return json.dumps(spans).encode()


def _span(start: int, end: int, dtype: str = "U8", **more: Any) -> dict[str, Any]:
    return {"dtype": dtype, "shape": [end - start], "data_offsets": [start, end], **more}


@pytest.mark.parametrize(
    ("header", "message"),
    [
        (b"\xff", "cannot be read"),
        (b"[1]", "cannot be read"),
        (b"{", "cannot be read"),
        (_header(a={"dtype": "U8"}), "cannot be read"),
        (_header(a=_span(0, 4, shape=[-4])), "cannot be read"),
        (_header(a=_span(1, 4)), "tensor a does not follow"),
        (_header(a=_span(0, 4), b=_span(5, 6)), "tensor b does not follow"),
        (_header(a=_span(0, 4), b=_span(2, 6)), "tensor b does not follow"),
        (_header(a=_span(0, 4, data_offsets=[0, -1])), "cannot be read"),
        (_header(a=_span(0, 4), b=_span(4, 3, shape=[1])), "does not follow"),
        (_header(a=_span(0, 4, "BF16")), "tensor a has 4 bytes, not those of its shape"),
        (_header(a=_span(0, 4, shape=[2**62, 4])), "tensor a has 4 bytes"),
        (_header(__metadata__={"x": 1}), "cannot be read"),
    ],
)
def test_invalid_header_is_rejected(header: bytes, message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        parse_header(header)
    assert "\n" not in str(caught.value)


def test_empty_tensors_are_allowed_anywhere() -> None:
    spans = {"a": _span(0, 0), "b": _span(0, 3), "c": _span(3, 3), "d": _span(3, 3)}
    assert list(parse_header(_header(**spans)).spans) == ["a", "b", "c", "d"]
    assert parse_header(b"{} ").num_data_bytes == 0


def test_truncated_file_error_names_the_first_cut_tensor(tmp_path: Path) -> None:
    path, tensors = tmp_path / "a.safetensors", tensors_of_all_kinds(0)
    content = safetensors_of(tensors)
    data_start = 8 + struct.unpack("<Q", content[:8])[0]
    second = list(tensors)[1]
    after_first = data_start + len(tensors[next(iter(tensors))][2])
    for num_bytes, message in (
        (0, "its header is cut off"),
        (7, "its header is cut off"),
        (data_start - 1, "its header is cut off"),
        (after_first, f"tensor {second} is cut off"),
        (after_first + 1, f"tensor {second} is cut off"),
    ):
        path.write_bytes(content[:num_bytes])
        with pytest.raises(CheckpointError, match=message) as caught:
            map_safetensors(path)
        assert caught.value.message.startswith(f"{path}: ")
    path.write_bytes(content + b"x")
    with pytest.raises(CheckpointError, match="bytes after the last tensor"):
        map_safetensors(path)
    path.write_bytes(struct.pack("<Q", 2**63) + content)
    with pytest.raises(CheckpointError, match="header is cut off"):
        map_safetensors(path)
