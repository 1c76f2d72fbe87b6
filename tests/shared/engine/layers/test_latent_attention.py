"""Absorbed latent attention equals keys and values that are expanded for every head."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from kernels.reference.rms_norm import rms_norm
from kernels.reference.rotary import rotary
from shared.engine.layers.attention_inputs import AttentionInputs, PrefillRows
from shared.engine.layers.latent_attention import NORM_EPS, LatentAttention
from shared.engine.layers.linear import MatmulModule
from shared.engine.model_config.formats import Int4
from shared.engine.model_config.model_config import LayerConfig, ModelConfig
from shared.engine.model_config.quantization import ConfigGroup, LayerFormats, Quantization
from shared.engine.models.checkpoint_config import read_config
from tests.support.engine.families import FAMILIES

NUM_TOKENS, BLOCK_SIZE = 70, 16


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> ModelConfig:
    folder: Path = tmp_path_factory.mktemp("deepseek")
    FAMILIES["deepseek"].write(folder)
    return read_config(folder)


def _layer(config: ModelConfig, dtype: torch.dtype) -> LatentAttention:
    torch.manual_seed(5)
    layer = LatentAttention(config, LayerConfig(), dtype=dtype)
    for parameter in layer.parameters():
        parameter.data = torch.randn_like(parameter) * 0.3
    return layer


def _pack(layer: LatentAttention) -> None:
    layer.kv_b_proj.pack()
    for module in layer.modules():
        if isinstance(module, MatmulModule):
            module.pack()


def _inputs() -> AttentionInputs:
    num_blocks = -(-NUM_TOKENS // BLOCK_SIZE)
    rows = PrefillRows(
        block_tables=torch.arange(num_blocks).unsqueeze(0),
        cu_seqlens_q=torch.tensor([0, NUM_TOKENS]),
        context_lens=torch.tensor([NUM_TOKENS]),
        lower=None,
    )
    return AttentionInputs(torch.arange(NUM_TOKENS), rows, None)


def _expanded(layer: LatentAttention, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Output before `o_proj`, [T, num_heads · value]: one key and value a head and token, FP32."""
    weights = {name: each.detach() for name, each in layer.destinations().items()}
    num_heads, nope, value = layer.kv_b_proj._sizes
    rank = layer.value_dim
    low = rms_norm(x @ weights["q_a_proj.weight"].T, weights["q_a_layernorm.weight"], NORM_EPS)
    query = (low @ weights["q_b_proj.weight"].T).view(len(x), num_heads, -1)
    row = x @ weights["kv_a_proj_with_mqa.weight"].T
    latent = rms_norm(row[:, :rank], weights["kv_a_layernorm.weight"], NORM_EPS)
    key_rope = rotary(row[:, None, rank:], cos, sin).expand(-1, num_heads, -1)
    both = (latent @ weights["kv_b_proj.weight"].T).view(len(x), num_heads, nope + value)
    key = torch.cat((both[..., :nope], key_rope), dim=2)
    query = torch.cat((query[..., :nope], rotary(query[..., nope:], cos, sin)), dim=2)
    attended = torch.nn.functional.scaled_dot_product_attention(
        *(each.transpose(0, 1).double() for each in (query, key, both[..., nope:])),
        is_causal=True,
        scale=layer.scale,
    )
    return attended.transpose(0, 1).flatten(1)


def test_absorbed_equals_expanded(config: ModelConfig) -> None:
    layer = _layer(config, torch.float32)
    assert config.latent is not None
    x = torch.randn(NUM_TOKENS, config.hidden_size)
    angles = torch.randn(NUM_TOKENS, config.latent.rope_dim // 2)
    cos, sin = angles.cos(), angles.sin()
    output = layer.o_proj.parameter.detach().double()
    expected = _expanded(layer, x, cos, sin) @ output.T
    _pack(layer)
    width = config.latent.kv_rank + config.latent.rope_dim
    cache = torch.full((1, 5, 1, BLOCK_SIZE, width), torch.nan)
    with torch.inference_mode():
        found = layer(x, cos, sin, cache, _inputs())
    error = (found.double() - expected).pow(2).mean().sqrt() / expected.pow(2).mean().sqrt()
    assert error < 5e-6


@pytest.mark.parametrize("other", ["q_a_proj", "q_b_proj"])
def test_projections_of_one_format_are_one_product(config: ModelConfig, other: str) -> None:
    ignored = Quantization(
        groups=(ConfigGroup(targets=("Linear",), form=Int4(group=32, is_symmetric=True)),),
        ignored=(f"re:.*{other}",),
    )
    formats = LayerFormats(place="model.layers.0", quantization=ignored)
    layer = LatentAttention(config, LayerConfig(formats=formats), dtype=torch.float32)
    assert bool(layer.parts) == (other == "q_b_proj")
    apart = LatentAttention(config, LayerConfig(), dtype=torch.float32)
    assert layer.destinations().keys() == apart.destinations().keys()


def test_a_packed_expansion_holds_its_weight_once(config: ModelConfig) -> None:
    layer = _layer(config, torch.float32)
    layer.kv_b_proj.pack()
    assert dict(layer.kv_b_proj.named_parameters()) == {}
    layer.kv_b_proj.pack()  # a second time changes nothing
