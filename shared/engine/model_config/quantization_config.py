"""Reads `quantization_config` of a checkpoint's config.json.

Served: `compressed-tensors` with format `pack-quantized` of four bits, and `fp8` in blocks of
128 x 128 (DeepSeek-V3), both with or without a KV cache in FP8; that alone too, also of ModelOpt.
Activations are not quantized. Everything else is refused by name.
Sources: compressed-tensors' QuantizationConfig and QuantizationArgs; transformers'
FineGrainedFP8Config; ModelOpt's export of HF checkpoints.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple, TypeVar

import msgspec

from shared.engine.model_config.formats import FP8_BLOCK, Fp8Block, Int4
from shared.engine.model_config.quantization import LINEAR, ConfigGroup, Quantization
from shared.errors import CheckpointError

FIELD = "quantization_config"
SUPPORTED = (
    "only compressed-tensors (pack-quantized, 4 bits) and fp8 (weight_block_size [128, 128]) are"
)
_PACKED = "pack-quantized"
_STATIC_ORDERS = (None, False, "static", "weight")  # orders that leave columns in their places
_T = TypeVar("_T")


class _Weights(msgspec.Struct):
    num_bits: int
    type: str = "int"
    symmetric: bool = True
    strategy: str | None = None
    group_size: int | None = None
    actorder: str | bool | None = None


class _KvCache(msgspec.Struct):
    """Scales are one of a tensor, or one of each head."""

    num_bits: int
    type: str = "int"
    strategy: str | None = None
    dynamic: bool | str | None = None
    symmetric: bool | None = None

    @property
    def is_served(self) -> bool:
        is_e4m3 = (self.num_bits, self.type) == (8, "float")
        has_scales = self.strategy in (None, "tensor", "attn_head") and not self.dynamic
        return is_e4m3 and has_scales and self.symmetric is not False


class _Group(msgspec.Struct):
    targets: tuple[str, ...]
    weights: _Weights | None = None
    input_activations: dict[str, Any] | None = None
    output_activations: dict[str, Any] | None = None
    format: str | None = None


class _CompressedTensors(msgspec.Struct):
    config_groups: dict[str, _Group]
    format: str | None = None
    ignore: tuple[str, ...] | None = None
    kv_cache_scheme: _KvCache | None = None
    sparsity_config: dict[str, Any] | None = None
    transform_config: dict[str, Any] | None = None


class _Fp8(msgspec.Struct):
    weight_block_size: tuple[int, ...] | None = None
    activation_scheme: str = "dynamic"
    fmt: str = "e4m3"
    modules_to_not_convert: tuple[str, ...] | None = None
    ignored_layers: tuple[str, ...] | None = None
    kv_cache_scheme: _KvCache | None = None


class _ModelOpt(msgspec.Struct):
    """ModelOpt's fields. Older exports have them within `quantization`."""

    config_groups: dict[str, Any] | None = None
    quant_algo: str | None = None
    kv_cache_quant_algo: str | None = None
    kv_cache_scheme: _KvCache | None = None
    quantization: dict[str, Any] | None = None


class CheckpointFormats(NamedTuple):
    """The formats of a checkpoint. `weights` is None if they are dense. If it `has_fp8_kv`, the
    checkpoint is made for a KV cache in FP8.
    """

    weights: Quantization | None = None
    has_fp8_kv: bool = False


def checkpoint_formats(given: Mapping[str, Any]) -> CheckpointFormats:
    """Reads the formats from config.json. Raises CheckpointError."""
    written = _written(given)
    if written is None:
        return CheckpointFormats()
    method = written.get("quant_method")
    match method:
        case "compressed-tensors":
            return _compressed_tensors(_read(written, _CompressedTensors), scale_dtype(given))
        case "fp8":
            return _fp8(_read(written, _Fp8))
        case "modelopt":
            fields = _read(written, _ModelOpt)
            return _modelopt(_read(fields.quantization or written, _ModelOpt))
    raise _refused(f"quant_method {method!r} is not supported")


def _written(given: Mapping[str, Any]) -> dict[str, Any] | None:
    """Returns the field of the model or of its language model: either may have it, and both if they
    agree.
    """
    text = given.get("text_config")
    inner = text.get(FIELD) if isinstance(text, dict) else None
    found = [each for each in (given.get(FIELD), inner) if each is not None and each != {}]
    for each in found:
        if not isinstance(each, dict):
            raise CheckpointError(f"{FIELD} {each!r} is not an object")
    if len(found) > 1 and found[0] != found[1]:
        raise CheckpointError(f"{FIELD} and text_config.{FIELD} disagree: {_difference(*found)}")
    return found[0] if found else None


def _difference(outer: dict[str, Any], inner: dict[str, Any]) -> str:
    keys = sorted(outer.keys() | inner.keys())
    key = next(key for key in keys if outer.get(key) != inner.get(key))
    one, other = outer.get(key), inner.get(key)
    if isinstance(one, dict) and isinstance(other, dict):
        return f"{key}: {_difference(one, other)}"
    return f"{key} is {one!r} and {other!r}"


def _read(written: dict[str, Any], kind: type[_T]) -> _T:
    try:
        return msgspec.convert(written, kind)
    except msgspec.ValidationError as error:
        raise CheckpointError(f"{FIELD}: {error}") from None


def _has_fp8_kv(scheme: _KvCache | None) -> bool:
    if scheme is not None and not scheme.is_served:
        fields = msgspec.structs.asdict(scheme).items()
        named = ", ".join(f"{name} {value!r}" for name, value in fields if value is not None)
        raise CheckpointError(
            f"{FIELD}: kv_cache_scheme of {named} is not supported, only float of num_bits 8 with "
            "a stored scale of a tensor or of each attn_head"
        )
    return scheme is not None


def _modelopt(fields: _ModelOpt) -> CheckpointFormats:
    """Reads ModelOpt's format, which may describe only a KV cache."""
    if fields.quant_algo is not None:
        raise _refused(f"quant_algo {fields.quant_algo!r} of modelopt is not supported")
    if fields.kv_cache_quant_algo not in (None, "FP8"):
        algorithm = fields.kv_cache_quant_algo
        raise _refused(f"kv_cache_quant_algo {algorithm!r} of modelopt is not supported")
    is_named = fields.kv_cache_quant_algo is not None
    if fields.config_groups or not (_has_fp8_kv(fields.kv_cache_scheme) or is_named):
        raise _refused("quant_method 'modelopt' is not supported but for a KV cache alone")
    return CheckpointFormats(has_fp8_kv=True)


def _compressed_tensors(
    fields: _CompressedTensors, scale: Literal["BF16", "F32"]
) -> CheckpointFormats:
    has_fp8_kv = _has_fp8_kv(fields.kv_cache_scheme)
    for name in ("sparsity_config", "transform_config"):
        if not _is_empty(getattr(fields, name)):
            raise _refused(f"{name} of compressed-tensors is not supported")
    if not fields.config_groups and has_fp8_kv:
        return CheckpointFormats(has_fp8_kv=True)
    if not fields.config_groups:
        raise CheckpointError(f"{FIELD}: config_groups is empty")
    groups = [
        _config_group(name, group, fields.format, scale)
        for name, group in fields.config_groups.items()
    ]
    for group in groups:
        _check_patterns(group.targets)
    _check_patterns(fields.ignore or ())
    weights = Quantization(groups=tuple(groups), ignored=fields.ignore or ())
    return CheckpointFormats(weights, has_fp8_kv)


def _is_empty(section: dict[str, Any] | None) -> bool:
    return not section or section.get("format") == "dense"


def _config_group(
    name: str, group: _Group, outer_format: str | None, scale: Literal["BF16", "F32"]
) -> ConfigGroup:
    stored = group.format or outer_format
    if stored != _PACKED:
        raise _refused(f"format {stored!r} of compressed-tensors is not supported")
    if group.input_activations is not None or group.output_activations is not None:
        raise _refused(f"quantized activations ({name}) are not supported")
    weights = group.weights
    if weights is None:
        raise CheckpointError(f"{FIELD}: {name} has no weights")
    if weights.type != "int" or weights.num_bits != 4:
        raise _refused(f"{name}: {weights.type} of num_bits {weights.num_bits} is not supported")
    if weights.actorder not in _STATIC_ORDERS:
        raise _refused(f"{name}: actorder {weights.actorder!r} is not supported")
    form = Int4(group=_group_size(name, weights), is_symmetric=weights.symmetric, scale_dtype=scale)
    return ConfigGroup(targets=group.targets, form=form)


def _group_size(name: str, weights: _Weights) -> int:
    """Returns the columns of a scale; 0 for a scale per row."""
    size = weights.group_size
    strategy = weights.strategy or ("group" if size and size > 0 else "channel")
    if strategy == "channel":
        return 0
    if strategy != "group":
        raise _refused(f"{name}: strategy {strategy!r} of int4 is not supported")
    if size is None or size < 1:
        raise CheckpointError(f"{FIELD}: {name}: group_size {size} is not positive")
    return size


def _fp8(fields: _Fp8) -> CheckpointFormats:
    has_fp8_kv = _has_fp8_kv(fields.kv_cache_scheme)
    if fields.weight_block_size is None:
        raise _refused("fp8 per tensor (no weight_block_size) is not supported")
    if fields.weight_block_size != (FP8_BLOCK, FP8_BLOCK):
        sizes = list(fields.weight_block_size)
        raise _refused(f"fp8 with weight_block_size {sizes} is not supported")
    if fields.activation_scheme != "dynamic":
        raise _refused(f"fp8 with activation_scheme {fields.activation_scheme!r} is not supported")
    if fields.fmt != "e4m3":
        raise _refused(f"fp8 with fmt {fields.fmt!r} is not supported")
    kept = fields.modules_to_not_convert or fields.ignored_layers or ()
    parts = dict.fromkeys(("lm_head", *kept))
    patterns = tuple(rf"re:(.*\.)?{re.escape(each)}(\.|$)" for each in parts)
    groups = (ConfigGroup(targets=(LINEAR,), form=Fp8Block()),)
    return CheckpointFormats(Quantization(groups=groups, ignored=patterns), has_fp8_kv)


def _check_patterns(names: tuple[str, ...]) -> None:
    for name in names:
        if name.startswith("re:"):
            try:
                re.compile(name.removeprefix("re:"))
            except re.error as error:
                raise CheckpointError(f"{FIELD}: {name!r} is no pattern: {error}") from None


def scale_dtype(given: Mapping[str, Any]) -> Literal["BF16", "F32"]:
    """Returns the dtype of scales. compressed-tensors stores scales in the model's dtype."""
    text = given.get("text_config")
    for fields in (given, text if isinstance(text, dict) else {}):
        for name in ("dtype", "torch_dtype"):
            if fields.get(name) is not None:
                return "BF16" if fields[name] == "bfloat16" else "F32"
    return "F32"


def _refused(reason: str) -> CheckpointError:
    return CheckpointError(f"{FIELD}: {reason}; {SUPPORTED}")
