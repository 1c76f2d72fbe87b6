"""What image encoders share: tiles cut into patches, squares of patches as one vector, names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import cast

from torch import Tensor, nn

from shared.engine.layers.destinations import HasDestinations


def patches_of(tile: Tensor, size: int) -> Tensor:
    """[3, H, W] -> [h · w, 3 · size²], the factors of a convolution without overlap."""
    channels, height, width = tile.shape
    rows, columns = height // size, width // size
    cut = tile.view(channels, rows, size, columns, size).permute(1, 3, 0, 2, 4)
    return cut.reshape(rows * columns, channels * size * size)


def shuffled(x: Tensor, scale: int) -> Tensor:
    """[h, w, hidden] -> [h · w / scale², scale² · hidden]: each square of patches, row by row."""
    height, width, hidden = x.shape
    squares = x.view(height // scale, scale, width // scale, scale, hidden)
    return squares.transpose(1, 2).reshape(-1, scale * scale * hidden)


def named(
    prefix: str, part: HasDestinations | nn.Module, names: Mapping[str, str] | None = None
) -> dict[str, Tensor]:
    """Returns a part's destinations behind `prefix`. `names`: starts of names, and what a
    checkpoint has instead.
    """
    found = {}
    for name, tensor in cast("HasDestinations", part).destinations().items():
        for own, given in (names or {}).items():
            if name.startswith(own):
                name = given + name.removeprefix(own)
        found[f"{prefix}{name}"] = tensor
    return found
