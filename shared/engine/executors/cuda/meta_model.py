"""A model's twin on the meta device: the same modules and forms of weights, without memory."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from itertools import chain
from typing import Any

import msgspec
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from kernels.ops import QuantizedWeight, SplitWeight
from shared.engine.layers.attention_inputs import ALIGNMENT
from shared.engine.models.decoder import Decoder

META = torch.device("meta")


def distinct_layers(model: Decoder, kind_of_layer: Sequence[int]) -> list[int]:
    """Returns the first layer of each set that launches the same kernels: with the same config,
    inputs of one kind, and weights of the same shapes and forms.
    """
    layers = zip(model.layer_config.layers, kind_of_layer, model.layers, strict=True)
    described = [(config, kind, _weights(layer)) for config, kind, layer in layers]
    return [index for index, each in enumerate(described) if described.index(each) == index]


def meta_model(model: Decoder, layers: Sequence[int]) -> Decoder:
    """Returns the twin of `model` with only these of its layers."""
    with _OnMeta():
        kept = nn.ModuleList(copy.deepcopy(model.layers[index]) for index in layers)
        twin = copy.deepcopy(model, {id(model.layers): kept})
    configs = tuple(model.layer_config.layers[index] for index in layers)
    twin.layer_config = msgspec.structs.replace(model.layer_config, layers=configs)
    return twin


class _OnMeta(TorchFunctionMode):
    """Copies of tensors are on the meta device, at the same offset in their storage."""

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if function is Tensor.clone:  # the argument is a parameter
            return _twin(args[0])
        if function is Tensor.__deepcopy__:
            tensor, memo = args
            return memo.setdefault(id(tensor), _twin(tensor))
        return function(*args, **(kwargs or {}))


def _twin(tensor: Tensor) -> Tensor:
    """[the same shape and strides]"""
    first = tensor.storage_offset()
    last = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
    storage = torch.empty(first + last + 1, dtype=tensor.dtype, device=META)
    return storage.as_strided(tensor.shape, tensor.stride(), first)


def _weights(layer: nn.Module) -> list[object]:
    """Returns what distinguishes one layer's kernels from those of another layer with the same
    config.
    """
    tensors = chain(layer.named_parameters(), layer.named_buffers())
    found: list[object] = [(name, *_form(each)) for name, each in tensors]
    for name, module in layer.named_modules():
        weight = getattr(module, "weight", None)
        if isinstance(weight, SplitWeight | QuantizedWeight):
            found.append((name, type(weight), weight.shape))
    return found


def _form(tensor: Tensor) -> tuple[object, ...]:
    misalignment = tensor.storage_offset() * tensor.itemsize % ALIGNMENT
    return tensor.dtype, tensor.shape, tensor.stride(), misalignment
