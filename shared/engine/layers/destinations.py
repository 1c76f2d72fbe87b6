"""The checkpoint's tensors that a module's weights consist of, by name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol, cast

from torch import Tensor, nn

from shared.engine.layers.linear import Linear


class HasDestinations(Protocol):
    def destinations(self) -> dict[str, Tensor]:
        """Returns the checkpoint's names, relative to the module's -> the views that they fill."""
        ...


def child_destinations(
    module: nn.Module, fused: Mapping[str, Mapping[str, int]] | None = None
) -> dict[str, Tensor]:
    """Collects the destinations of all children by name. `fused` children are several linear layers
    in a checkpoint: their names and output rows.
    """
    found: dict[str, Tensor] = {}
    for name, child in module.named_children():
        if fused and name in fused:
            assert isinstance(child, Linear)
            found |= child.part_destinations(fused[name])
        else:
            own = cast("HasDestinations", child).destinations()
            found |= {f"{name}.{path}": tensor for path, tensor in own.items()}
    return found
