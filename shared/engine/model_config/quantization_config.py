"""Reads `quantization_config` of a checkpoint's config.json.

Served: compressed-tensors' `pack-quantized` (four and eight bits), `int-quantized` and
`float-quantized` (in blocks of 128 x 128, too); `fp8` in such blocks (DeepSeek-V3), per channel
(`fbgemm_fp8`) and per tensor; `awq` and `gptq`; `mxfp4` of experts (gpt-oss); all with or without a
KV cache in FP8; that alone too, also of ModelOpt.
Activations are not quantized, whatever the config says. Everything else is refused by name.
Sources: compressed-tensors' QuantizationConfig and QuantizationArgs; transformers'
FineGrainedFP8Config and FbgemmFp8Config; ModelOpt's export of HF checkpoints.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, NamedTuple, cast

import msgspec

from shared.engine.model_config.formats import (
    FP8_BLOCK,
    Fp8Block,
    Fp8Rows,
    Int4,
    Int8,
    Packed,
    WeightFormat,
)
from shared.engine.model_config.packed_formats_config import awq, gptq, mxfp4
from shared.engine.model_config.quantization import LINEAR, ConfigGroup, Quantization
from shared.engine.model_config.quantization_fields import (
    FIELD,
    check_patterns,
    patterns_of_parts,
    read_fields,
    refused,
    with_fused_parts,
)
from shared.errors import CheckpointError

_PACKED, _INTEGERS, _FLOATS = "pack-quantized", "int-quantized", "float-quantized"
_STATIC_ORDERS = (None, False, "static", "weight")  # orders that leave columns in their places


class _Weights(msgspec.Struct):
    num_bits: int
    type: str = "int"
    symmetric: bool = True
    strategy: str | None = None
    group_size: int | None = None
    block_structure: tuple[int, ...] | None = None
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


class _WrittenGroup(msgspec.Struct):
    targets: tuple[str, ...]
    weights: _Weights | None = None
    input_activations: dict[str, Any] | None = None
    output_activations: dict[str, Any] | None = None
    format: str | None = None


class _CompressedTensors(msgspec.Struct):
    config_groups: dict[str, _WrittenGroup]
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
            return _compressed_tensors(read_fields(written, _CompressedTensors), scale_dtype(given))
        case "fp8":
            return _fp8(read_fields(written, _Fp8))
        case "fbgemm_fp8":
            kept = read_fields(written, _Fp8).modules_to_not_convert or ()
            return CheckpointFormats(_fp8_rows(kept, is_per_tensor=False))
        case "awq":
            return CheckpointFormats(awq(written))
        case "gptq":
            return CheckpointFormats(gptq(written))
        case "mxfp4":
            return CheckpointFormats(mxfp4(written))
        case "modelopt":
            fields = read_fields(written, _ModelOpt)
            return _modelopt(read_fields(fields.quantization or written, _ModelOpt))
    raise refused(f"quant_method {method!r} is not supported")


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
        raise refused(f"quant_algo {fields.quant_algo!r} of modelopt is not supported")
    if fields.kv_cache_quant_algo not in (None, "FP8"):
        algorithm = fields.kv_cache_quant_algo
        raise refused(f"kv_cache_quant_algo {algorithm!r} of modelopt is not supported")
    is_named = fields.kv_cache_quant_algo is not None
    if fields.config_groups or not (_has_fp8_kv(fields.kv_cache_scheme) or is_named):
        raise refused("quant_method 'modelopt' is not supported but for a KV cache alone")
    return CheckpointFormats(has_fp8_kv=True)


def _compressed_tensors(
    fields: _CompressedTensors, scale: Literal["BF16", "F32"]
) -> CheckpointFormats:
    has_fp8_kv = _has_fp8_kv(fields.kv_cache_scheme)
    for name in ("sparsity_config", "transform_config"):
        if not _is_empty(getattr(fields, name)):
            raise refused(f"{name} of compressed-tensors is not supported")
    if not fields.config_groups and has_fp8_kv:
        return CheckpointFormats(has_fp8_kv=True)
    if not fields.config_groups:
        raise CheckpointError(f"{FIELD}: config_groups is empty")
    groups = [
        _config_group(name, group, fields.format, scale)
        for name, group in fields.config_groups.items()
    ]
    ignored = with_fused_parts(fields.ignore or ())
    check_patterns((*ignored, *(target for group in groups for target in group.targets)))
    weights = Quantization(groups=tuple(groups), ignored=ignored)
    return CheckpointFormats(weights, has_fp8_kv)


def _is_empty(section: dict[str, Any] | None) -> bool:
    return not section or section.get("format") == "dense"


def _config_group(
    name: str, group: _WrittenGroup, outer_format: str | None, scale: Literal["BF16", "F32"]
) -> ConfigGroup:
    stored, weights = group.format or outer_format, group.weights
    if stored not in (_PACKED, _INTEGERS, _FLOATS):
        raise refused(f"format {stored!r} of compressed-tensors is not supported")
    if weights is None:
        raise CheckpointError(f"{FIELD}: {name} has no weights")
    _check_activations(name, group, stored)
    kind = weights.type, weights.num_bits
    if kind not in _KINDS[stored]:
        raise refused(
            f"{name}: {weights.type} of num_bits {weights.num_bits} is not supported as {stored}"
        )
    if weights.actorder not in (*_STATIC_ORDERS, *(("group",) if stored == _PACKED else ())):
        raise refused(f"{name}: actorder {weights.actorder!r} is not supported")
    targets = with_fused_parts(group.targets)
    return ConfigGroup(targets=targets, form=_format(name, weights, stored, scale))


_KINDS = {
    _PACKED: (("int", 4), ("int", 8)),
    _INTEGERS: (("int", 8),),
    _FLOATS: (("float", 8),),
}


def _check_activations(name: str, group: _WrittenGroup, stored: str) -> None:
    """Weights that are stored for activations of eight bits are served with others."""
    given = group.input_activations
    is_known = given is None or (stored != _PACKED and given.get("num_bits") == 8)
    if not is_known or group.output_activations is not None:
        raise refused(f"quantized activations ({name}) are not supported")


def _format(
    name: str, weights: _Weights, stored: str, scale: Literal["BF16", "F32"]
) -> WeightFormat:
    size, strategy = weights.group_size, weights.strategy
    if strategy is None:
        strategy = "group" if size and size > 0 else "channel"
    if strategy not in _STRATEGIES[stored]:
        raise refused(f"{name}: strategy {strategy!r} of {stored} is not supported")
    if strategy == "group" and (size is None or size < 1):
        raise CheckpointError(f"{FIELD}: {name}: group_size {size} is not positive")
    group = size if strategy == "group" and size is not None else 0
    is_per_tensor, is_symmetric = strategy == "tensor", weights.symmetric
    if stored == _FLOATS:
        if not is_symmetric:
            raise refused(f"{name}: asymmetric {stored} is not supported")
        if strategy == "block":
            _check_block(f"{name}: block_structure", weights.block_structure)
            return Fp8Block(scale="weight_scale")
        return Fp8Rows(is_per_tensor=is_per_tensor, scale_dtype=scale)
    if stored == _INTEGERS:
        return Int8(
            group=group, is_symmetric=is_symmetric, is_per_tensor=is_per_tensor, scale_dtype=scale
        )
    is_ordered = weights.actorder == "group" and group > 0
    if weights.num_bits == 4 and not is_ordered:
        return Int4(group=group, is_symmetric=is_symmetric, scale_dtype=scale)
    return Packed(
        num_bits=cast(Literal[4, 8], weights.num_bits),
        group=group,
        is_symmetric=is_symmetric,
        is_ordered=is_ordered,
        scale_dtype=scale,
    )


_STRATEGIES = {
    _PACKED: ("group", "channel"),
    _INTEGERS: ("group", "channel", "tensor"),
    _FLOATS: ("channel", "tensor", "block"),
}


def _check_block(name: str, size: tuple[int, ...] | None) -> None:
    if size != (FP8_BLOCK, FP8_BLOCK):
        raise refused(f"{name} {None if size is None else list(size)} is not supported")


def _fp8(fields: _Fp8) -> CheckpointFormats:
    has_fp8_kv = _has_fp8_kv(fields.kv_cache_scheme)
    kept = fields.modules_to_not_convert or fields.ignored_layers or ()
    if fields.fmt != "e4m3":
        raise refused(f"fp8 with fmt {fields.fmt!r} is not supported")
    if fields.activation_scheme not in ("dynamic", "static"):
        raise refused(f"fp8 with activation_scheme {fields.activation_scheme!r} is not supported")
    if fields.weight_block_size is None:
        return CheckpointFormats(_fp8_rows(kept, is_per_tensor=True), has_fp8_kv)
    _check_block("fp8 with weight_block_size", fields.weight_block_size)
    groups = (ConfigGroup(targets=(LINEAR,), form=Fp8Block()),)
    return CheckpointFormats(Quantization(groups=groups, ignored=_kept(kept)), has_fp8_kv)


def _fp8_rows(kept: tuple[str, ...], *, is_per_tensor: bool) -> Quantization:
    form = Fp8Rows(is_per_tensor=is_per_tensor)
    return Quantization(groups=(ConfigGroup(targets=(LINEAR,), form=form),), ignored=_kept(kept))


def _kept(parts: tuple[str, ...]) -> tuple[str, ...]:
    return patterns_of_parts(dict.fromkeys(("lm_head", *parts)))


def scale_dtype(given: Mapping[str, Any]) -> Literal["BF16", "F32"]:
    """Returns the dtype of scales. compressed-tensors stores scales in the model's dtype."""
    text = given.get("text_config")
    for fields in (given, text if isinstance(text, dict) else {}):
        for name in ("dtype", "torch_dtype"):
            if fields.get(name) is not None:
                return "BF16" if fields[name] == "bfloat16" else "F32"
    return "F32"
