"""Every source reads a part of a tensor as it is in the whole, into any dtype."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from shared.engine.codec.compress import compress_folder
from shared.engine.model_config.checkpoint_form import TEXT_PART
from shared.engine.parallel.cuts import WHOLE, Cut
from shared.engine.weights.checkpoint_tensors import FormedTensors
from shared.engine.weights.dummy_weights import DummyTensors
from shared.engine.weights.load import open_checkpoint
from shared.engine.weights.weight_source import WeightSource, read_tensor
from tests.shared.engine.codec.folders import Silent

NAME, SHAPE = "model.layers.0.mlp.down_proj.weight", (48, 40)
CUTS = [
    WHOLE,
    Cut(rows=((0, 16),)),
    Cut(rows=((32, 48), (0, 8))),
    Cut(columns=(8, 40)),
    Cut(rows=((5, 7), (40, 41)), columns=(0, 24)),
    Cut(rows=((3, 3),)),
]


def write(folder: Path) -> None:
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    weight = torch.randn(SHAPE, generator=torch.Generator().manual_seed(0)).bfloat16()
    save_file({NAME: weight}, folder / "model.safetensors", metadata={"format": "pt"})


@contextmanager
def opened(kind: str, folder: Path) -> Iterator[WeightSource]:
    if kind == "dummy":
        yield DummyTensors(folder, {NAME: torch.empty(SHAPE)})
        return
    write(folder / "plain")
    if kind == "bundle":
        compress_folder(folder / "plain", folder / "bundle", Silent())
    with ExitStack() as stack:
        where = folder / ("bundle" if kind == "bundle" else "plain")
        tensors = stack.enter_context(open_checkpoint(where))
        yield FormedTensors(tensors, TEXT_PART) if kind == "text" else tensors


@pytest.mark.parametrize("kind", ["plain", "bundle", "dummy", "text"])
def test_part_equals_that_of_the_whole(kind: str, tmp_path: Path) -> None:
    with opened(kind, tmp_path) as source:
        full = read_tensor(source, NAME)
        assert full.abs().sum() > 0
        for cut in CUTS:
            for dtype in (torch.float32, torch.bfloat16):
                out = torch.full(cut.shape(SHAPE), torch.nan, dtype=dtype)
                source.read_into(NAME, cut, out)
                rows = [full[first:end] for first, end in cut.rows or ((0, SHAPE[0]),)]
                expected = torch.cat(rows)[:, slice(*(cut.columns or (0, SHAPE[1])))]
                assert torch.equal(out, expected.to(dtype)), cut


@pytest.mark.parametrize("kind", ["plain", "bundle", "dummy"])
def test_wrong_size_raises(kind: str, tmp_path: Path) -> None:
    with opened(kind, tmp_path) as source:
        with pytest.raises(ValueError, match=r"the cut has shape \(4, 40\), not \(5, 40\)"):
            source.read_into(NAME, Cut(rows=((0, 4),)), torch.empty(5, 40))
        with pytest.raises(ValueError, match="outside of dimension 0"):
            source.read_into(NAME, Cut(rows=((40, 49),)), torch.empty(9, 40))
