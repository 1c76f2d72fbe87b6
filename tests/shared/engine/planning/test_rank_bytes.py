"""The counts from a config are those of the model that it describes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from msgspec.structs import replace

from shared.config import ExpertSplit
from shared.engine.model_config.model_config import (
    LatentConfig,
    LayerConfig,
    ModelConfig,
    RopeConfig,
)
from shared.engine.model_config.moe_config import ClampedGate, MoeConfig, Routing
from shared.engine.models.decoder import Decoder
from shared.engine.parallel.rank_part import rank_part, whole_model
from shared.engine.planning.rank_bytes import (
    kv_values_per_token,
    num_router_weights,
    num_weights,
)
from shared.engine.planning.worker_parts import stages_of

PLAIN = ModelConfig(
    vocab_size=1000,
    hidden_size=64,
    intermediate_size=256,
    num_heads=8,
    num_kv_heads=4,
    head_dim=32,
    max_position_embeddings=128,
    rms_norm_eps=1e-6,
    activation="silu",
    attention_scale=0.25,
    layers=(LayerConfig(),) * 5,
    ropes=(RopeConfig(theta=1e4, rotary_dim=32),),
    has_tied_embeddings=False,
)
LATENTS: dict[str, Any] = {
    "num_kv_heads": 1,
    "head_dim": 20,
    "latent": LatentConfig(kv_rank=24, nope_dim=12, rope_dim=8, value_dim=16, query_rank=40),
    "ropes": (RopeConfig(theta=1e4, rotary_dim=8),),
}
MOE = MoeConfig(
    num_experts=17,
    experts_per_token=5,
    intermediate_size=24,
    shared_intermediate_size=40,
    routing=Routing(score="sigmoid", has_choice_bias=True),
)
BIASED = MoeConfig(
    num_experts=7,
    experts_per_token=3,
    intermediate_size=40,
    routing=Routing(score="softmax", has_bias=True),
    clamped_gate=ClampedGate(limit=7.0, alpha=1.702),
)
VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "tied": {"has_tied_embeddings": True},
    "biases": {"has_qkv_bias": True, "has_output_bias": True, "has_mlp_bias": True},
    "experts": {"layers": (LayerConfig(), *(LayerConfig(moe=MOE),) * 4), "hidden_size": 48},
    "sinks, experts with biases": {
        "layers": (LayerConfig(moe=BIASED),) * 5,
        "hidden_size": 48,
        "has_qkv_bias": True,
        "has_output_bias": True,
        "has_sinks": True,
    },
    "norms": {"has_qk_norm": True, "has_post_norms": True},
    "latents": LATENTS,
    "latents, full queries, biases": {
        **LATENTS,
        "latent": replace(LATENTS["latent"], query_rank=None),
        "has_qkv_bias": True,
        "has_output_bias": True,
    },
}


@pytest.fixture(params=VARIANTS)
def config(request: pytest.FixtureRequest) -> ModelConfig:
    return replace(PLAIN, **VARIANTS[request.param])


def test_weights_of_the_whole_model(config: ModelConfig) -> None:
    with torch.device("meta"):
        model = Decoder(config, dtype=torch.float32, num_positions=8)
    assert num_weights(config, whole_model(config)) == sum(p.numel() for p in model.parameters())


def test_matrices_of_all_ranks_are_those_of_the_model() -> None:
    """Norms alone are held by each rank of a stage, and the final one by the last stage's."""
    layers, norms = range(PLAIN.num_layers), (2 * PLAIN.num_layers + 1) * PLAIN.hidden_size
    ranks = [rank_part(PLAIN, tp_rank=rank, tp_size=4, layers=layers) for rank in range(4)]
    held = [num_weights(PLAIN, each) for each in ranks]
    assert sum(held) == num_weights(PLAIN, whole_model(PLAIN)) + 3 * norms
    assert max(held) <= 1.05 * sum(held) / 4


@pytest.mark.parametrize("experts", ["ep", "tp"])
def test_experts_of_all_ranks_are_those_of_the_model(experts: ExpertSplit) -> None:
    """Norms and routers are held by each rank of a stage."""
    moe = replace(MOE, num_experts=16, intermediate_size=288, shared_intermediate_size=256)
    config = replace(PLAIN, layers=(LayerConfig(moe=moe),) * 5)
    layers = range(5)
    ranks = [
        rank_part(config, tp_rank=rank, tp_size=4, layers=layers, experts=experts)
        for rank in range(4)
    ]
    alike = 11 * config.hidden_size + num_router_weights(config, whole_model(config))
    held = [num_weights(config, each) for each in ranks]
    assert sum(held) == num_weights(config, whole_model(config)) + 3 * alike
    assert max(held) <= 1.35 * sum(held) / 4


def test_tied_weights_are_held_by_both_ends_of_a_pipeline() -> None:
    config = replace(PLAIN, has_tied_embeddings=True)
    stages = [
        rank_part(config, tp_rank=0, tp_size=1, layers=layers) for layers in stages_of(config, 2)
    ]
    vocabulary = config.vocab_size * config.hidden_size
    held = sum(num_weights(config, each) for each in stages)
    assert held == num_weights(config, whole_model(config)) + vocabulary


def test_key_value_heads_with_several_readers_are_counted_for_each() -> None:
    layers = range(PLAIN.num_layers)
    ranks = [rank_part(PLAIN, tp_rank=rank, tp_size=8, layers=layers) for rank in range(8)]
    assert {kv_values_per_token(PLAIN, each) for each in ranks} == {5 * 2 * 1 * 32}
    assert kv_values_per_token(PLAIN, whole_model(PLAIN)) == 5 * 2 * 4 * 32


def test_latents_are_held_by_every_rank_and_heads_by_one() -> None:
    """What compresses queries and latents, and norms, are held by each."""
    config = replace(PLAIN, **LATENTS)
    layers, hidden = range(config.num_layers), config.hidden_size
    ranks = [rank_part(config, tp_rank=rank, tp_size=4, layers=layers) for rank in range(4)]
    assert {kv_values_per_token(config, each) for each in ranks} == {5 * (24 + 8)}
    low = (40 + 24 + 8) * hidden + 40 + 24
    alike = config.num_layers * (low + 2 * hidden) + hidden
    held = [num_weights(config, each) for each in ranks]
    assert sum(held) == num_weights(config, whole_model(config)) + 3 * alike
