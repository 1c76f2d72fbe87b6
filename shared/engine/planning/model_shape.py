"""Describes a model for a plan over links, from its config alone. No torch."""

from __future__ import annotations

from shared.config import TP_SIZES
from shared.engine.model_config.model_config import ModelConfig
from shared.engine.parallel.lanes import Exchange
from shared.engine.parallel.rank_part import rank_part, whole_model
from shared.engine.planning.parallel_plan import ModelShape
from shared.engine.planning.quantized_bytes import saved_bytes
from shared.engine.planning.rank_bytes import num_weights
from shared.engine.planning.step_bytes import StepShape
from shared.engine.planning.worker_parts import stages_of
from shared.errors import ConfigError


def model_shape(
    config: ModelConfig,
    *,
    item_bytes: int,
    num_tokens: int,
    exchange: Exchange,
    rank_bytes_per_s: float,
    num_sampled: int | None = None,
) -> ModelShape:
    """Returns a step of `num_tokens`, of which `num_sampled` have logits (None: all, a decode
    step). It takes the time to read all weights once.
    """
    whole = whole_model(config)
    weight_bytes = num_weights(config, whole) * item_bytes - saved_bytes(config, whole, item_bytes)
    return ModelShape(
        num_layers=config.num_layers,
        step=StepShape(
            hidden_size=config.hidden_size,
            vocab_size=config.vocab_size,
            item_bytes=item_bytes,
            num_tokens=num_tokens,
            num_sampled=num_tokens if num_sampled is None else num_sampled,
            exchange=exchange,
            moe=config.moe,
        ),
        compute_s=weight_bytes / rank_bytes_per_s,
        layers_of=lambda num_stages: [len(each) for each in stages_of(config, num_stages)],
        tp_sizes=tuple(tp for tp in TP_SIZES if _can_be_cut(config, tp)),
    )


def _can_be_cut(config: ModelConfig, tp: int) -> bool:
    layers = range(config.num_layers)
    try:
        for tp_rank in range(tp):
            rank_part(config, tp_rank=tp_rank, tp_size=tp, layers=layers)
    except ConfigError:
        return False
    return True
