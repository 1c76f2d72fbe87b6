"""Copies a run of tokens from the paged cache to the wire layout."""

from __future__ import annotations

import torch
from torch import Tensor


def gather_blocks(
    kv_cache: Tensor,
    block_table: Tensor,
    first_token: int,
    num_tokens: int,
    out: Tensor,
) -> None:
    """Fills out [num_layers, planes, num_tokens, num_kv_heads, head_dim].

    kv_cache [num_layers, planes, num_blocks, num_kv_heads, block_size, head_dim]; block_table [B]
    has the blocks of the full sequence, `first_token` is a position in it.
    """
    num_layers, num_planes, num_blocks, num_kv_heads, block_size, head_dim = kv_cache.shape
    first_block = first_token // block_size
    last_block = -(-(first_token + num_tokens) // block_size)
    columns = block_table[first_block:last_block]
    planes = torch.arange(num_layers * num_planes, device=columns.device) * num_blocks
    rows = (planes.unsqueeze(1) + columns).view(-1)
    blocks = kv_cache.view(-1, num_kv_heads * block_size * head_dim).index_select(0, rows)
    blocks = blocks.view(num_layers, num_planes, len(columns), num_kv_heads, block_size, head_dim)
    tokens = blocks.transpose(3, 4).flatten(2, 3)  # [num_layers, planes, tokens, num_kv_heads, D]
    offset = first_token - first_block * block_size
    out.copy_(tokens[:, :, offset : offset + num_tokens])
