"""Checks a checkpoint's quantized weights against the formats that its config gives them.

Which layers are quantized is read from the tensors that are there: where these and the config
disagree, computing with either would be silently wrong.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from shared.engine.model_config.formats import (
    EXPONENTS,
    ORDERS,
    SCALES,
    WORD_BITS,
    Gptq,
    WeightFormat,
    group_of,
    units_of,
)
from shared.engine.model_config.quantization import LINEAR, Quantization
from shared.engine.parallel.cuts import WHOLE, Cut
from shared.engine.weights.weight_source import Content, TensorInfo, WeightSource
from shared.errors import CheckpointError

FLOATS = ("BF16", "F16", "F32")
SHAPE = "weight_shape"
NAN_EXPONENT = 255
_COUNTED = (*SCALES, EXPONENTS, *ORDERS, "qzeros")  # tensors whose numbers are checked
_PARTS = ("qweight", "qzeros", "scales", "g_idx")
_ACTIVATIONS = ("input_scale", "activation_scale", "input_zero_point")  # not quantized here
# A tensor that alone determines the format of its layer -> the format.
_MARKS = {
    "weight_global_scale": "NVFP4 (weight_global_scale)",
    "weight_g_idx": "packed with an order of columns (weight_g_idx, actorder)",
    "qweight": "AWQ or GPTQ (qweight)",
    "weight_packed": "packed (weight_packed)",
    "weight_blocks": "mxfp4 (weight_blocks)",
    EXPONENTS: "mxfp4 (weight_blocks)",
    "weight_scale_inv": "fp8 (weight_scale_inv)",
}


class QuantizedTensors:
    """A `WeightSource` of the same tensors, without the shapes of packed ones: these are checked.

    `destinations` have the model's names of all tensors that it reads.
    """

    def __init__(
        self, tensors: WeightSource, quantization: Quantization, destinations: Mapping[str, Tensor]
    ) -> None:
        """Raises CheckpointError."""
        self._tensors = tensors
        self._destinations = destinations
        self._quantization = quantization
        layers = _layers(destinations)
        self._names = [name for name in tensors.names() if self._is_read(name, layers)]
        found = _layers(tensors.names())
        _check_groups(quantization, layers)
        for layer in sorted(layers.keys() & found.keys()):
            _check_layer(tensors, layer, layers[layer], found[layer], quantization)
        for name in tensors.names():
            if name.rpartition(".")[2] in SCALES and name in destinations:
                _check_scale(tensors, name, destinations[name].dtype)
        for name in tensors.names():
            if name.endswith(f".{SHAPE}"):
                layer = name.removesuffix(f".{SHAPE}")
                _check_shape(tensors, layer, destinations, quantization.format_of(layer))

    def names(self) -> list[str]:
        return self._names

    def files(self) -> list[Path]:
        return self._tensors.files()

    def path(self, name: str) -> Path:
        return self._tensors.path(name)

    def info(self, name: str) -> TensorInfo:
        """One number may have any shape of one element."""
        dtype, shape = self._tensors.info(name)
        destination = self._destinations.get(name)
        is_one = destination is not None and destination.shape == (1,)
        return TensorInfo(dtype, (1,) if is_one and set(shape) <= {1} else shape)

    def content(self, name: str) -> Content:
        return self._tensors.content(name)

    def read_into(self, name: str, cut: Cut, out: Tensor) -> None:
        """Raises CheckpointError also for scales that are no numbers, and for zeros and orders that
        contradict the config.
        """
        full = self._tensors.info(name).shape
        stored = out.view(full) if set(full) <= {1} else out
        self._tensors.read_into(name, cut, stored)
        layer, _, kind = name.rpartition(".")
        if kind not in _COUNTED:
            return
        form, where = self._quantization.format_of(layer), f"{self.path(name)}: tensor {name}"
        if kind in (*SCALES, EXPONENTS):
            _check_numbers(where, out)
        elif kind in ORDERS and form is not None:
            _check_order(where, out, form)
        elif isinstance(form, Gptq) and form.is_symmetric:
            _check_zeros(where, out, form)

    def row_cuts(self, name: str) -> Sequence[Cut]:
        return (WHOLE,) if name.rpartition(".")[2] in _COUNTED else self._tensors.row_cuts(name)

    def _is_read(self, name: str, layers: Mapping[str, set[str]]) -> bool:
        """Whether a tensor is read later; shapes, and orders of a layer without one, are checked
        now. Activations are not quantized.
        """
        layer, _, kind = name.rpartition(".")
        if kind == SHAPE:
            return False
        is_quantized = layer in layers and self._quantization.format_of(layer) is not None
        return not (is_quantized and kind in ("g_idx", *_ACTIVATIONS)) or kind in layers[layer]


def _check_numbers(where: str, scales: Tensor) -> None:
    is_good = scales != NAN_EXPONENT if scales.dtype == torch.uint8 else scales.isfinite()
    num_bad = scales.numel() - int(is_good.sum())
    if num_bad:
        raise CheckpointError(f"{where}: {num_bad} of {scales.numel()} scales are NaN or infinite")


def _check_order(where: str, order: Tensor, form: WeightFormat) -> None:
    group = group_of(form)
    num_groups = len(order) // group if group else 1
    least, largest = int(order.min()), int(order.max())
    if least < 0 or largest >= num_groups:
        raise CheckpointError(
            f"{where} has groups {least} to {largest}, but there are {num_groups}"
        )


def _check_zeros(where: str, zeros: Tensor, form: Gptq) -> None:
    zero = (1 << form.num_bits - 1) - form.is_offset
    word = sum(zero << at for at in range(0, WORD_BITS, form.num_bits))
    signed = word - (1 << WORD_BITS) if word >> WORD_BITS - 1 else word
    if bool((zeros != signed).any()):
        raise CheckpointError(
            f"{where} has zeros other than {zero}, which sym and checkpoint_format require"
        )


def _layers(names: Iterable[str]) -> dict[str, set[str]]:
    """Returns the ends of the names of each layer's weights."""
    found: dict[str, set[str]] = {}
    for name in names:
        layer, _, kind = name.rpartition(".")
        if kind.startswith("weight") or kind in _PARTS:
            found.setdefault(layer, set()).add(kind)
    return found


def _check_layer(
    tensors: WeightSource,
    layer: str,
    expected: set[str],
    found: set[str],
    quantization: Quantization,
) -> None:
    path = tensors.path(f"{layer}.{min(found)}")
    form = quantization.format_of(layer) if expected != {"weight"} else None
    units = {} if form is None else units_of(form)
    dtype = units["weight"].dtype if "weight" in units else FLOATS[0]
    wanted, present = _described(expected, dtype), _present(tensors, layer, found)
    if wanted != present:
        is_always_dense = wanted == "dense" and quantization.format_of(layer) is not None
        reason = f"quantization_config {quantization.reason(layer)}"
        raise CheckpointError(
            f"{path}: {layer} is {present}, but "
            f"{'only its dense form is supported' if is_always_dense else reason}"
        )
    for missing in sorted(expected - found):
        raise CheckpointError(
            f"{path}: tensor {layer}.{missing} is missing beside "
            f"{', '.join(sorted(found & expected))}"
        )
    if isinstance(form, Gptq) and "g_idx" in found - expected:
        _check_no_order(tensors, f"{layer}.g_idx", form)
        found = found - {"g_idx"}
    for surplus in sorted(found - expected - {SHAPE}):
        raise CheckpointError(
            f"{path}: tensor {layer}.{surplus} is unexpected: quantization_config "
            f"{quantization.reason(layer)}"
        )


def _check_no_order(tensors: WeightSource, name: str, form: Gptq) -> None:
    """Raises CheckpointError if the columns of a group are not neighbours."""
    dtype, shape = tensors.info(name)
    where = f"{tensors.path(name)}: tensor {name}"
    if dtype != "I32" or len(shape) != 1:
        raise CheckpointError(
            f"{where} is {dtype} of shape {list(shape)}, not I32 of one dimension"
        )
    groups = torch.empty(shape, dtype=torch.int32)
    tensors.read_into(name, WHOLE, groups)
    in_order = torch.arange(len(groups)) // (form.group or max(len(groups), 1))
    if not torch.equal(groups, in_order.int()):
        raise CheckpointError(f"{where} is an order of columns, but desc_act is false")


def _present(tensors: WeightSource, layer: str, found: set[str]) -> str:
    dtype = tensors.info(f"{layer}.weight").dtype if "weight" in found else FLOATS[0]
    return _described(found, dtype)


def _described(kinds: set[str], weight_dtype: str) -> str:
    for kind, described in _MARKS.items():
        if kind in kinds:
            return described
    if "weight_scale" in kinds or weight_dtype not in FLOATS:
        scale = " (weight_scale)" if "weight_scale" in kinds else ""
        return f"{weight_dtype}{scale}"
    return "packed (weight_packed)" if "weight_zero_point" in kinds else "dense"


def _check_scale(tensors: WeightSource, name: str, stored: torch.dtype) -> None:
    """Scales are never rounded."""
    dtype, _ = tensors.info(name)
    where = f"{tensors.path(name)}: tensor {name} is {dtype}"
    if dtype not in FLOATS:
        raise CheckpointError(f"{where}; scales are {', '.join(FLOATS)}")
    for half, named in ((torch.bfloat16, "BF16"), (torch.float16, "F16")):
        if stored == half and dtype != named:
            raise CheckpointError(f"{where}, but the config or other scales make it {named}")


def _check_groups(quantization: Quantization, layers: Mapping[str, set[str]]) -> None:
    """Checks that groups of compressed-tensors have layers; `dynamic` of GPTQ may list what a model
    does not have.
    """
    for group in quantization.groups:
        if group.targets == (LINEAR,) or isinstance(group.form, Gptq | None):
            continue
        if not any(quantization.has_format_of(layer, group) for layer in layers):
            raise CheckpointError(
                f"quantization_config: no layer is matched by the targets {list(group.targets)}"
            )
    if all(quantization.format_of(layer) is None for layer in layers):
        raise CheckpointError(
            f"quantization_config ignores all layers: {list(quantization.ignored)}"
        )


def _check_shape(
    tensors: WeightSource,
    layer: str,
    destinations: Mapping[str, Tensor],
    form: WeightFormat | None,
) -> None:
    """Checks `weight_shape`, the shape of the weight before packing."""
    packed = destinations.get(f"{layer}.weight_packed")
    if packed is None:
        return
    name = f"{layer}.{SHAPE}"
    where = f"{tensors.path(name)}: tensor {name}"
    _, shape = tensors.info(name)
    if shape != (2,):
        raise CheckpointError(f"{where} has shape {list(shape)}, not [2]")
    values = torch.empty(2, dtype=torch.int64)
    tensors.read_into(name, WHOLE, values)
    rows, width = values.tolist()
    codes = WORD_BITS // getattr(form, "num_bits", 4)
    if (rows, -(-width // codes)) != tuple(packed.shape):
        raise CheckpointError(
            f"{where} is [{rows}, {width}], but weight_packed must be {list(packed.shape)}"
        )
