"""Kimi K2.5's published config: its costs, how it is cut, and the names of its tensors."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import pytest

from shared.engine.executors.loading.model_loading import kv_layout_of
from shared.engine.model_config.model_config import ModelConfig
from shared.engine.models.deepseek import configure_text_part
from shared.engine.parallel.mesh_shape import MeshShape
from shared.engine.parallel.rank_part import whole_model
from shared.engine.planning.rank_bytes import kv_values_per_token, num_weights
from shared.engine.planning.stages import imbalance
from shared.engine.planning.worker_parts import model_costs, stages_of, worker_parts
from shared.engine.weights.checkpoint_tensors import model_names

TEXT: dict[str, Any] = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "kimi_k2",
    "vocab_size": 163_840,
    "hidden_size": 7168,
    "intermediate_size": 18_432,
    "moe_intermediate_size": 2048,
    "num_hidden_layers": 61,
    "num_nextn_predict_layers": 0,
    "num_attention_heads": 64,
    "num_key_value_heads": 64,
    "n_shared_experts": 1,
    "n_routed_experts": 384,
    "routed_scaling_factor": 2.827,
    "kv_lora_rank": 512,
    "q_lora_rank": 1536,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "qk_nope_head_dim": 128,
    "topk_method": "noaux_tc",
    "n_group": 1,
    "topk_group": 1,
    "num_experts_per_tok": 8,
    "moe_layer_freq": 1,
    "first_k_dense_replace": 1,
    "norm_topk_prob": True,
    "scoring_func": "sigmoid",
    "hidden_act": "silu",
    "max_position_embeddings": 262_144,
    "rms_norm_eps": 1e-5,
    "rope_theta": 50_000.0,
    "rope_scaling": {
        "type": "yarn",
        "factor": 64.0,
        "original_max_position_embeddings": 4096,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
    },
    "attention_bias": False,
    "tie_word_embeddings": False,
}


@pytest.fixture(scope="module")
def kimi() -> ModelConfig:
    return configure_text_part({"model_type": "kimi_k25", "text_config": TEXT})


def test_scale_of_the_softmax_and_context(kimi: ModelConfig) -> None:
    m = 0.1 * math.log(64) + 1
    assert m * m == pytest.approx(2.0047, abs=1e-4)
    assert kimi.attention_scale == pytest.approx(192**-0.5 * m * m)
    assert kimi.ropes[0].attention_factor == 1.0  # the ratio of equal scales
    assert kimi.max_position_embeddings == 262_144


def test_a_token_of_cache_is_70272_bytes(kimi: ModelConfig) -> None:
    layout = kv_layout_of(kimi, "bfloat16", 16)
    assert layout.bytes_per_token == 61 * 576 * 2 == 70_272
    assert kv_values_per_token(kimi, whole_model(kimi)) * 2 == 70_272
    for rank in worker_parts(kimi, MeshShape(1, 4)):
        assert kv_values_per_token(kimi, rank) == len(rank.layers) * 576


def test_weights_are_about_a_trillion(kimi: ModelConfig) -> None:
    assert num_weights(kimi, whole_model(kimi)) == pytest.approx(1.026e12, rel=0.01)


@pytest.mark.parametrize("num_stages", [2, 3, 4, 8])
def test_slowest_stage_is_near_the_mean(kimi: ModelConfig, num_stages: int) -> None:
    stages = stages_of(kimi, num_stages)
    assert all(first.stop == second.start for first, second in pairwise(stages))
    borders = (0, *(stage.stop for stage in stages))
    assert imbalance(model_costs(kimi), borders) <= 1.10


def test_names_of_the_checkpoint(kimi: ModelConfig) -> None:
    names = {
        "language_model.model.layers.0.self_attn.kv_b_proj.weight": (
            "model.layers.0.self_attn.kv_b_proj.weight"
        ),
        "language_model.lm_head.weight": "lm_head.weight",
    }
    unused = ["vision_tower.patch_embed.proj.weight", "mm_projector.proj.0.bias"]
    assert dict(model_names([*names, *unused], kimi.checkpoint)) == names


def test_predicting_layers_of_deepseek_are_dropped() -> None:
    config = configure_text_part({"text_config": {**TEXT, "num_nextn_predict_layers": 2}})
    kept, dropped = "language_model.model.layers.60.mlp", "language_model.model.layers.6{}.mlp"
    names = [kept, dropped.format(1), dropped.format(2), dropped.format(3)]
    found = [given for given, _ in model_names(names, config.checkpoint)]
    assert found == [kept, dropped.format(3)]


def test_each_of_eight_ranks_holds_48_experts_and_8_heads(kimi: ModelConfig) -> None:
    parts = worker_parts(kimi, MeshShape(8, 1))
    assert {len(part.heads) for part in parts} == {8}
    held = [part.experts.experts for part in parts if part.experts is not None]
    assert held == [(first, first + 48) for first in range(0, 384, 48)]
