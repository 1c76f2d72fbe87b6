"""A decoder described by a `ModelConfig`: embedding, layers, norm, output head."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from kernels.ops import SumLanes
from shared.engine.layers.apply_formats import apply_formats
from shared.engine.layers.attention import Attention
from shared.engine.layers.attention_inputs import AttentionInputs
from shared.engine.layers.destinations import child_destinations
from shared.engine.layers.embedding import OutputHead, TokenEmbedding
from shared.engine.layers.fused_layer import FusedLayer, fused_layer
from shared.engine.layers.latent_attention import LatentAttention
from shared.engine.layers.mlp import GatedMlp
from shared.engine.layers.moe import MoeMlp
from shared.engine.layers.norm import RMSNorm
from shared.engine.layers.rotary import rotary_tables
from shared.engine.model_config.model_config import LayerConfig, ModelConfig
from shared.engine.parallel.cuts import column_lanes
from shared.engine.parallel.mesh import LocalMesh, Mesh


class DecoderLayer(nn.Module):
    """A norm before attention and one before the MLP. Submodules have the checkpoints' names.

    Each norm also computes the residual sum before it, in one pass, so the next layer adds the
    output of a layer's MLP.
    """

    def __init__(self, config: ModelConfig, layer: LayerConfig, *, dtype: torch.dtype) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config, dtype=dtype)
        attention = Attention if config.latent is None else LatentAttention
        self.self_attn = attention(config, layer, dtype=dtype)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config, dtype=dtype)
        self.mlp = (
            GatedMlp(config, dtype=dtype)
            if layer.moe is None
            else MoeMlp(config, layer.moe, dtype=dtype)
        )

    def destinations(self) -> dict[str, Tensor]:
        return child_destinations(self)

    def forward(
        self,
        x: Tensor,
        update: Tensor | None,
        cos: Tensor,
        sin: Tensor,
        kv_cache: Tensor,
        inputs: AttentionInputs,
    ) -> tuple[Tensor, Tensor]:
        """x [T, hidden] and the update to add to it -> both after this layer.

        cos, sin [T, rotary_dim / 2].
        """
        normed, x = self.input_layernorm.of_sum(x, update)
        attended = self.self_attn(normed, cos, sin, kv_cache, inputs)
        normed, x = self.post_attention_layernorm.of_sum(x, attended)
        return x, self.mlp(normed)

    def join(self, mesh: Mesh, output: SumLanes, down: SumLanes) -> None:
        """Joins the layer, one rank's part, to its mesh. It holds the lanes `output` of `o_proj`
        and, if its MLP is dense, the lanes `down` of `down_proj`.
        """
        self.self_attn.o_proj.join(mesh, output)
        if isinstance(self.mlp, MoeMlp):
            self.mlp.join(mesh)  # it knows the lanes of the whole
        else:
            self.mlp.down_proj.join(mesh, down)

    def fused(self) -> FusedLayer | None:
        """Returns the layer as one kernel; None if there is no kernel for it."""
        if self.self_attn.o_proj.mesh is not None or isinstance(self.mlp, MoeMlp):
            return None  # the kernel would sum the lanes itself, and has one MLP
        if isinstance(self.self_attn, LatentAttention) or self.self_attn.kv_scales is not None:
            return None
        norms = self.input_layernorm, self.post_attention_layernorm
        return fused_layer(self.self_attn, self.mlp, norms)


class SandwichLayer(DecoderLayer):
    """A decoder layer that also has a norm after attention and one after the MLP."""

    def __init__(self, config: ModelConfig, layer: LayerConfig, *, dtype: torch.dtype) -> None:
        super().__init__(config, layer, dtype=dtype)
        self.pre_feedforward_layernorm = RMSNorm(config.hidden_size, config, dtype=dtype)
        self.post_feedforward_layernorm = RMSNorm(config.hidden_size, config, dtype=dtype)

    def forward(
        self,
        x: Tensor,
        update: Tensor | None,
        cos: Tensor,
        sin: Tensor,
        kv_cache: Tensor,
        inputs: AttentionInputs,
    ) -> tuple[Tensor, Tensor]:
        normed, x = self.input_layernorm.of_sum(x, update)
        attended = self.self_attn(normed, cos, sin, kv_cache, inputs)
        normed, x = self.pre_feedforward_layernorm.of_sum(
            x, self.post_attention_layernorm(attended)
        )
        return x, self.post_feedforward_layernorm(self.mlp(normed))

    def fused(self) -> FusedLayer | None:
        if self.self_attn.o_proj.mesh is not None or isinstance(self.mlp, MoeMlp):
            return None
        if isinstance(self.self_attn, LatentAttention) or self.self_attn.kv_scales is not None:
            return None
        before = self.input_layernorm, self.pre_feedforward_layernorm
        after = self.post_attention_layernorm, self.post_feedforward_layernorm
        return fused_layer(self.self_attn, self.mlp, (*before, *after))


class LayerStack(nn.Module):
    """Consecutive layers and the angles of their positions."""

    cos: Tensor  # [num_positions, num_ropes, rotary_dim / 2], like sin
    sin: Tensor

    def __init__(self, config: ModelConfig, *, dtype: torch.dtype, num_positions: int) -> None:
        super().__init__()
        self.layer_config = config
        self.dtype = dtype  # dtype of activations
        layer_class = SandwichLayer if config.has_post_norms else DecoderLayer
        self.layers = nn.ModuleList()
        for each in config.layers:
            layer = layer_class(config, each, dtype=dtype)
            apply_formats(layer, each.formats)
            self.layers.append(layer)
        with torch.device("cpu"):  # gives the same bits on all devices
            cos, sin = rotary_tables(config.ropes, num_positions)
        device = torch.get_default_device()
        self.register_buffer("cos", cos.to(device), persistent=False)
        self.register_buffer("sin", sin.to(device), persistent=False)

    def run_layers(
        self,
        x: Tensor,
        positions: Tensor,
        kv_caches: Sequence[Tensor],
        inputs: Sequence[AttentionInputs],
    ) -> Tensor:
        """x [T, hidden], positions [T]; KV cache and inputs of each layer -> [T, hidden]."""
        cos = self.cos.index_select(0, positions).unbind(1)
        sin = self.sin.index_select(0, positions).unbind(1)
        layers = self.layer_config.layers
        angles: dict[int | None, tuple[Tensor, Tensor]] = dict(
            enumerate(zip(cos, sin, strict=True))
        )
        if any(each.rope_index is None for each in layers):
            angles[None] = torch.ones_like(cos[0]), torch.zeros_like(sin[0])
        update = None
        for layer, each, kv_cache, own in zip(self.layers, layers, kv_caches, inputs, strict=True):
            x, update = layer(x, update, *angles[each.rope_index], kv_cache, own)
        return x if update is None else x + update

    def fuse(self) -> None:
        """Replaces layers by their fused form, if any. Call it once weights are packed."""
        for index, layer in enumerate(self.layers):
            assert isinstance(layer, DecoderLayer)
            found = layer.fused()
            if found is not None:
                self.layers[index] = found

    def round_sums(self) -> None:
        """Rounds every node of the lane tree to BF16, as ranks with BF16 exchange do. Call it
        before `fuse`.
        """
        mesh = LocalMesh("bf16")
        for layer in self.layers:
            assert isinstance(layer, DecoderLayer)
            output = layer.self_attn.o_proj.lanes
            assert output is not None
            down = SumLanes.of(column_lanes(self.layer_config.intermediate_size))
            layer.join(mesh, output, down)

    def layer_destinations(self, first_layer: int = 0) -> dict[str, Tensor]:
        """Returns the checkpoint's tensor names -> their destinations; fused parameters are
        split.
        """
        found: dict[str, Tensor] = {}
        for index, layer in enumerate(self.layers, first_layer):
            assert isinstance(layer, DecoderLayer)
            for name, tensor in layer.destinations().items():
                found[f"model.layers.{index}.{name}"] = tensor
        return found


class Decoder(LayerStack):
    def __init__(self, config: ModelConfig, *, dtype: torch.dtype, num_positions: int) -> None:
        super().__init__(config, dtype=dtype, num_positions=num_positions)
        self.config = config
        self.embed_tokens = TokenEmbedding(
            config.vocab_size, config.hidden_size, scale=config.embedding_scale, dtype=dtype
        )
        self.norm = RMSNorm(config.hidden_size, config, dtype=dtype)
        self.lm_head = OutputHead(
            self.embed_tokens, is_tied=config.has_tied_embeddings, softcap=config.logit_softcap
        )

    def embed(self, input_ids: Tensor) -> Tensor:
        """input_ids [T] -> [T, hidden]."""
        return self.embed_tokens(input_ids)

    def normed(self, hidden: Tensor) -> Tensor:
        """Returns the final norm: [T, hidden] -> the same shape."""
        return self.norm(hidden)

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden [R, hidden] -> [R, vocab_size] FP32."""
        return self.lm_head(self.norm(hidden))

    def argmax_tokens(self, hidden: Tensor) -> Tensor:
        """hidden [R, hidden] -> [R] ids of the largest logits."""
        return self.lm_head.argmax_tokens(self.norm(hidden))

    def weight_destinations(self) -> dict[str, Tensor]:
        """Returns the checkpoint's tensor names -> their destinations."""
        found: dict[str, Tensor] = {
            "model.embed_tokens.weight": self.embed_tokens.parameter,
            "model.norm.weight": self.norm.weight,
        }
        if not self.config.has_tied_embeddings:
            found["lm_head.weight"] = self.lm_head.parameter
        found |= self.layer_destinations()
        return {name: tensor.detach() for name, tensor in found.items()}
