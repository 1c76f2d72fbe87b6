"""Parts of tensors are read from safetensors files, and nothing beside them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from shared.engine.parallel.cuts import WHOLE, Cut
from shared.engine.weights.checkpoint_files import SafetensorsFile
from shared.errors import CheckpointError

TENSORS = {
    "matrix": torch.randn(700, 96, dtype=torch.bfloat16),
    "wide": torch.randn(3, 400_000, dtype=torch.float32),  # a row is larger than what is staged
    "cube": torch.arange(24).view(2, 3, 4),
    "vector": torch.randn(5),
    "number": torch.tensor(3.5),
    "nothing": torch.randn(0, 4),
}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    save_file(TENSORS, tmp_path / "model.safetensors", metadata={"format": "pt"})
    return tmp_path / "model.safetensors"


@pytest.fixture
def file(path: Path) -> Iterator[SafetensorsFile]:
    with ExitStack() as stack:
        yield SafetensorsFile(path, stack)


@pytest.mark.parametrize("name", TENSORS)
def test_whole_tensors_are_read_and_converted(file: SafetensorsFile, name: str) -> None:
    stored = TENSORS[name]
    for dtype in (stored.dtype, torch.float64):
        out = torch.empty(stored.shape, dtype=dtype)
        file.read_into(name, WHOLE, out)
        assert torch.equal(out, stored.to(dtype))


CUTS = [
    Cut(rows=((1, 3), (500, 700))),
    Cut(columns=(3, 40)),
    Cut(rows=((9, 10), (0, 2)), columns=(90, 96)),
    Cut(rows=((5, 5),)),
]


@pytest.mark.parametrize("cut", CUTS)
def test_only_the_bytes_of_a_cut_are_read(file: SafetensorsFile, cut: Cut) -> None:
    stored = TENSORS["matrix"]
    out = torch.empty(cut.shape(stored.shape), dtype=stored.dtype)
    before = num_read_bytes()
    file.read_into("matrix", cut, out)
    in_between = num_read_bytes()
    counting = num_read_bytes() - in_between  # reading the counter is counted, too
    assert in_between - before - counting == out.nbytes
    assert torch.equal(out, torch.cat([stored[part] for part, _ in cut.slices(stored.shape)]))


def num_read_bytes() -> int:
    return int(Path("/proc/self/io").read_text().split()[1])


def test_file_that_is_cut_short_meanwhile_is_an_error(path: Path, file: SafetensorsFile) -> None:
    os.truncate(path, path.stat().st_size // 2)
    with pytest.raises(CheckpointError, match=r"tensor wide: the file ends before the tensor does"):
        file.read_into("wide", WHOLE, torch.empty(3, 400_000))


def test_reads_that_return_less_are_continued(
    file: SafetensorsFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As those of network file systems do."""
    preadv = os.preadv
    monkeypatch.setattr(os, "preadv", lambda fd, out, at: preadv(fd, [out[0][:1000]], at))
    out = torch.empty(700, 96, dtype=torch.bfloat16)
    file.read_into("matrix", WHOLE, out)
    assert torch.equal(out, TENSORS["matrix"])
