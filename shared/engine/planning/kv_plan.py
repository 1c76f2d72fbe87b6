"""KV of sequences on one rank, from the config alone: groups of layers hold what they see.

Bytes are of whole blocks, which all have as many slots as the largest group has layers. No torch.
"""

from __future__ import annotations

from dataclasses import dataclass

from shared.engine.model_config.model_config import ModelConfig
from shared.engine.parallel.rank_part import RankPart
from shared.engine.planning.rank_bytes import kv_values_per_token
from shared.errors import ConfigError
from shared.kv_layout import FP8, ITEM_BYTES, PagedKv, Reach, Window, group_layers
from shared.numerics import KV_DTYPES


@dataclass(frozen=True, slots=True)
class KvPlan:
    """A plan of the KV cache. `reaches` has one entry for each group; `group_bytes` are those of
    one token in one group; `block_size` is in tokens.
    """

    reaches: tuple[Reach, ...]
    group_bytes: int
    block_size: int

    def sequence_bytes(self, num_tokens: int) -> int:
        return self.group_bytes * sum(self._live_tokens(each, num_tokens) for each in self.reaches)

    def longest_sequence(self, kv_bytes: int) -> int:
        """Returns the tokens that fit; if no layer sees all tokens, as many as every
        layer could hold.
        """
        all_groups = self.group_bytes * len(self.reaches)
        growing = self.group_bytes * self.reaches.count(None)
        bounded = [each for each in self.reaches if each is not None]
        if growing and bounded:
            live = sum(self._live_tokens(each, each.tokens) for each in bounded)
            held = self.group_bytes * live
            found = (kv_bytes - held) // growing
            if found >= max(each.tokens for each in bounded):
                return found
        return kv_bytes // all_groups

    def num_sequences(self, kv_bytes: int, num_tokens: int) -> int:
        return kv_bytes // self.sequence_bytes(num_tokens)

    def _live_tokens(self, reach: Reach, num_tokens: int) -> int:
        """Returns the tokens that a sequence holds at most, in whole blocks."""
        if reach is None or num_tokens < reach.tokens:
            return self._whole_blocks(num_tokens)
        is_aligned = not isinstance(reach, Window) and reach.tokens % self.block_size == 0
        return self._whole_blocks(reach.tokens) + (0 if is_aligned else self.block_size)

    def _whole_blocks(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size) * self.block_size


def kv_item_bytes(config: ModelConfig, kv_dtype: str, dtype: str) -> int:
    """Returns the bytes of a value in `--kv-dtype`, beside activations in `dtype`. Raises
    ConfigError.
    """
    if kv_dtype not in KV_DTYPES:
        raise _bad(f"{kv_dtype!r} is none of {', '.join(KV_DTYPES)}")
    if kv_dtype == "bf16" and dtype != "bfloat16":
        raise _bad(f"bf16 needs activations in bfloat16, not {dtype}")
    is_fp8 = kv_dtype == "fp8" or (kv_dtype == "auto" and config.declares_fp8_kv)
    return ITEM_BYTES[FP8 if is_fp8 else dtype]


def _bad(reason: str) -> ConfigError:
    return ConfigError(f"kv_dtype {reason}", param="kv_dtype")


def kv_plan(config: ModelConfig, part: RankPart, item_bytes: int, block_size: int) -> KvPlan:
    """Returns the plan of a part that has layers."""
    groups = group_layers([_state(config, layer.reach) for layer in config.layers])
    slots = max(len(set(group.layers) & set(part.layers)) for group in groups)
    values = kv_values_per_token(config, part) // len(part.layers)
    reaches = tuple(group.state.reach for group in groups)
    return KvPlan(reaches, slots * values * item_bytes, block_size)


def _state(config: ModelConfig, reach: Reach) -> PagedKv:
    """Returns the state of a layer. A reach beyond the longest context is none."""
    if reach is not None and reach.tokens >= config.max_position_embeddings:
        reach = None
    return PagedKv(config.num_kv_heads, config.head_dim, "bfloat16", reach)
