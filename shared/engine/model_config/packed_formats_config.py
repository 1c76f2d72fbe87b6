"""Reads `quantization_config` of AWQ and GPTQ checkpoints, and of gpt-oss in MXFP4.

Sources: AutoAWQ's AwqConfig; GPTQModel's QuantizeConfig, whose `dynamic` maps regular expressions
of layers to their own fields ("+:" or nothing before them) or excludes them ("-:"), the first that
matches; optimum's `modules_in_block_to_quantize`.
"""

from __future__ import annotations

from typing import Any, Literal, cast

import msgspec

from shared.engine.model_config.formats import Awq, Gptq, Mxfp4
from shared.engine.model_config.quantization import (
    LINEAR,
    PATTERN,
    ConfigGroup,
    Quantization,
)
from shared.engine.model_config.quantization_fields import (
    FIELD,
    check_patterns,
    patterns_of_parts,
    read_fields,
    refused,
)
from shared.errors import CheckpointError

_EXCLUDED, _OWN = "-:", "+:"


class _Awq(msgspec.Struct):
    bits: int | None = None
    w_bit: int | None = None
    group_size: int | None = None
    q_group_size: int | None = None
    zero_point: bool = True
    version: str = "gemm"
    modules_to_not_convert: tuple[str, ...] | None = None


class _Gptq(msgspec.Struct):
    bits: int
    group_size: int = 128
    desc_act: bool = False
    sym: bool = True
    checkpoint_format: str = "gptq"
    is_marlin_format: bool = False
    lm_head: bool = False
    pack_dtype: str = "int32"
    dynamic: dict[str, dict[str, Any]] | None = None
    modules_in_block_to_quantize: tuple[tuple[str, ...], ...] | None = None
    modules_to_not_convert: tuple[str, ...] | None = None


def awq(written: dict[str, Any]) -> Quantization:
    """Raises CheckpointError."""
    fields = read_fields(written, _Awq)
    bits = fields.w_bit if fields.bits is None else fields.bits
    if bits != 4:
        raise refused(f"awq of bits {bits} is not supported")
    if fields.version.lower() != "gemm":
        raise refused(f"awq of version {fields.version!r} is not supported")
    if not fields.zero_point:
        raise refused("awq without zero_point is not supported")
    size = fields.q_group_size if fields.group_size is None else fields.group_size
    form = Awq(group=_group("awq", 128 if size is None else size))
    kept = dict.fromkeys(("lm_head", *(fields.modules_to_not_convert or ())))
    group = ConfigGroup(targets=(LINEAR,), form=form)
    return Quantization(groups=(group,), ignored=patterns_of_parts(kept))


def gptq(written: dict[str, Any]) -> Quantization:
    """Raises CheckpointError."""
    fields = read_fields(written, _Gptq)
    stored = "marlin" if fields.is_marlin_format else fields.checkpoint_format
    if stored not in ("gptq", "gptq_v2"):
        raise refused(f"gptq of checkpoint_format {stored!r} is not supported")
    if fields.pack_dtype != "int32":
        raise refused(f"gptq of pack_dtype {fields.pack_dtype!r} is not supported")
    if fields.lm_head:
        raise refused("gptq with a quantized lm_head is not supported")
    groups = []
    for pattern, own in (fields.dynamic or {}).items():
        target = f"{PATTERN}{pattern.removeprefix(_OWN).removeprefix(_EXCLUDED)}"
        check_patterns([target])
        is_dense = pattern.startswith(_EXCLUDED)
        form = None if is_dense else _gptq_format(read_fields({**written, **own}, _Gptq))
        groups.append(ConfigGroup(targets=(target,), form=form))
    named = [name for block in fields.modules_in_block_to_quantize or () for name in block]
    targets = patterns_of_parts(named) or (LINEAR,)
    groups.append(ConfigGroup(targets=targets, form=_gptq_format(fields)))
    kept = dict.fromkeys(("lm_head", *(fields.modules_to_not_convert or ())))
    return Quantization(groups=tuple(groups), ignored=patterns_of_parts(kept))


def _gptq_format(fields: _Gptq) -> Gptq:
    if fields.bits not in (4, 8):
        raise refused(f"gptq of bits {fields.bits} is not supported")
    return Gptq(
        num_bits=cast(Literal[4, 8], fields.bits),
        group=_group("gptq", fields.group_size),
        is_symmetric=fields.sym,
        is_offset=fields.checkpoint_format == "gptq",
        is_ordered=fields.desc_act and fields.group_size != -1,
    )


def _group(method: str, size: int) -> int:
    """Returns the columns of a group; 0: all."""
    if size == -1:
        return 0
    if size < 1:
        raise CheckpointError(f"{FIELD}: {method}: group_size {size} is neither positive nor -1")
    return size


class _Mxfp4(msgspec.Struct):
    modules_to_not_convert: tuple[str, ...] | None = None


_EXPERTS = r"re:(.*\.)?mlp\.experts\.\d+\."


def mxfp4(written: dict[str, Any]) -> Quantization:
    """Reads the config of gpt-oss. Experts alone are in this format. Raises CheckpointError."""
    dense = patterns_of_parts(read_fields(written, _Mxfp4).modules_to_not_convert or ())
    return Quantization(groups=(ConfigGroup(targets=(_EXPERTS,), form=Mxfp4()),), ignored=dense)
