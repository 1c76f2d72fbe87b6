"""A checkpoint's names, left-out parts and rotary pairs in the model's form."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from shared.engine.model_config.checkpoint_form import (
    TEXT_PART,
    CheckpointForm,
    PairedRows,
    StackedExperts,
)
from shared.engine.parallel.cuts import WHOLE, Cut
from shared.engine.weights.checkpoint_tensors import FormedTensors
from shared.engine.weights.dummy_weights import DummyTensors
from shared.engine.weights.load import open_checkpoint
from shared.engine.weights.weight_source import read_tensor
from shared.errors import CheckpointError

HEAD = PairedRows(head=7, first=2, dim=4)
ROTARY = CheckpointForm(
    renames=((r"^text\.", "model."), (r"\.w1\.", ".gate_proj.")),
    dropped=(r"image\.",),
    paired=((r"model\.layers\.\d+\.q\.(weight|bias)", HEAD),),
)
Q, GATE = "model.layers.1.q.weight", "model.layers.0.gate_proj.weight"
Q_GIVEN = "text.layers.1.q.weight"


def source(**shapes: tuple[int, ...]) -> DummyTensors:
    tensors = {name: torch.empty(shape) for name, shape in shapes.items()}
    return DummyTensors(Path("somewhere"), tensors)


def in_halves(weight: Tensor) -> Tensor:
    """Each head of 7 rows: 2 as they are, 4 of two pairs, 1 as it is."""
    return torch.cat([head[[0, 1, 2, 4, 3, 5, 6]] for head in weight.split(7)])


TENSORS = {Q_GIVEN: (21, 3), "text.layers.0.w1.weight": (4, 3), "image.q": (2,)}


def test_tensors_have_the_names_of_the_model() -> None:
    given = source(**TENSORS)
    formed = FormedTensors(given, ROTARY)
    assert formed.names() == [GATE, Q]
    assert torch.equal(read_tensor(formed, GATE), read_tensor(given, "text.layers.0.w1.weight"))
    assert formed.content(Q) == given.content(Q_GIVEN)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rotary_pairs_become_halves_in_every_part(dtype: torch.dtype) -> None:
    given = source(**TENSORS)
    formed = FormedTensors(given, ROTARY)
    whole = in_halves(read_tensor(given, Q_GIVEN))
    for cut, expected in (
        (WHOLE, whole),
        (Cut(rows=((7, 21),)), whole[7:]),
        (Cut(rows=((14, 21), (0, 7)), columns=(1, 3)), torch.cat((whole[14:], whole[:7]))[:, 1:]),
    ):
        out = torch.empty(expected.shape, dtype=dtype)
        formed.read_into(Q, cut, out)
        assert torch.equal(out, expected.to(dtype))
        transposed = torch.empty(expected.shape[::-1], dtype=dtype).t()
        formed.read_into(Q, cut, transposed)
        assert torch.equal(transposed, expected.to(dtype))


def test_a_bias_is_ordered_like_its_weight() -> None:
    given = source(**{"model.layers.0.q.bias": (14,)})
    out = torch.empty(14)
    FormedTensors(given, ROTARY).read_into("model.layers.0.q.bias", WHOLE, out)
    assert torch.equal(out, in_halves(read_tensor(given, "model.layers.0.q.bias")))


def test_a_cut_through_a_head_is_an_error() -> None:
    formed = FormedTensors(source(**TENSORS), ROTARY)
    with pytest.raises(ValueError, match="cut a head of 7 rows"):
        formed.read_into(Q, Cut(rows=((0, 5),)), torch.empty(5, 3))
    other = FormedTensors(source(**{Q: (20, 3)}), ROTARY)
    with pytest.raises(ValueError, match="no heads of 7 rows"):
        other.read_into(Q, WHOLE, torch.empty(20, 3))


def test_two_tensors_of_one_name_are_an_error() -> None:
    given = source(**{"model.norm.weight": (3,), "language_model.model.norm.weight": (3,)})
    with pytest.raises(CheckpointError, match=r"are both model\.norm\.weight"):
        FormedTensors(given, TEXT_PART)


DOWN = "model.layers.0.experts.down_proj"
STACKED = CheckpointForm(
    renames=((r"\.feed_forward\.", "."),), experts=StackedExperts(num_experts=3, inner=4)
)


def test_stacked_experts_are_tensors_of_each_in_every_part(tmp_path: Path) -> None:
    gate_up, down = torch.randn(3, 5, 8), torch.randn(3, 4, 5)
    stored = {"model.layers.0.feed_forward.experts.gate_up_proj": gate_up, DOWN: down}
    save_file(stored, tmp_path / "model.safetensors")
    with open_checkpoint(tmp_path) as given:
        formed = FormedTensors(given, STACKED)
        assert len(formed.names()) == 9
        _check_experts(formed, gate_up, down)


def _check_experts(formed: FormedTensors, gate_up: Tensor, down: Tensor) -> None:
    for index in range(3):
        for name, whole in (
            ("gate_proj", gate_up[index, :, :4].T),
            ("up_proj", gate_up[index, :, 4:].T),
            ("down_proj", down[index].T),
        ):
            full = f"model.layers.0.experts.{index}.{name}.weight"
            assert formed.info(full).shape == whole.shape
            for cut, expected in (
                (WHOLE, whole),
                (Cut(rows=((1, 3),)), whole[1:3]),
                (Cut(columns=(2, 4)), whole[:, 2:4]),
                (Cut(rows=((2, 4), (0, 1)), columns=(0, 3)), whole[[2, 3, 0], :3]),
            ):
                out = torch.empty(expected.shape, dtype=torch.bfloat16)
                formed.read_into(full, cut, out)
                assert torch.equal(out, expected.bfloat16())


def test_too_few_stacked_experts_show_in_the_shape() -> None:
    formed = FormedTensors(source(**{DOWN: (2, 4, 5)}), STACKED)
    assert formed.info("model.layers.0.experts.2.down_proj.weight").shape == (2, 4, 5)
