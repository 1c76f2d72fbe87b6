"""What the two attention functions share: softmax over KV tiles at fixed absolute positions.

A query row's bits depend on its own query and context only. Each step either is exact (the maximum,
masking to 0), works on one element, or sums in an order that is fixed by absolute positions: within
a tile of TILE tokens by one matrix product, over tiles by a tree of adjacent pairs, in which a tile
that is wholly masked adds an exact 0. So tiles before a sliding window may be left out, as long as
the tree knows the absolute index of the first one that is there.

Matrix products keep a row's bits only from four rows on, and with several threads only if each of
them gets at least four (measured with MKL): rows are padded to a multiple of ROW_MULTIPLE.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

TILE = 64
ROW_MULTIPLE = 4
LOG2_E = math.log2(math.e)
# Below torch's grain size of 32,768 elements an elementwise op stays on one thread.
SERIAL_ELEMENTS = 1 << 14


def round_up(count: int, multiple: int) -> int:
    return -(-count // multiple) * multiple


def gather_kv(
    kv_cache: Tensor, block_tables: Tensor, context_lens: Tensor
) -> tuple[Tensor, Tensor]:
    """Copies each sequence's context out, as FP32; behind its end, up to whole tiles, are zeros.

    kv_cache [2, num_blocks, H, block_size, D]; block_tables [S, B]; context_lens [S]
    -> two [S, H, tokens, D]. Raises ValueError if blocks and tiles do not fit into each other.
    """
    _, _, num_kv_heads, block_size, head_dim = kv_cache.shape
    if TILE % block_size and block_size % TILE:
        raise ValueError(f"block_size {block_size} does not fit attention tiles of {TILE} tokens")
    num_tokens = round_up(int(context_lens.max()), TILE)
    num_columns = -(-num_tokens // block_size)
    columns = block_tables[:, :num_columns]
    if columns.shape[1] < num_columns:
        columns = torch.nn.functional.pad(columns, (0, num_columns - columns.shape[1]))
    heads = torch.arange(num_kv_heads, device=columns.device)
    rows = (columns.unsqueeze(1) * num_kv_heads + heads.view(1, -1, 1)).view(-1)
    shape = (columns.shape[0], num_kv_heads, num_columns * block_size, head_dim)
    key, value = (
        plane.view(-1, block_size * head_dim).index_select(0, rows).float().view(shape)
        for plane in kv_cache.unbind(0)
    )
    key, value = key[:, :, :num_tokens], value[:, :, :num_tokens]
    _clear_behind(context_lens.to(key.device), key, value)
    return key, value


def skip_before_window(
    block_tables: Tensor, context_lens: Tensor, first_visible: int, block_size: int
) -> tuple[int, Tensor, Tensor]:
    """Leaves out whole tiles and blocks before token `first_visible`.

    Returns the index of the first tile kept, and tables and lengths counted from it.
    """
    first_token = first_visible // max(TILE, block_size) * max(TILE, block_size)
    return (
        first_token // TILE,
        block_tables[:, first_token // block_size :],
        context_lens - first_token,
    )


def _clear_behind(context_lens: Tensor, key: Tensor, value: Tensor) -> None:
    """A block's last owner, maybe another tenant, can have left NaN: even masked, 0 · NaN is NaN.

    An AND of the bits, because it is several times as fast as a masked fill.
    """
    shortest = int(context_lens.min())
    token_index = torch.arange(shortest, key.shape[2], device=key.device)
    is_inside = token_index < context_lens.unsqueeze(1)
    bits = torch.where(is_inside, -1, 0).int()[:, None, :, None]
    for each in (key, value):
        each[:, :, shortest:].view(torch.int32).bitwise_and_(bits)


def visibility(is_visible: Tensor) -> Tensor:
    """What scores are cut down to by a minimum: +inf or, where masked, -inf. As fast as an add."""
    return torch.where(is_visible, float("inf"), float("-inf"))


def tree_sum(x: Tensor, first: int = 0) -> Tensor:
    """Sums dimension 1 by adjacent pairs; appending zeros to it changes no bit. [B, n, ...]

    `first` zeros that belong before it may be left out.
    """
    while x.shape[1] > 1:
        if first % 2:
            x = torch.cat((torch.zeros_like(x[:, :1]), x), dim=1)
        first //= 2
        paired = x.shape[1] // 2 * 2
        sums = x[:, 0:paired:2] + x[:, 1:paired:2]
        x = sums if paired == x.shape[1] else torch.cat((sums, x[:, -1:]), dim=1)
    return x[:, 0]


def exp2_(x: Tensor) -> Tensor:
    """2**x in place; x contiguous, of a multiple of 64 elements.

    Four times as fast as exp. Its vectorised form and its scalar tail differ by a bit, so no thread
    may end up with a tail: halves of x have none, thirds may.
    """
    if x.is_cuda or torch.get_num_threads() <= 2:
        return torch.exp2(x, out=x)
    for piece in x.view(-1).split(SERIAL_ELEMENTS):
        torch.exp2(piece, out=piece)
    return x


def score_factor(scale: float, softcap: float | None) -> float:
    """What queries are multiplied by so that their products with keys fit `softcap_`."""
    return scale * LOG2_E if softcap is None else scale * LOG2_E * 2 / softcap


def softcap_(scores: Tensor, softcap: float | None) -> Tensor:
    """cap · tanh(score / cap) in place, but for a constant that softmax does not see.

    tanh(x) = 1 - 2 / (1 + exp(2x)), because torch's own takes fifty times as long as exp2. `scores`
    as `softmax_value` takes them, of queries times `score_factor`.
    """
    if softcap is None:
        return scores
    return exp2_(scores).add_(1.0).reciprocal_().mul_(-2 * softcap * LOG2_E)


def softmax_value(scores: Tensor, value: Tensor, first_tile: int = 0) -> Tensor:
    """scores [B, num_tiles, R, TILE], -inf where masked, overwritten; value [B, tokens, D].

    `scores` carry a factor LOG2_E, R is a multiple of ROW_MULTIPLE, and each row sees a token.
    `first_tile`: how many tiles before these were left out.
    Returns softmax(scores / LOG2_E) · value, [B, R, D].
    """
    batch, num_tiles, num_rows, _ = scores.shape
    row_max = scores.amax(-1, keepdim=True).amax(1, keepdim=True)
    weights = exp2_(scores.sub_(row_max))
    total = tree_sum(weights.sum(-1), first_tile)  # [B, R]
    partial = torch.bmm(
        weights.view(batch * num_tiles, num_rows, TILE),
        value.reshape(batch * num_tiles, TILE, -1),
    )
    summed = tree_sum(partial.view(batch, num_tiles, num_rows, -1), first_tile)
    return summed / total.unsqueeze(-1)
