"""A model's storages that a checkpoint fills, each with the tensors and modules that use it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from concurrent.futures import Executor
from dataclasses import dataclass, field
from itertools import chain

import torch
from torch import Tensor, nn

from kernels.ops import Compressed, compress_weight
from shared.engine.layers.embedding import TokenEmbedding
from shared.engine.layers.linear import MatmulModule
from shared.engine.weights.load import fill
from shared.engine.weights.weight_source import WeightSource


@dataclass
class WeightRegion:
    """One storage of the model, named after its first tensor.

    `linears` are modules that multiply with a tensor of it, `embeddings` those that look up rows.
    The storage of tied embeddings has both: it is stored packed and dense, or once compressed.
    """

    name: str
    num_bytes: int
    tensors: dict[str, Tensor] = field(default_factory=dict)
    linears: dict[str, MatmulModule] = field(default_factory=dict)
    embeddings: dict[str, TokenEmbedding] = field(default_factory=dict)
    destinations: dict[str, Tensor] = field(default_factory=dict)
    has_other_readers: bool = False

    @property
    def is_covered(self) -> bool:
        """Whether the checkpoint sets all its bytes."""
        sizes = (each.numel() * each.element_size() for each in self.destinations.values())
        return sum(sizes) >= self.num_bytes

    @property
    def is_needed_dense(self) -> bool:
        return self.has_other_readers or bool(self.embeddings)

    def compressed(self, filled: Tensor) -> Compressed | None:
        """Returns the compressed weight of `filled`, the bytes of the storage; None if it is not
        smaller, or a module needs the dense weight.
        """
        readers = [*self.linears.values(), *self.embeddings.values()]
        is_compressible = all(each.is_compressible for each in self.linears.values())
        if not readers or self.has_other_readers or not is_compressible:
            return None
        return compress_weight(view_of(filled, readers[0].parameter))

    def adopt_compressed(self, weight: Compressed) -> None:
        for module in (*self.linears.values(), *self.embeddings.values()):
            module.replace_weight(weight)

    def adopt(self, filled: Tensor) -> None:
        """Makes the tensors views of `filled`, the bytes of the storage, also on another device."""
        for tensor in self.tensors.values():
            view = view_of(filled, tensor)
            if tensor.device == view.device:
                tensor.data = view
            else:
                is_parameter = isinstance(tensor, nn.Parameter)
                new = nn.Parameter(view, requires_grad=False) if is_parameter else view
                torch.utils.swap_tensors(tensor, new)


def regions_of(model: nn.Module, destinations: Mapping[str, Tensor]) -> list[WeightRegion]:
    """Returns the storages that the checkpoint fills, in the order of its names."""
    found: dict[int, WeightRegion] = {}
    expected = {_storage(each) for each in destinations.values()}
    for name, tensor in chain(model.named_parameters(), model.named_buffers()):
        if _storage(tensor) in expected:
            region = WeightRegion(name, tensor.untyped_storage().nbytes())
            found.setdefault(_storage(tensor), region).tensors[name] = tensor
    for name, tensor in destinations.items():
        found[_storage(tensor)].destinations[name] = tensor
    for name, module, tensor in _readers(model):
        if _storage(tensor) in found:
            _add_reader(found[_storage(tensor)], name, module, tensor)
    return sorted(found.values(), key=lambda region: min(region.destinations))


def _add_reader(region: WeightRegion, name: str, module: nn.Module, tensor: Tensor) -> None:
    if isinstance(module, MatmulModule) and tensor is module.weight:
        region.linears[name] = module
    elif isinstance(module, TokenEmbedding):
        region.embeddings[name] = module
    else:
        region.has_other_readers = True


def _readers(model: nn.Module) -> Iterator[tuple[str, nn.Module, Tensor]]:
    """Returns every module with each of its direct tensors; a shared tensor once per module."""
    for name, module in model.named_modules():
        for tensor in chain(module.parameters(recurse=False), module.buffers(recurse=False)):
            yield name, module, tensor


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata  # all addresses on the meta device are 0


def filled_bytes(
    region: WeightRegion,
    tensors: WeightSource,
    device: torch.device,
    readers: Executor | None = None,
) -> Tensor:
    """Returns the bytes of one storage, [num_bytes] uint8, on `device`. Raises CheckpointError."""
    filled = torch.empty(region.num_bytes, dtype=torch.uint8, device=device)
    first = next(iter(region.tensors.values()))
    if first.is_meta and not region.is_covered:
        filled.zero_()
    elif not region.is_covered:
        own = torch.empty(0, dtype=torch.uint8, device=first.device)
        filled.copy_(own.set_(first.untyped_storage()))
    views = {name: view_of(filled, each) for name, each in region.destinations.items()}
    fill(tensors, views, readers)
    return filled


def view_of(stored: Tensor, like: Tensor) -> Tensor:
    """Returns a view of `stored` with the dtype, shape, strides and offset that `like` has."""
    typed = stored.view(like.dtype)
    offset = typed.storage_offset() + like.storage_offset()
    return typed.as_strided(like.shape, like.stride(), offset)
