"""Copies a run of tokens from the wire layout to the paged cache."""

from __future__ import annotations

import torch
from torch import Tensor


def scatter_blocks(
    kv_cache: Tensor,
    block_table: Tensor,
    first_token: int,
    num_tokens: int,
    payload: Tensor,
) -> None:
    """The reverse of `gather_blocks`; changes no token outside the run.

    payload [num_layers, planes, num_tokens, num_kv_heads, head_dim] in the dtype of kv_cache
    [num_layers, planes, num_blocks, num_kv_heads, block_size, head_dim].
    """
    num_layers, num_planes, num_blocks, num_kv_heads, block_size, head_dim = kv_cache.shape
    device = kv_cache.device
    positions = torch.arange(first_token, first_token + num_tokens, device=device)
    planes = torch.arange(num_layers * num_planes, device=device).view(-1, 1, 1) * num_blocks
    blocks = planes + block_table[positions // block_size].unsqueeze(1)  # [planes, tokens, 1]
    heads = blocks * num_kv_heads + torch.arange(num_kv_heads, device=device)
    rows = (heads * block_size + (positions % block_size).unsqueeze(1)).view(-1)
    if kv_cache.element_size() == 1:  # torch cannot copy FP8 by index
        kv_cache, payload = kv_cache.view(torch.uint8), payload.view(torch.uint8)
    kv_cache.view(-1, head_dim).index_copy_(0, rows, payload.reshape(-1, head_dim))
