"""The dtype and name of quantized weights' scales as the files have them. No torch.

No field of a config tells them: exporters store scales of FP16, BF16 or FP32.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import cast, get_args

from msgspec.structs import replace

from shared.engine.codec.manifest import is_bundle, read_manifest
from shared.engine.model_config.formats import (
    SCALES,
    Fp8Block,
    Fp8Rows,
    Mxfp4,
    ScaleDtype,
    WeightFormat,
)
from shared.engine.model_config.quantization import Quantization
from shared.engine.planning.headers import file_tensors, has_files
from shared.engine.weights.checkpoint_index import file_names, read_index
from shared.errors import CheckpointError


def with_stored_scales(quantization: Quantization, model_dir: Path) -> Quantization:
    """Returns the formats with scales like the first ones of the folder; unchanged if these cannot
    be read, which loading them reports. Scales that differ from the first are refused there too.
    """
    if all(isinstance(group.form, Fp8Block | Mxfp4 | None) for group in quantization.groups):
        return quantization
    try:
        found = next(_scales(model_dir), None)
    except (CheckpointError, OSError):
        return quantization
    if found is None:
        return quantization
    groups = (replace(group, form=_of_form(group.form, *found)) for group in quantization.groups)
    return replace(quantization, groups=tuple(groups))


def _of_form(form: WeightFormat | None, kind: str, dtype: ScaleDtype) -> WeightFormat | None:
    if isinstance(form, Fp8Block | None):  # has FP32, or none
        return form
    if isinstance(form, Fp8Rows) and kind in ("weight_scale", "weight_scale_inv"):
        is_inverse = kind == "weight_scale_inv"
        form = replace(form, scale="weight_scale_inv" if is_inverse else "weight_scale")
    return replace(form, scale_dtype=dtype)


def _scales(model_dir: Path) -> Iterator[tuple[str, ScaleDtype]]:
    """Yields the end of each scale's name, and its dtype."""
    for name, dtype in _tensors(model_dir):  # by name in each file
        kind = name.rpartition(".")[2]
        if kind in SCALES and dtype in get_args(ScaleDtype):
            yield kind, cast(ScaleDtype, dtype)


def _tensors(model_dir: Path) -> Iterable[tuple[str, str]]:
    if is_bundle(model_dir):
        for shard in read_manifest(model_dir).shards:
            yield from sorted((each.name, each.dtype) for each in shard.tensors)
    elif has_files(model_dir):
        for file_name in file_names(model_dir, read_index(model_dir)):
            tensors = file_tensors(model_dir / file_name)
            yield from sorted((each.name, each.dtype) for each in tensors)
