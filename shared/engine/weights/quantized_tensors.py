"""Checks a checkpoint's quantized weights against the formats that its config gives them.

Which layers are quantized is read from the tensors that are there: where these and the config
disagree, computing with either would be silently wrong.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from shared.engine.model_config.quantization import LINEAR, Quantization
from shared.engine.parallel.cuts import WHOLE, Cut
from shared.engine.weights.weight_source import Content, TensorInfo, WeightSource
from shared.errors import CheckpointError

FLOATS = ("BF16", "F16", "F32")
SHAPE = "weight_shape"
SCALES = ("weight_scale", "weight_scale_inv")
_CODES = 8  # codes of four bits in an int32
# The field of a layer that a tensor beside it, or instead of its weight, determines.
_FOREIGN = {
    "weight_g_idx": "an order of columns (weight_g_idx, actorder)",
    "qweight": "AWQ or GPTQ (qweight)",
    "weight_global_scale": "NVFP4 (weight_global_scale)",
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
        self._names = [name for name in tensors.names() if not name.endswith(f".{SHAPE}")]
        layers = _layers(destinations)
        found = _layers(tensors.names())
        _check_groups(quantization, layers)
        for layer in sorted(layers.keys() & found.keys()):
            _check_layer(tensors, layer, layers[layer], found[layer], quantization)
        for name in tensors.names():
            if name.rpartition(".")[2] in SCALES and name in destinations:
                _check_scale(tensors, name, destinations[name].dtype)
        for name in tensors.names():
            if name.endswith(f".{SHAPE}"):
                _check_shape(tensors, name.removesuffix(f".{SHAPE}"), destinations)

    def names(self) -> list[str]:
        return self._names

    def files(self) -> list[Path]:
        return self._tensors.files()

    def path(self, name: str) -> Path:
        return self._tensors.path(name)

    def info(self, name: str) -> TensorInfo:
        return self._tensors.info(name)

    def content(self, name: str) -> Content:
        return self._tensors.content(name)

    def read_into(self, name: str, cut: Cut, out: Tensor) -> None:
        """Raises CheckpointError also for scales that are no numbers."""
        self._tensors.read_into(name, cut, out)
        if name.rpartition(".")[2] in SCALES:
            num_bad = out.numel() - int(out.isfinite().sum())
            if num_bad:
                raise CheckpointError(
                    f"{self.path(name)}: tensor {name}: {num_bad} of {out.numel()} scales are NaN "
                    "or infinite"
                )

    def row_cuts(self, name: str) -> Sequence[Cut]:
        is_counted = name.rpartition(".")[2] in SCALES
        return (WHOLE,) if is_counted else self._tensors.row_cuts(name)


def _layers(names: Iterable[str]) -> dict[str, set[str]]:
    """Returns the ends of the names of each layer's weights."""
    found: dict[str, set[str]] = {}
    for name in names:
        layer, _, kind = name.rpartition(".")
        if kind.startswith("weight") or kind in _FOREIGN:
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
    wanted, present = _form(expected, FLOATS[0]), _present(tensors, layer, found)
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
    for surplus in sorted(found - expected - {SHAPE}):
        raise CheckpointError(
            f"{path}: tensor {layer}.{surplus} is unexpected: quantization_config "
            f"{quantization.reason(layer)}"
        )


def _present(tensors: WeightSource, layer: str, found: set[str]) -> str:
    dtype = tensors.info(f"{layer}.weight").dtype if "weight" in found else FLOATS[0]
    return _form(found, dtype)


def _form(kinds: set[str], weight_dtype: str) -> str:
    for kind, described in _FOREIGN.items():
        if kind in kinds:
            return described
    if kinds & {"weight_packed", "weight_zero_point"}:
        return "int4 (weight_packed)"
    if "weight_scale_inv" in kinds:
        return "fp8 in blocks (weight_scale_inv)"
    if "weight_scale" in kinds or weight_dtype not in FLOATS:
        scale = " (weight_scale)" if "weight_scale" in kinds else ""
        return f"{weight_dtype}{scale}"
    return "dense"


def _check_scale(tensors: WeightSource, name: str, stored: torch.dtype) -> None:
    """Scales are never rounded."""
    dtype, _ = tensors.info(name)
    where = f"{tensors.path(name)}: tensor {name} is {dtype}"
    if dtype not in FLOATS:
        raise CheckpointError(f"{where}; scales are {', '.join(FLOATS)}")
    if stored == torch.bfloat16 and dtype != "BF16":
        raise CheckpointError(f"{where}, but the config's dtype makes it BF16")


def _check_groups(quantization: Quantization, layers: Mapping[str, set[str]]) -> None:
    forms = {layer: quantization.format_of(layer) for layer in layers}
    for group in quantization.groups:
        is_used = any(form == group.form and group.matches(layer) for layer, form in forms.items())
        if not is_used and group.targets != (LINEAR,):
            raise CheckpointError(
                f"quantization_config: no layer is matched by the targets {list(group.targets)}"
            )
    if not any(forms.values()):
        raise CheckpointError(
            f"quantization_config ignores all layers: {list(quantization.ignored)}"
        )


def _check_shape(tensors: WeightSource, layer: str, destinations: Mapping[str, Tensor]) -> None:
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
    if (rows, -(-width // _CODES)) != tuple(packed.shape):
        raise CheckpointError(
            f"{where} is [{rows}, {width}], but weight_packed must be {list(packed.shape)}"
        )
