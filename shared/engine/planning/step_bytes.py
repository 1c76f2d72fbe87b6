"""Bytes that ranks send each other for a step, from the model's config alone. No torch.

    stage 0      the embedding, summed over its ranks
    each layer   the sums of o_proj and down_proj; of experts, k rows for each token: see
                 shared/engine/parallel/expert_part.py
    border       hidden states: each rank of a stage sends them to its place in the next one
    last stage   the parts of the logits, gathered

A sum of few tokens is gathered: each rank sends its node of the lane tree to all others. A larger
one is halved, as in shared/engine/parallel/rank_mesh.py: nodes of half the elements, a quarter and
so on, then parts.
"""

from __future__ import annotations

from dataclasses import dataclass

from shared.config import ExpertSplit
from shared.engine.model_config.moe_config import MoeConfig
from shared.engine.parallel.cuts import column_lanes, rank_range
from shared.engine.parallel.expert_part import split_of
from shared.engine.parallel.lanes import Exchange
from shared.engine.parallel.mesh_shape import ALL_GATHER_BYTES

SUMS_PER_LAYER = 2  # o_proj and down_proj
FP32_BYTES, BF16_BYTES = 4, 2


@dataclass(frozen=True)
class Traffic:
    """Traffic of one rank to other ranks of its stage: bytes, and exchanges one after the other."""

    num_bytes: float = 0.0
    num_exchanges: int = 0

    def __add__(self, other: Traffic) -> Traffic:
        return Traffic(self.num_bytes + other.num_bytes, self.num_exchanges + other.num_exchanges)

    def __mul__(self, times: int) -> Traffic:
        return Traffic(self.num_bytes * times, self.num_exchanges * times)


@dataclass(frozen=True, kw_only=True)
class StepShape:
    """A step of `num_tokens`, of which `num_sampled` have logits. `item_bytes` is that
    of an activation.
    """

    hidden_size: int
    vocab_size: int
    item_bytes: int = 2
    num_tokens: int = 1
    num_sampled: int = 1
    exchange: Exchange = "fp32"
    moe: MoeConfig | None = None  # most layers' experts: the first layers of a model may be dense
    experts: ExpertSplit = "auto"

    @property
    def border_bytes(self) -> int:
        """Bytes that a rank sends to the next stage."""
        return self.num_tokens * self.hidden_size * self.item_bytes

    def stage_traffic(self, tp: int, num_layers: int, *, is_first: bool, is_last: bool) -> Traffic:
        if tp == 1:
            return Traffic()
        node_bytes = FP32_BYTES if self.exchange == "fp32" else BF16_BYTES
        found = self._layer(tp, node_bytes) * num_layers
        if is_first:  # a vector of BF16 is a node of BF16 without rounding
            found += self._sum(tp, BF16_BYTES if self.item_bytes == BF16_BYTES else FP32_BYTES)
        return found + self._logits(tp) if is_last else found

    def _layer(self, tp: int, node_bytes: int) -> Traffic:
        one = self._sum(tp, node_bytes)
        if self.moe is None:
            return one * SUMS_PER_LAYER
        found = one * (2 if self.moe.shared_intermediate_size else 1)
        num_rows = self.num_tokens * self.moe.experts_per_token
        if split_of(self.moe, tp, self.experts) == "tp":
            return found + self._sum(tp, node_bytes, num_rows)
        own_rows = -(-num_rows // tp)  # assumes equally many rows for each expert
        return found + Traffic((tp - 1) * own_rows * self.hidden_size * self.item_bytes, 1)

    def _sum(self, tp: int, node_bytes: int, num_rows: int | None = None) -> Traffic:
        num_elements = (self.num_tokens if num_rows is None else num_rows) * self.hidden_size
        if num_elements * FP32_BYTES <= ALL_GATHER_BYTES:
            return Traffic((tp - 1) * num_elements * node_bytes, 1)
        halves = num_elements * (tp - 1) / tp * node_bytes
        parts = (tp - 1) * -(-num_elements // tp) * self.item_bytes
        return Traffic(halves + parts, tp.bit_length())

    def _logits(self, tp: int) -> Traffic:
        """Returns the bytes of logits. Parts are padded to the widest."""
        lanes = column_lanes(self.vocab_size)
        ranges = [rank_range(lanes, rank, tp) for rank in range(tp)]
        width = max(end - first for first, end in ranges)
        return Traffic((tp - 1) * width * self.num_sampled * FP32_BYTES, int(self.num_sampled > 0))
