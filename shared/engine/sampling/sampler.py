"""Samples the next tokens from logits and the parameters of the requests.

The steps in order; greedy takes the largest logit after the third:

    1. logit_bias is added
    2. repetition, then frequency and presence penalty   kernels/torch_ops/penalize.py
    3. tokens become -inf that the row's grammar forbids kernels/torch_ops/apply_token_mask.py
       or that are banned: stop tokens before min_tokens, last tokens of bad words
    4. temperature, top-k, top-p, min-p, Gumbel noise    kernels/torch_ops/sample.py;
                                                         on CUDA kernels/gpu/sampling/sample.py

A grammar precedes bias and bans: if they exclude all that it allows, the grammar alone decides.
vLLM has the same order of bias and penalties. Everything is a function of the logits, the tokens
so far and the parameters alone, so a resumed sequence samples the same tokens.
Log-probabilities are `raw` from before 1, or `processed` from before the noise; for greedy, from
after 3.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kernels.device import to_device
from kernels.ops import (
    apply_token_mask,
    argmax,
    penalize,
    sample,
    sample_among,
    scale_logits,
)
from shared.engine.sampling.checks import LARGEST
from shared.engine.sampling.logprobs import token_logprobs
from shared.engine.sampling.mask_words import (
    NO_MASKS,
    FewTokens,
    JoinedMasks,
    Words,
    few_tokens,
    without_banned,
)
from shared.engine.step import SamplingInputs, sampling_rows
from shared.messages import TokenLogprobs

# Operands of `sample` after the logits
SAMPLING_COLUMNS = (
    *("temperature", "top_k", "top_p", "min_p"),
    *("seed", "choice_index", "output_position"),
)


def sample_tokens(
    logits: Tensor, inputs: SamplingInputs, masks: JoinedMasks = NO_MASKS
) -> tuple[list[int], list[TokenLogprobs | None]]:
    """logits [R, vocab_size] FP32, overwritten -> [R] token ids, and as many logprobs or, if no row
    asks, none. Those of `masks.late_rows` are void.
    """
    raw = _rows(logits, inputs.raw_logprobs)
    few = _adjust(logits, inputs, masks.words)
    processed = _rows(logits, inputs.processed_logprobs)
    token_ids = _sample(logits, inputs) if few is None else _sample_few(logits, inputs, few)
    if raw is None and processed is None:
        return token_ids, []
    by_row: list[TokenLogprobs | None] = [None] * len(token_ids)
    if raw is not None:
        _add_logprobs(by_row, raw, inputs.raw_logprobs, token_ids)
    if processed is not None:
        rows = list(inputs.processed_logprobs)
        _add_logprobs(by_row, _scale(processed, rows, inputs), inputs.processed_logprobs, token_ids)
    return token_ids, by_row


def sampling_columns(
    inputs: SamplingInputs, device: torch.device, rows: NDArray[np.int64] | slice = slice(None)
) -> list[Tensor]:
    """Returns the operands of `sample` after the logits, of these rows."""
    chosen = inputs.rows[rows]
    return _on(device, *(chosen[name] for name in SAMPLING_COLUMNS))


def _rows(logits: Tensor, requested: Mapping[int, int]) -> Tensor | None:
    """Returns a copy of the rows that need it."""
    return logits[list(requested)] if requested else None


def _adjust(logits: Tensor, inputs: SamplingInputs, words: Mapping[int, Words]) -> FewTokens | None:
    """Applies bias, penalties, masks and bans in place; the masks that allow few tokens are not
    applied, but these tokens returned.
    """
    device = logits.device
    if inputs.bias is not None:
        rows, token_ids, values = _on(
            device, inputs.bias.rows, inputs.bias.token_ids, inputs.bias.values
        )
        logits.index_put_((rows, token_ids), values, accumulate=True)
        # an overflow would make an allowed token equal to a forbidden one
        logits[rows, token_ids] = logits[rows, token_ids].clamp_(-LARGEST, LARGEST)
    if inputs.penalties is not None:
        each = inputs.penalties
        penalize(logits, *_on(device, each.rows, each.token_ids, each.repetition, each.subtracted))
    banned, few = inputs.banned, None
    if words:
        words, banned = without_banned(words, banned)
        few = _few(logits, inputs, words)
        applied = set() if few is None else set(few.rows.tolist())
        words = {row: each for row, each in words.items() if row not in applied}
    if words:
        apply_token_mask(logits, *_mask_tensors(words, device))
    if banned:
        rows, token_ids = torch.tensor(banned, device=device).unbind(1)
        logits[rows, token_ids] = float("-inf")
    return few


def _few(logits: Tensor, inputs: SamplingInputs, words: Mapping[int, Words]) -> FewTokens | None:
    """Returns the few tokens of rows that are sampled from them alone: on the CPU, without top-k,
    top-p and processed logprobs.
    """
    if not logits.is_cpu:
        return None
    is_cut = (inputs.rows["top_k"] > 0) | (inputs.rows["top_p"] < 1)
    excluded = {*np.flatnonzero(is_cut).tolist(), *inputs.processed_logprobs}
    found = {row: each for row, each in words.items() if row not in excluded}
    return few_tokens(found, logits.shape[1])


def _mask_tensors(words: Mapping[int, Words], device: torch.device) -> tuple[Tensor, Tensor]:
    """Returns the rows [M] and words [M, ⌈vocab_size / 32⌉]; these go to the device as
    one pinned copy.
    """
    each = list(words.values())
    shape = len(each), len(each[0])
    host = torch.empty(shape, dtype=torch.int32, pin_memory=device.type == "cuda")
    np.concatenate(each, out=host.numpy().reshape(-1))
    return torch.tensor(list(words), device=device), host.to(device, non_blocking=True)


def _sample(
    logits: Tensor, inputs: SamplingInputs, rows: NDArray[np.int64] | slice = slice(None)
) -> list[int]:
    """logits of these rows."""
    if not inputs.rows["temperature"][rows].any():
        return argmax(logits).tolist()
    return sample(logits, *sampling_columns(inputs, logits.device, rows)).tolist()


def _sample_few(logits: Tensor, inputs: SamplingInputs, few: FewTokens) -> list[int]:
    """Samples rows among their few tokens, and the other rows among all tokens."""
    sampled, rows = np.empty(len(logits), np.int64), few.rows
    own = inputs.rows.take(rows)
    names = ("temperature", "min_p", "seed", "choice_index", "output_position")
    sampled[rows] = sample_among(
        logits.numpy()[few.row_of_token, few.token_ids],
        few.token_ids,
        few.starts,
        *(own[name].copy() for name in names),
    )
    others = np.setdiff1d(np.arange(len(logits)), rows)
    if len(others):
        sampled[others] = _sample(logits[others], inputs, others)
    return sampled.tolist()


def _scale(logits: Tensor, rows: list[int], inputs: SamplingInputs) -> Tensor:
    """Returns the logits that rows are sampled from; greedy ones at temperature 1, not
    truncated.
    """
    own = inputs.rows.take(rows)
    is_greedy = own["temperature"] == 0
    own[is_greedy] = sampling_rows(1, temperature=1)
    names = ("temperature", "top_k", "top_p", "min_p")
    return scale_logits(logits, *_on(logits.device, *(own[name] for name in names)))


def _add_logprobs(
    by_row: list[TokenLogprobs | None],
    logits: Tensor,
    requested: Mapping[int, int],
    token_ids: list[int],
) -> None:
    """Adds the logprobs of the rows that request them; `logits` has these rows, in their order."""
    sampled = torch.tensor([token_ids[row] for row in requested], device=logits.device)
    each = token_logprobs(logits, sampled, list(requested.values()))
    for row, logprobs in zip(requested, each, strict=True):
        by_row[row] = logprobs


def _on(device: torch.device, *columns: NDArray[np.generic]) -> list[Tensor]:
    return [to_device(as_signed(column), device) for column in columns]


def as_signed(column: NDArray[np.generic]) -> NDArray[np.generic]:
    """Returns contiguous integers without unsigned integers, on which torch has few operations."""
    column = column.copy()
    return column.view(np.int64) if column.dtype == np.uint64 else column
