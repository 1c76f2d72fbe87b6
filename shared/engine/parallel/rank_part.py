"""Describes the part of a decoder that one rank of a worker holds. No torch.

    tensor parallelism    every rank of a stage: its heads, MLP columns and rows of the vocabulary
    pipeline parallelism  every stage: contiguous layers; the first embeds, the last has the head

Heads and columns are cut at the borders of the sum lanes, so a rank sums whole lanes.
"""

from __future__ import annotations

from dataclasses import dataclass

from msgspec.structs import replace

from shared.config import ExpertSplit
from shared.engine.model_config.model_config import ModelConfig
from shared.engine.model_config.moe_config import ExpertPart
from shared.engine.parallel.cuts import (
    column_lanes,
    head_lanes,
    kv_head_range,
    rank_range,
)
from shared.engine.parallel.expert_part import expert_part
from shared.errors import ConfigError


@dataclass(frozen=True, slots=True)
class RankPart:
    """Ranges of the whole model's layers, heads, key-value heads, MLP columns and vocabulary.

    Ranks that share a key-value head each hold it, as all ranks of a stage hold latents.
    """

    layers: range
    heads: range
    kv_heads: range
    columns: range
    vocabulary: range
    has_embedding: bool = True
    has_head: bool = True
    experts: ExpertPart | None = None


def whole_model(config: ModelConfig) -> RankPart:
    """Returns the part of the only rank."""
    return rank_part(config, tp_rank=0, tp_size=1, layers=range(config.num_layers))


def rank_part(
    config: ModelConfig,
    *,
    tp_rank: int,
    tp_size: int,
    layers: range,
    experts: ExpertSplit = "auto",
) -> RankPart:
    """Returns the part of a rank. Raises ConfigError if the model cannot be cut for
    `tp_size` ranks.
    """
    if config.moe is None and experts == "ep":
        raise ConfigError("the model has no experts to spread over ranks", param="experts")
    place = tp_rank, tp_size
    try:
        first, end = rank_range(head_lanes(config.num_heads, config.output_dim), *place)
        heads = first // config.output_dim, end // config.output_dim
        kv_heads = kv_head_range(heads, config.num_heads, config.num_kv_heads)
    except ValueError as error:
        raise ConfigError(str(error), param="tp") from None
    part = RankPart(
        layers=layers,
        heads=range(*heads),
        kv_heads=range(*kv_heads),
        columns=range(*rank_range(column_lanes(config.intermediate_size), *place)),
        vocabulary=range(*rank_range(column_lanes(config.vocab_size), *place)),
        has_embedding=layers.start == 0,
        has_head=layers.stop == config.num_layers,
        experts=None if config.moe is None else expert_part(config.moe, *place, experts),
    )
    for name in ("heads", "columns", "vocabulary"):
        is_used = name != "columns" or config.has_dense_mlps
        if is_used and not getattr(part, name):
            whole = {"heads": config.num_heads, "columns": config.intermediate_size}
            raise ConfigError(
                f"{whole.get(name, config.vocab_size)} {name} are too few for {tp_size} ranks",
                param="tp",
            )
    return part


def local_config(config: ModelConfig, part: RankPart) -> ModelConfig:
    """Returns the model as the rank computes it: its layers, with fewer heads and columns."""
    layers = config.layers[part.layers.start : part.layers.stop]
    return replace(
        config,
        layers=tuple(
            layer
            if layer.moe is None
            else replace(layer, moe=replace(layer.moe, part=part.experts))
            for layer in layers
        ),
        num_heads=len(part.heads),
        num_kv_heads=len(part.kv_heads),
        intermediate_size=len(part.columns),
        vocab_size=len(part.vocabulary),
    )
