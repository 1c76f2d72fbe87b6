"""Excludes the tokens that a mask forbids, in place.

    x' = x if bit t % 32 of word t // 32 is set, else -inf,  for each token t

Logits are compared with a limit from a table, for eight tokens at a time. A grammar mostly allows a
few tokens, or forbids a few: if there are many words, only these are then addressed, one by one.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor
from torch.nn.functional import embedding

MANY_WORDS = 8192  # fewer are compared in less time than they are searched
SPARSE_SHARE = 16  # a mask is sparse if at most one in 16 words has tokens to address
PIECE = 1 << 16  # words whose limits are held at a time: 8 MiB


def apply_token_mask(logits: Tensor, rows: Tensor, words: Tensor) -> None:
    """Computes kernels.reference.apply_token_mask with less memory: rows that allow few tokens are
    scattered.
    """
    if words.numel() < MANY_WORDS:
        _compare(logits, rows, words)
        return
    most_words = words.shape[1] // SPARSE_SHARE
    allows_few = words.count_nonzero(1) <= most_words
    forbids_few = (~words).count_nonzero(1) <= most_words
    is_dense = ~(allows_few | forbids_few)
    parts = ((_retain, allows_few), (_exclude, forbids_few), (_compare, is_dense))
    for apply, is_part in parts:
        if is_part.any():
            apply(logits, rows[is_part], words[is_part])


def _retain(logits: Tensor, rows: Tensor, words: Tensor) -> None:
    places = _places(logits, rows, words)
    kept = logits[places]
    for row in rows.tolist():  # a third of index_fill_'s time
        logits[row].fill_(float("-inf"))
    logits[places] = kept


def _exclude(logits: Tensor, rows: Tensor, words: Tensor) -> None:
    logits[_places(logits, rows, ~words)] = float("-inf")


def _places(logits: Tensor, rows: Tensor, words: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the (row, token id) of each bit that is set."""
    index, column = words.nonzero(as_tuple=True)
    bit_numbers = torch.arange(32, dtype=torch.int32, device=words.device)
    bits = words[index, column].unsqueeze(1) >> bit_numbers & 1
    word, bit = bits.nonzero(as_tuple=True)
    token_ids = column[word] * 32 + bit
    is_inside = token_ids < logits.shape[1]
    return rows[index[word]][is_inside], token_ids[is_inside]


def _compare(logits: Tensor, rows: Tensor, words: Tensor) -> None:
    vocab_size, table = logits.shape[1], _limits(logits.device)
    num_rows = max(1, PIECE // words.shape[1])
    for first in range(0, len(rows), num_rows):
        part = slice(first, first + num_rows)
        limits = embedding(words[part].view(torch.uint8).int(), table).flatten(1)[:, :vocab_size]
        if len(rows) == len(logits):  # all, in order
            torch.minimum(logits[part], limits, out=logits[part])
            continue
        for row, limit in zip(rows[part].tolist(), limits, strict=True):
            torch.minimum(logits[row], limit, out=logits[row])


@cache
def _limits(device: torch.device) -> Tensor:
    """[256, 8] upper limits of eight logits: infinite, or -inf where the byte's bit is not set."""
    bits = torch.arange(256).unsqueeze(1) >> torch.arange(8) & 1
    return torch.where(bits != 0, torch.inf, -torch.inf).to(device)
