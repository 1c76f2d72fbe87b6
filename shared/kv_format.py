"""The layout of KV. Every cache tier is keyed by this format and the block hash."""

from __future__ import annotations

import msgspec

ITEM_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4, "uint8": 1}


class KvFormat(msgspec.Struct, frozen=True):
    """Two workers can exchange KV if their `key` is equal.

    On the wire, the KV of consecutive tokens is contiguous with shape [num_layers, 2 (key, value),
    num_tokens, num_kv_heads, head_dim].
    """

    dtype: str
    block_size: int
    num_layers: int
    num_kv_heads: int
    head_dim: int

    @property
    def key(self) -> str:
        return (
            f"{self.dtype}/b{self.block_size}/l{self.num_layers}"
            f"/h{self.num_kv_heads}/d{self.head_dim}"
        )

    @property
    def bytes_per_token(self) -> int:
        values = self.num_layers * 2 * self.num_kv_heads * self.head_dim
        return values * ITEM_BYTES[self.dtype]
