"""Cuts each tensor of a checkpoint to the part that a rank reads."""

from __future__ import annotations

import re

from shared.engine.model_config.model_config import ModelConfig
from shared.engine.parallel.cuts import WHOLE, Cut, Range, gate_up_cut, qkv_cut
from shared.engine.parallel.rank_part import RankPart
from shared.engine.weights.quantized_cut import quantized_cut

_EXPERT = re.compile(r"(?<=experts)\.\d+")  # all experts are cut alike
_EMBEDDING, _HEAD = "model.embed_tokens.weight", "lm_head.weight"
_SINKS = ".self_attn.sinks"


class WeightCuts:
    """The cuts of a rank, by the checkpoint's names."""

    def __init__(self, config: ModelConfig, part: RankPart) -> None:
        dim, heads, columns = config.head_dim, part.heads, part.columns
        output_dim = config.output_dim
        kv_heads = part.kv_heads.start, part.kv_heads.stop
        query = _rows(heads, dim)
        key = _rows(part.kv_heads, dim)
        inner = _rows(columns)
        self._by_layer = {
            "self_attn.q_proj": query,
            "self_attn.k_proj": key,
            "self_attn.v_proj": key,
            "self_attn.qkv_proj": qkv_cut(
                (heads.start, heads.stop), kv_heads, config.num_heads, config.num_kv_heads, dim
            ),
            "self_attn.q_b_proj": query,
            "self_attn.kv_b_proj": _rows(heads, _expansion_dim(config)),
            "self_attn.o_proj": Cut(columns=(heads.start * output_dim, heads.stop * output_dim)),
            "mlp.gate_proj": inner,
            "mlp.up_proj": inner,
            "mlp.gate_up_proj": gate_up_cut(
                (columns.start, columns.stop), config.intermediate_size
            ),
            "mlp.down_proj": Cut(columns=(columns.start, columns.stop)),
        }
        if part.experts is not None:
            self._by_layer |= _mlp_cuts("mlp.experts", part.experts.columns)
            self._by_layer |= _mlp_cuts("mlp.shared_experts", part.experts.shared)
        self._vocabulary = _rows(part.vocabulary)
        self._heads = _rows(heads)
        self._layers = config.layers

    def of(self, name: str) -> Cut:
        """Norms are whole, as are the biases of row-parallel GEMMs: they follow the sum."""
        if name in (_EMBEDDING, _HEAD):
            return self._vocabulary
        if name.endswith(_SINKS):
            return self._heads
        path, _, kind = name.removeprefix("model.layers.").rpartition(".")
        index, _, inside = path.partition(".")
        cut = self._by_layer.get(_EXPERT.sub("", inside), WHOLE)
        if kind == "bias":
            return WHOLE if cut.columns is not None else cut
        formats = self._layers[int(index)].formats if index.isdigit() else None
        form = None if formats is None else formats.of(inside)
        return cut if form is None or cut.is_whole else quantized_cut(name, form, cut)


def _expansion_dim(config: ModelConfig) -> int:
    """Returns the rows of a head's keys and values in what expands latents."""
    return 0 if config.latent is None else config.latent.nope_dim + config.latent.value_dim


def _mlp_cuts(place: str, columns: Range) -> dict[str, Cut]:
    return {
        f"{place}.gate_proj": Cut(rows=(columns,)),
        f"{place}.up_proj": Cut(rows=(columns,)),
        f"{place}.down_proj": Cut(columns=columns),
    }


def _rows(positions: range, size: int = 1) -> Cut:
    return Cut(rows=((positions.start * size, positions.stop * size),))
