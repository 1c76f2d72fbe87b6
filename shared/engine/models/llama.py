"""Llama and what shares its block: RMSNorm, grouped-query attention with rotary, SwiGLU."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from shared.engine.attention_inputs import AttentionInputs
from shared.engine.checkpoint_config import ModelConfig
from shared.engine.layers.attention import Attention
from shared.engine.layers.embedding import Embedding, OutputHead
from shared.engine.layers.linear import Linear
from shared.engine.layers.mlp import GatedMlp
from shared.engine.layers.norm import RMSNorm
from shared.engine.layers.rotary import rotary_table


class LlamaLayer(nn.Module):
    def __init__(self, config: ModelConfig, *, dtype: torch.dtype) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype=dtype)
        self.self_attn = Attention(config, dtype=dtype)
        self.post_attention_layernorm = RMSNorm(
            config.hidden_size, config.rms_norm_eps, dtype=dtype
        )
        self.mlp = GatedMlp(config, dtype=dtype)

    def forward(
        self, x: Tensor, cos: Tensor, sin: Tensor, kv_cache: Tensor, inputs: AttentionInputs
    ) -> Tensor:
        """x [T, hidden] is overwritten."""
        x.add_(self.self_attn(self.input_layernorm(x), cos, sin, kv_cache, inputs))
        return x.add_(self.mlp(self.post_attention_layernorm(x)))


class LlamaForCausalLM(nn.Module):
    cos: Tensor
    sin: Tensor

    def __init__(self, config: ModelConfig, *, dtype: torch.dtype, num_positions: int) -> None:
        super().__init__()
        self.config = config
        self.embed_tokens = Embedding(config.vocab_size, config.hidden_size, dtype=dtype)
        self.layers = nn.ModuleList(
            LlamaLayer(config, dtype=dtype) for _ in range(config.num_layers)
        )
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype=dtype)
        self.lm_head = OutputHead(self.embed_tokens, is_tied=config.has_tied_embeddings)
        cos, sin = rotary_table(config.rope, config.head_dim, num_positions)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)

    def forward(
        self, input_ids: Tensor, positions: Tensor, kv_cache: Tensor, inputs: AttentionInputs
    ) -> Tensor:
        """input_ids, positions [T]; kv_cache of all layers -> hidden states [T, hidden]."""
        cos = self.cos.index_select(0, positions)
        sin = self.sin.index_select(0, positions)
        x = self.embed_tokens(input_ids)
        for layer, layer_cache in zip(self.layers, kv_cache.unbind(0), strict=True):
            x = layer(x, cos, sin, layer_cache, inputs)
        return x

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden [R, hidden] -> [R, vocab_size] FP32."""
        return self.lm_head(self.norm(hidden))

    def weight_destinations(self) -> dict[str, Tensor]:
        """The checkpoint's tensor names -> where each goes; fused parameters are cut up."""
        found: dict[str, Tensor] = {
            "model.embed_tokens.weight": self.embed_tokens.weight,
            "model.norm.weight": self.norm.weight,
        }
        if not self.config.has_tied_embeddings:
            found["lm_head.weight"] = self.lm_head.weight
        for index, layer in enumerate(self.layers):
            assert isinstance(layer, LlamaLayer)
            for name, tensor in self._layer_destinations(layer).items():
                found[f"model.layers.{index}.{name}"] = tensor
        return {name: tensor.detach() for name, tensor in found.items()}

    def _layer_destinations(self, layer: LlamaLayer) -> dict[str, Tensor]:
        config = self.config
        query = config.num_heads * config.head_dim
        key = config.num_kv_heads * config.head_dim
        inner = config.intermediate_size
        attention, mlp = layer.self_attn, layer.mlp
        return {
            "input_layernorm.weight": layer.input_layernorm.weight,
            "post_attention_layernorm.weight": layer.post_attention_layernorm.weight,
            **_cut(
                attention.qkv_proj, "self_attn", {"q_proj": query, "k_proj": key, "v_proj": key}
            ),
            **_cut(attention.o_proj, "self_attn", {"o_proj": config.hidden_size}),
            **_cut(mlp.gate_up_proj, "mlp", {"gate_proj": inner, "up_proj": inner}),
            **_cut(mlp.down_proj, "mlp", {"down_proj": config.hidden_size}),
        }


def _cut(linear: Linear, prefix: str, parts: dict[str, int]) -> dict[str, Tensor]:
    """The output rows of a fused linear, by the names of the layers that it was fused from."""
    sizes = list(parts.values())
    named = {
        f"{prefix}.{part}.weight": tensor
        for part, tensor in zip(parts, linear.weight.split(sizes), strict=True)
    }
    if linear.bias is not None:
        for part, tensor in zip(parts, linear.bias.split(sizes), strict=True):
            named[f"{prefix}.{part}.bias"] = tensor
    return named
