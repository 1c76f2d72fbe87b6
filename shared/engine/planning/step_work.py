"""What a step moves and computes, from its shape and the model's config alone. No torch.

    bytes        every weight once: of experts those that the step's tokens are expected to choose,
                 the output head where logits are needed; the KV that attention sees, once for each
                 sequence, and the KV that is written
    operations   two for each weight and token; two for each element of a pair's key and value

These are the least: activations, and what a kernel reads again, are not counted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import msgspec

from shared.engine.model_config.model_config import ModelConfig
from shared.engine.model_config.moe_config import MoeConfig
from shared.engine.parallel.rank_part import RankPart, whole_model
from shared.engine.planning.rank_bytes import kv_values_per_token, num_weights, weight_bytes
from shared.kv_layout import Chunk, Reach, Window


class StepWork(NamedTuple):
    num_bytes: float = 0.0
    num_operations: float = 0.0


class AttentionWork(msgspec.Struct, frozen=True):
    """The layers of one reach: bytes of a token's KV, operations of a query and a key."""

    reach: Reach
    token_bytes: int
    pair_operations: int


class ModelWorkload(msgspec.Struct, frozen=True):
    """What determines the work of a model's steps. `layer_*` are the weights that each token
    uses, `expert_*` those of one expert in all layers. By default nothing is counted.
    """

    layer_weights: int = 0
    layer_bytes: float = 0.0
    head_weights: int = 0
    head_bytes: float = 0.0
    num_experts: int = 1
    experts_per_token: int = 0
    expert_weights: int = 0
    expert_bytes: float = 0.0
    attention: tuple[AttentionWork, ...] = ()

    def of(self, starts: Sequence[int], counts: Sequence[int], num_logits: int) -> StepWork:
        """Returns the work of a step over sequences that compute `counts` tokens each, from the
        positions `starts` on; `num_logits` tokens of them have logits.
        """
        num_tokens = sum(counts)
        num_bytes, num_operations = self.layer_bytes, 2.0 * num_tokens * self.layer_weights
        if self.experts_per_token:
            num_bytes += self._num_chosen(num_tokens) * self.expert_bytes
            num_operations += 2.0 * num_tokens * self.experts_per_token * self.expert_weights
        if num_logits:
            num_bytes += self.head_bytes
            num_operations += 2.0 * num_logits * self.head_weights
        num_held = sum(starts) + num_tokens  # keys of all sequences once the step is done
        for each in self.attention:
            num_keys = num_held
            if each.reach is not None:
                num_keys -= _num_unseen(each.reach, starts)
            num_pairs = num_keys
            if num_tokens != len(counts):
                num_pairs = _num_pairs(each.reach, starts, counts)
            num_bytes += each.token_bytes * (num_keys + num_tokens)
            num_operations += each.pair_operations * num_pairs
        return StepWork(num_bytes, num_operations)

    def _num_chosen(self, num_tokens: int) -> float:
        """Returns the experts of a layer that tokens choose, on average if all are as probable."""
        share_of_one = self.experts_per_token / self.num_experts
        return self.num_experts * (1.0 - (1.0 - share_of_one) ** num_tokens)


def model_work(
    config: ModelConfig, *, item_bytes: int, kv_item_bytes: int, stored_share: float = 1.0
) -> ModelWorkload:
    """Returns the work of a model's steps. `item_bytes` is the size of a weight that is not
    quantized, `stored_share` the share of the bytes that lossless compression leaves.
    """
    whole, moe = whole_model(config), config.moe
    layers = replace(whole, has_embedding=False, has_head=False)
    head = replace(whole, layers=range(0), has_embedding=False)
    one = None if moe is None else _with_experts(layers, moe, 1)
    none = layers if moe is None else _with_experts(layers, moe, 0)

    def bytes_of(part: RankPart) -> float:
        return stored_share * weight_bytes(config, part, item_bytes)

    return ModelWorkload(
        layer_weights=num_weights(config, none),
        layer_bytes=bytes_of(none),
        head_weights=num_weights(config, head),
        head_bytes=bytes_of(head),
        num_experts=1 if moe is None else moe.num_experts,
        experts_per_token=0 if moe is None else moe.experts_per_token,
        expert_weights=0 if one is None else num_weights(config, one) - num_weights(config, none),
        expert_bytes=0.0 if one is None else bytes_of(one) - bytes_of(none),
        attention=_attention(config, kv_values_per_token(config, whole) * kv_item_bytes),
    )


def _with_experts(part: RankPart, moe: MoeConfig, num_experts: int) -> RankPart:
    held = part.experts or moe.held
    return replace(part, experts=msgspec.structs.replace(held, experts=(0, num_experts)))


def _attention(config: ModelConfig, token_bytes: int) -> tuple[AttentionWork, ...]:
    """`token_bytes` are those of a token's KV in all layers, which are equal in it."""
    row_bytes = token_bytes // config.num_layers
    widths = 2 * config.head_dim
    if config.latent is not None:  # values are the first elements of the latents
        widths = 2 * config.latent.kv_rank + config.latent.rope_dim
    reaches = Counter(layer.reach for layer in config.layers)
    return tuple(
        AttentionWork(reach, num * row_bytes, num * 2 * config.num_heads * widths)
        for reach, num in reaches.items()
    )


def _num_unseen(reach: Window | Chunk, starts: Sequence[int]) -> int:
    """Returns the keys that no query from these positions on sees."""
    if isinstance(reach, Window):  # as `first_seen`, which would be a call for each sequence
        last = reach.tokens - 1
        return sum([start - last for start in starts if start > last])
    return sum(map(reach.first_seen, starts))


def _num_pairs(reach: Reach, starts: Sequence[int], counts: Sequence[int]) -> int:
    """Returns the pairs of a query and a key that it sees."""
    return sum(
        _pairs_before(reach, start + count) - _pairs_before(reach, start)
        for start, count in zip(starts, counts, strict=True)
    )


def _pairs_before(reach: Reach, num_tokens: int) -> int:
    """Returns the pairs of a sequence's first queries."""
    if reach is None or num_tokens <= reach.tokens:
        return _triangle(num_tokens)
    if isinstance(reach, Window):
        return _triangle(reach.tokens) + (num_tokens - reach.tokens) * reach.tokens
    num_chunks, rest = divmod(num_tokens, reach.tokens)
    return num_chunks * _triangle(reach.tokens) + _triangle(rest)


def _triangle(count: int) -> int:
    return count * (count + 1) // 2
