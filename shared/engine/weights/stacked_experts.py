"""Reads the weight of one expert from a checkpoint's tensor of all experts."""

from __future__ import annotations

import torch
from torch import Tensor

from shared.engine.model_config.checkpoint_form import StackedPart
from shared.engine.parallel.cuts import Cut
from shared.engine.weights.weight_source import WeightSource


def read_stacked(
    part: StackedPart, tensors: WeightSource, name: str, cut: Cut, out: Tensor
) -> None:
    """Reads the part of an expert. `cut` is that of the part. The expert's rows of its columns K
    are read, or all of its rows.
    """
    full = tensors.info(name).shape
    shape = part.shape(full)
    columns = slice(part.first, part.end, part.step)
    if part.has_rows:
        stored = torch.empty((1, *full[1:]), dtype=out.dtype, device=out.device)
        tensors.read_into(name, Cut(((part.index, part.index + 1),)), stored)
        own = stored[0, columns].reshape(shape)
        for chosen, place in cut.slices(shape):
            out[place].copy_(own[chosen])
        return
    low, high = cut.columns or (0, shape[1])
    expert = torch.empty((1, high - low, full[2]), dtype=out.dtype, device=out.device)
    tensors.read_into(name, Cut(((part.index, part.index + 1),), (low, high)), expert)
    weight = expert[0, :, columns].T
    for (rows, *_), place in Cut(cut.rows).slices(shape):
        out[place].copy_(weight[rows])
