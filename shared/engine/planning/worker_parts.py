"""The parts of all ranks of a worker. No torch."""

from __future__ import annotations

from itertools import pairwise

from shared.config import ExpertSplit
from shared.engine.model_config.model_config import ModelConfig
from shared.engine.model_config.moe_config import MoeConfig
from shared.engine.parallel.mesh_shape import MeshShape
from shared.engine.parallel.rank_part import RankPart, rank_part
from shared.engine.planning.rank_bytes import attention_weights
from shared.engine.planning.stages import ModelCosts, cut_stages
from shared.errors import ConfigError


def worker_parts(
    config: ModelConfig, shape: MeshShape, experts: ExpertSplit = "auto"
) -> list[RankPart]:
    """Returns the parts by rank. Raises ConfigError if the model cannot be cut like this."""
    return [
        rank_part(config, tp_rank=tp_rank, tp_size=shape.tp, layers=layers, experts=experts)
        for layers in stages_of(config, shape.pp)
        for tp_rank in range(shape.tp)
    ]


def stages_of(config: ModelConfig, num_stages: int) -> list[range]:
    """Returns the layers of each stage, balanced by the multiplications of a token.
    Raises ConfigError.
    """
    try:
        borders = cut_stages(model_costs(config), num_stages)
    except ValueError as error:
        raise ConfigError(str(error), param="pp") from None
    return [range(*each) for each in pairwise(borders)]


def model_costs(config: ModelConfig) -> ModelCosts:
    """Returns the multiplications of a token. Looking up the embedding multiplies nothing."""
    hidden, attention = config.hidden_size, attention_weights(config)
    layers = (attention + _mlp_width(config, layer.moe) * hidden for layer in config.layers)
    return ModelCosts(tuple(layers), lm_head=config.vocab_size * hidden)


def _mlp_width(config: ModelConfig, moe: MoeConfig | None) -> int:
    """Returns the multiplications of a token in an MLP or its experts, for each
    element of its input.
    """
    if moe is None:
        return 3 * config.intermediate_size
    chosen = moe.experts_per_token * moe.intermediate_size
    return 3 * (chosen + moe.shared_intermediate_size) + moe.num_experts
