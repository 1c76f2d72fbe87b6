"""Copies a run of tokens in the layout of the wire into the paged cache."""

from __future__ import annotations

import torch
from torch import Tensor


def scatter_blocks(
    kv_cache: Tensor, block_table: Tensor, first_token: int, num_tokens: int, payload: Tensor
) -> None:
    """The reverse of `gather_blocks`; touches no token outside the run.

    payload [num_layers, 2, num_tokens, num_kv_heads, head_dim] in the dtype of kv_cache
    [num_layers, 2, num_kv_heads, num_blocks, block_size, head_dim].
    """
    num_layers, _, num_kv_heads, num_blocks, block_size, head_dim = kv_cache.shape
    positions = torch.arange(first_token, first_token + num_tokens, device=kv_cache.device)
    slots = block_table[positions // block_size] * block_size + positions % block_size
    planes = torch.arange(num_layers * 2, device=kv_cache.device) * num_kv_heads
    heads = planes.view(-1, 1, 1) + torch.arange(num_kv_heads, device=kv_cache.device)
    rows = (heads * (num_blocks * block_size) + slots.view(1, -1, 1)).view(-1)
    kv_cache.view(-1, head_dim).index_copy_(0, rows, payload.reshape(-1, head_dim))
