"""A layer whose operations are computed by one kernel per row, on devices with such a kernel."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from kernels.ops import LayerKernel, layer_kernel
from shared.engine.layers.attention import Attention
from shared.engine.layers.attention_inputs import AttentionInputs
from shared.engine.layers.mlp import GatedMlp
from shared.engine.layers.norm import RMSNorm


class FusedLayer(nn.Module):
    """A decoder layer whose output already includes the residual sum, unlike that of
    `DecoderLayer`.
    """

    def __init__(
        self,
        kernel: LayerKernel,
        self_attn: Attention,
        mlp: GatedMlp,
        norms: Sequence[RMSNorm],
    ) -> None:
        super().__init__()
        self.kernel = kernel
        self.self_attn = self_attn
        self.mlp = mlp
        self.norms = nn.ModuleList(norms)

    def forward(
        self,
        x: Tensor,
        update: None,
        cos: Tensor,
        sin: Tensor,
        kv_cache: Tensor,
        inputs: AttentionInputs,
    ) -> tuple[Tensor, None]:
        query = self.kernel.pre_attention(x, cos, sin, kv_cache, inputs.slot_mapping)
        attended = self.self_attn.attend(query, kv_cache, inputs)
        return self.kernel.post_attention(x, attended), None


def fused_layer(
    self_attn: Attention,
    mlp: GatedMlp,
    norms: Sequence[RMSNorm],
) -> FusedLayer | None:
    """Returns the fused form of a layer with packed weights, or None if there is no kernel for it.

    `norms` are those before attention, before the MLP, and, if the layer has them, of both outputs.
    """
    linears = self_attn.qkv_proj, self_attn.o_proj, mlp.gate_up_proj, mlp.down_proj
    if any(each.bias is not None for each in linears[1:]) or norms[0].mode["is_rounded_once"]:
        return None
    lanes = self_attn.o_proj.lanes, mlp.down_proj.lanes
    assert lanes[0] is not None
    assert lanes[1] is not None
    before_attention, before_mlp, *post_attention = norms
    head_norms = self_attn.q_norm, self_attn.k_norm
    kernel = layer_kernel(
        (before_attention.weight, before_mlp.weight),
        [each.weight for each in linears],
        (lanes[0], lanes[1]),
        qkv_bias=linears[0].bias,
        head_norms=[each.weight for each in head_norms if each is not None],
        post_norms=[each.weight for each in post_attention],
        eps=before_attention.eps,
        has_unit_offset=before_attention.mode["has_unit_offset"],
        activation=mlp.activation,
    )
    return None if kernel is None else FusedLayer(kernel, self_attn, mlp, norms)
