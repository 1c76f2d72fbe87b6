"""Sampling, over the logits of a batch."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from kernels.gpu.sampling import apply_token_mask as masking
from kernels.gpu.sampling import penalize as penalizing
from kernels.gpu.sampling import sample as sampling
from kernels.gpu.sampling import top_k as ranking
from kernels.reference.apply_token_mask import apply_token_mask as reference_mask
from kernels.torch_ops.penalize import penalize as reference_penalize
from kernels.torch_ops.sample import sample as reference_sample
from kernels.torch_ops.top_k import top_k as reference_top_k
from tests.support.kernels.cases.case import Inputs, Result, Results, cases
from tests.support.kernels.tolerance import assert_equal

K = 20
ENTRIES_PER_ROW = 80
# temperature, top-k, top-p, min-p of rows by turns; the first is greedy.
OPTIONS = ((0.0, 0, 1.0, 0.0), (0.9, 0, 1.0, 0.0), (1.0, 20, 1.0, 0.0), (0.8, 30, 0.9, 0.02))
# One sampled row in so many may differ: sums in another order may end on the other side of top-p.
ROWS_PER_DIFFERENCE = 32


def top_k(inputs: Inputs, rows: str) -> Results:
    logits = _logits(inputs, rows)
    found = ranking.top_k(logits, K)
    return (Result(found, lambda: reference_top_k(logits, K), assert_equal),)


def penalize(inputs: Inputs, rows: str) -> Results:
    """Distinct tokens of each row."""
    logits = _logits(inputs, rows)
    num_rows, vocab_size = logits.shape
    expected = inputs.copy(logits)
    row = torch.arange(num_rows, device=inputs.device).repeat_interleave(ENTRIES_PER_ROW)
    token = torch.arange(len(row), device=inputs.device) * 3 % vocab_size
    factors = inputs.random(2, len(row), dtype=torch.float32, seed=1)
    entries = row, token, factors[0].abs() + 0.5, factors[1]
    penalizing.penalize(logits, *entries)
    return _changed(logits, lambda: reference_penalize(expected, *entries), expected)


def apply_token_mask(inputs: Inputs, rows: str) -> Results:
    logits = _logits(inputs, rows)
    expected = inputs.copy(logits)
    every_row, words = torch.arange(len(logits), device=inputs.device), _words(inputs, logits)
    masking.apply_token_mask(logits, every_row, words)
    return _changed(logits, lambda: reference_mask(expected, every_row, words), expected)


def _changed(logits: Tensor, change: Callable[[], None], expected: Tensor) -> Results:
    """Returns the result of an operation that changes `logits` in place."""

    def wanted() -> Tensor:
        change()
        return expected

    return (Result(logits, wanted, assert_equal),)


def sample(inputs: Inputs, rows: str, has_mask: bool) -> Results:
    logits = _logits(inputs, rows)
    num_rows = len(logits)
    chosen = [OPTIONS[row % len(OPTIONS)] for row in range(num_rows)]
    temperature, k, p, min_p = zip(*chosen, strict=True)
    as_float = {"dtype": torch.float32, "device": inputs.device}
    row = torch.arange(num_rows, device=inputs.device)
    columns = (
        torch.tensor(temperature, **as_float),
        inputs.integers(k, torch.int64),
        torch.tensor(p, **as_float),
        torch.tensor(min_p, **as_float),
        *(row * 0x1234567 - 2**62, torch.zeros_like(row), row),
    )
    mask = _words(inputs, logits) if has_mask else None
    tokens = sampling.sample(logits, *columns, mask)
    is_greedy = columns[0] == 0

    def assert_sampled(actual: Tensor, expected: Tensor) -> None:
        assert torch.equal(actual[is_greedy], expected[is_greedy])
        assert int((actual != expected).sum()) <= num_rows // ROWS_PER_DIFFERENCE

    return (Result(tokens, lambda: reference_sample(logits, *columns, mask), assert_sampled),)


def _logits(inputs: Inputs, rows: str) -> Tensor:
    shape = inputs.sizes.rows[rows], inputs.sizes.vocab
    return inputs.random(*shape, dtype=torch.float32, scale=3.0)


def _words(inputs: Inputs, logits: Tensor) -> Tensor:
    """Returns a mask that allows about half of the tokens."""
    shape = len(logits), -(-logits.shape[1] // 32)
    if not inputs.is_computed:
        return inputs.random(*shape, dtype=torch.int32)
    bits = inputs.random(*shape, dtype=torch.float32, scale=2.0**30, seed=5)
    return bits.to(torch.int32) ^ (bits.roll(1).to(torch.int32) << 15)


CASES = [
    *cases(top_k, rows=("batch", "one")),
    *cases(penalize, rows=("batch",)),
    *cases(apply_token_mask, rows=("batch",)),
    *cases(sample, rows=("batch", "one"), has_mask=(False, True)),
]
