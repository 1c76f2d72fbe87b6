"""The tensors that a checkpoint must have, as its quantization stores them. No torch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from shared.engine.model_config.formats import SCALES, WeightFormat, stored_tensors
from shared.engine.model_config.model_config import ModelConfig
from shared.engine.planning.model_tensors import model_tensors

FLOATS = ("BF16", "F16", "F32")
DENSE_ONLY = ("mlp.gate",)  # whatever the config says


class Expected(NamedTuple):
    """A tensor that a checkpoint must have. `weight` has the name and shape of the quantized weight
    to which it belongs.
    """

    shape: tuple[int, ...]
    dtypes: tuple[str, ...] = FLOATS
    weight: tuple[str, tuple[int, ...]] | None = None
    is_optional: bool = False


def expected_tensors(config: ModelConfig) -> dict[str, Expected]:
    """Returns the expected tensors by the model's names. Raises CheckpointError if groups do not
    fill a row.
    """
    found: dict[str, Expected] = {}
    for name, shape in model_tensors(config).items():
        form = _format_of(config, name, shape)
        found |= {name: Expected(shape)} if form is None else dict(_stored(name, shape, form))
    if config.has_tied_embeddings:  # some exporters write the copy
        embedding = found["model.embed_tokens.weight"]
        found["lm_head.weight"] = embedding._replace(is_optional=True)
    return found


def _format_of(config: ModelConfig, name: str, shape: tuple[int, ...]) -> WeightFormat | None:
    index, _, path = name.removeprefix("model.layers.").partition(".")
    path = path.removesuffix(".weight")
    if not index.isdigit() or len(shape) != 2 or path in DENSE_ONLY:
        return None
    formats = config.layers[int(index)].formats
    return None if formats is None else formats.of(path)


def _stored(
    name: str, shape: tuple[int, ...], form: WeightFormat
) -> Iterator[tuple[str, Expected]]:
    stem, weight = name.removesuffix(".weight"), (name, shape)
    for kind, (dtype, stored_shape) in stored_tensors(form, *shape).items():
        dtypes = FLOATS if kind in SCALES else (dtype,)
        yield f"{stem}.{kind}", Expected(stored_shape, dtypes, weight)
    yield f"{stem}.weight_shape", Expected((2,), ("I32", "I64"), weight, is_optional=True)
