"""A layer whose rows are taken through all of its operations by one kernel, where there is one."""

from __future__ import annotations

from torch import Tensor, nn

from kernels.ops import LayerKernel, layer_kernel
from shared.engine.attention_inputs import AttentionInputs
from shared.engine.layers.attention import Attention
from shared.engine.layers.mlp import GatedMlp
from shared.engine.layers.norm import RMSNorm


class FusedLayer(nn.Module):
    """As `DecoderLayer`, but that what it adds is in the sum already."""

    def __init__(
        self,
        kernel: LayerKernel,
        input_layernorm: RMSNorm,
        self_attn: Attention,
        post_attention_layernorm: RMSNorm,
        mlp: GatedMlp,
    ) -> None:
        super().__init__()
        self.kernel = kernel
        self.input_layernorm = input_layernorm
        self.self_attn = self_attn
        self.post_attention_layernorm = post_attention_layernorm
        self.mlp = mlp

    def forward(
        self,
        x: Tensor,
        update: None,
        cos: Tensor,
        sin: Tensor,
        kv_cache: Tensor,
        inputs: AttentionInputs,
    ) -> tuple[Tensor, None]:
        query = self.kernel.before(x, cos, sin, kv_cache, inputs.slot_mapping)
        attended = self.self_attn.attend(query, kv_cache, inputs)
        return self.kernel.behind(x, attended), None


def fused_layer(
    input_norm: RMSNorm,
    self_attn: Attention,
    post_attention_norm: RMSNorm,
    mlp: GatedMlp,
) -> FusedLayer | None:
    """Of a layer without further norms, once its weights are packed. None: there is no kernel."""
    linears = self_attn.qkv_proj, self_attn.o_proj, mlp.gate_up_proj, mlp.down_proj
    if any(each.bias is not None for each in linears[1:]):
        return None
    head_norms = self_attn.q_norm, self_attn.k_norm
    kernel = layer_kernel(
        (input_norm.weight, post_attention_norm.weight),
        [each.weight for each in linears],
        qkv_bias=linears[0].bias,
        head_norms=[each.weight for each in head_norms if each is not None],
        eps=input_norm.eps,
        has_unit_offset=input_norm.has_unit_offset,
        activation=mlp.activation,
    )
    if kernel is None:
        return None
    return FusedLayer(kernel, input_norm, self_attn, post_attention_norm, mlp)
