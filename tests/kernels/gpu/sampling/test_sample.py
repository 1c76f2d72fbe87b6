from __future__ import annotations

from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.check_tensor import BadTensor
from kernels.device import IS_INTERPRETED
from kernels.gpu.sampling.sample import sample
from kernels.gpu.sampling.sample_noise import noise_key, uniform
from kernels.torch_ops.sample import _allowed
from kernels.torch_ops.sample import sample as reference_sample
from kernels.torch_ops.sample import uniform as reference_uniform
from tests.support.kernels.inputs import poisoned_outputs, random

VOCAB_SIZES = [1, 100, 600] if IS_INTERPRETED else [1, 63, 100, 32_000, 128_256]
REPEATS = 1 if IS_INTERPRETED else 8  # of each row of options
FLOATS = ("temperature", "top_p", "min_p")
MARGIN = 1e-5  # of the weight: sums with other rounding may end within this range

# A high temperature, so that a limit excludes most of what would be sampled.
OPTIONS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "none": {},
    "top-k": {"temperature": 9.0, "top_k": 5},
    "top-k of one": {"top_k": 1},
    "top-k of many": {"temperature": 9.0, "top_k": 90},
    "top-k of more than there are": {"top_k": 1 << 40},
    "top-p": {"temperature": 9.0, "top_p": 0.3},
    "top-p of nothing": {"top_p": 0.0},
    "top-p of nearly all": {"top_p": 0.999},
    "min-p": {"min_p": 0.05},
    "min-p of one": {"min_p": 1.0},
    "top-k, top-p": {"top_k": 20, "top_p": 0.8},
    "top-k of many, top-p": {"temperature": 9.0, "top_k": 90, "top_p": 0.5},
    "top-p, min-p": {"top_p": 0.9, "min_p": 0.02},
    "all": {"temperature": 0.8, "top_k": 30, "top_p": 0.9, "min_p": 0.02},
}


@pytest.fixture(params=[(256, 128), (256, 3)], ids=["lists", "short lists"])
def lists(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Several pieces per row for small vocabularies, and lists that overflow."""
    piece, capacity = request.param
    if IS_INTERPRETED:
        monkeypatch.setattr("kernels.gpu.sampling.sample.PIECE", piece)
    monkeypatch.setattr("kernels.gpu.sampling.sample.CAPACITY", capacity)


def _columns(num_rows: int, device: torch.device, **overrides: Any) -> dict[str, Tensor]:
    columns: dict[str, Any] = {
        "temperature": 1.0,
        "top_k": 0,
        "top_p": 1.0,
        "min_p": 0.0,
        "seed": torch.arange(num_rows) * 0x1234567 - 2**62,
        "choice_index": 3,
        "output_position": torch.arange(num_rows),
        **overrides,
    }
    return {
        name: value.to(device)
        if isinstance(value, Tensor)
        else torch.full(
            (num_rows,),
            value,
            dtype=torch.float32 if name in FLOATS else torch.int64,
            device=device,
        )
        for name, value in columns.items()
    }


def _one_row_each(device: torch.device) -> dict[str, Tensor]:
    """A row for each set of options, with different samples."""
    rows = [_columns(1, device, **options) for options in OPTIONS.values()] * REPEATS
    columns = {name: torch.cat([row[name] for row in rows]) for name in rows[0]}
    columns["output_position"] = torch.arange(len(rows), device=device)
    return columns


def _some_rows_each(device: torch.device) -> dict[str, Tensor]:
    """Rows for one limit of each kind, and for all; the interpreter needs 0.1 s for a row."""
    columns, names = _one_row_each(device), list(OPTIONS)
    if not IS_INTERPRETED:
        return columns
    rows = [names.index(each) for each in ("top-k", "top-p", "min-p", "top-k of many, top-p")]
    return {name: column[rows] for name, column in columns.items()}


def _assert_same(
    tokens: Tensor, expected: Tensor, logits: Tensor, columns: dict[str, Tensor]
) -> None:
    """Allows differences where top-p ends so close to a token's edge that the sum order decides."""
    for row in torch.nonzero(tokens != expected).flatten().tolist():
        one = {name: column[row].item() for name, column in columns.items()}
        scaled = logits[row].double().cpu() / (one["temperature"] or 1.0)
        if 0 < one["top_k"] < len(scaled):
            kth = scaled.topk(int(one["top_k"])).values[-1]
            scaled[scaled < kth] = -torch.inf
        pair = scaled[torch.stack((tokens[row], expected[row])).cpu()]
        edges = [scaled.softmax(-1)[scaled > x].sum() for x in pair]
        is_marginal = min(abs(edge - one["top_p"]) for edge in edges) < MARGIN
        assert one["top_p"] < 1 and pair.isfinite().all() and is_marginal, (row, one)


def _mask(num_rows: int, vocab_size: int, device: torch.device, *, part: float) -> Tensor:
    """Every row allows its first token, and each other token with probability `part`."""
    generator = torch.Generator().manual_seed(9)
    num_words = -(-vocab_size // 32)
    allowed = torch.rand(num_rows, num_words * 32, generator=generator) < part
    allowed[:, 0] = True
    powers = 1 << torch.arange(32)
    words = (allowed.view(num_rows, num_words, 32) * powers).sum(-1)
    return words.to(torch.int32).to(device)


@pytest.mark.parametrize("vocab_size", VOCAB_SIZES[::-1])
def test_tokens_equal_the_reference(
    vocab_size: int, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    if IS_INTERPRETED:
        monkeypatch.setattr("kernels.gpu.sampling.sample.PIECE", 256)
    columns = _one_row_each(device)
    num_rows = len(columns["seed"])
    logits = random(num_rows, vocab_size, like=device, dtype=torch.float32, seed=vocab_size) * 2
    before = logits.clone()
    with poisoned_outputs():
        tokens = sample(logits, **columns)
    _assert_same(tokens, reference_sample(logits, **columns), logits, columns)
    assert torch.equal(logits, before)


@pytest.mark.usefixtures("lists")
@pytest.mark.parametrize("part", [0.02, 0.5])
def test_only_allowed_tokens_are_sampled(part: float, device: torch.device) -> None:
    columns, vocab_size = _some_rows_each(device), VOCAB_SIZES[-1]
    num_rows = len(columns["seed"])
    logits = random(num_rows, vocab_size, like=device, dtype=torch.float32) * 3
    mask = _mask(num_rows, vocab_size, device, part=part)
    with poisoned_outputs():
        tokens = sample(logits, **columns, mask=mask)
    expected = reference_sample(logits, **columns, mask=mask)
    allowed = logits.masked_fill(~_allowed(mask, vocab_size), -torch.inf)
    _assert_same(tokens, expected, allowed, columns)
    words = mask.gather(1, (tokens // 32).unsqueeze(1)).squeeze(1)
    assert ((words >> (tokens % 32)) & 1 == 1).all()


def test_sample_does_not_depend_on_other_rows(device: torch.device) -> None:
    columns = _some_rows_each(device)
    logits = random(len(columns["seed"]), 100, like=device, dtype=torch.float32) * 3
    together = sample(logits, **columns)
    for row in range(0, len(logits), 3):
        rows = slice(row, row + 1)
        alone = {name: column[rows] for name, column in columns.items()}
        assert torch.equal(sample(logits[rows], **alone), together[rows])


@pytest.mark.usefixtures("lists")
def test_ties_share_a_limit_and_lowest_id_wins(device: torch.device) -> None:
    """Few distinct logits, as in BF16, so that limits are among equal ones."""
    columns = _some_rows_each(device)
    logits = random(len(columns["seed"]), VOCAB_SIZES[-1], like=device, dtype=torch.float32)
    logits = logits.mul(4).round().div(4)
    tokens = sample(logits, **columns)
    _assert_same(tokens, reference_sample(logits, **columns), logits, columns)


def test_lowest_temperature_samples_the_largest_logit(device: torch.device) -> None:
    logits = torch.tensor([[1.0, 2.0, 40.0, 39.0]], device=device).repeat(3, 1)
    columns = _columns(3, device, temperature=torch.tensor([1e-3, 1e-37, 1e-40]))
    columns["top_k"][:2], columns["top_p"][1:] = 3, 0.9
    assert sample(logits, **columns).tolist() == [2, 2, 2]


def test_infinite_logits(device: torch.device) -> None:
    infinity, chosen = float("inf"), ("none", "top-k", "top-p", "all")
    rows = [_columns(1, device, **OPTIONS[name]) for name in chosen]
    columns = {name: torch.cat([row[name] for row in rows]) for name in rows[0]}

    def sampled(*row: float) -> set[int]:
        logits = torch.tensor([row] * len(rows), device=device)
        return set(sample(logits, **columns).tolist())

    assert sampled(-infinity, -infinity, -infinity) == {0}
    assert sampled(-infinity, -1e30, -infinity, -1e30) <= {1, 3}
    assert sampled(0.0, infinity, 3.0) == {1}


@triton.jit
def _uniform_kernel(seed_ptr, choice_ptr, position_ptr, out_ptr, num: tl.constexpr):
    row, token = tl.program_id(0), tl.arange(0, num)
    key = noise_key(seed_ptr, choice_ptr, position_ptr, row)
    tl.store(out_ptr + row * num + token, uniform(token, key))


def test_uniform_numbers_equal_reference_bit_for_bit(device: torch.device) -> None:
    seeds = torch.tensor([0, 1, 2**31, 2**32 - 1, -1, -(2**63)], device=device)
    choices = torch.tensor([0, 1, 2, 2**31, 2**32, 2**63 - 1], device=device)
    positions = torch.tensor([5, 0, 2**20, 3, 2**31 - 1, 7], device=device)
    sampled = torch.full((6, 256), torch.nan, device=device)
    _uniform_kernel[(6,)](seeds, choices, positions, sampled, num=256)
    assert torch.equal(sampled, reference_uniform(seeds, choices, positions, 256))


# Interpreted, its 40 rows take 9 s: there, tokens are those of the reference, which follow it.
@(pytest.mark.long if IS_INTERPRETED else lambda test: test)
def test_samples_follow_the_renormalised_softmax(device: torch.device) -> None:
    """Chi-square with 2 degrees of freedom: exceeds 13.8 once in a thousand."""
    num_samples = 40 if IS_INTERPRETED else 50_000
    probabilities = torch.tensor([0.4, 0.3, 0.2, 0.1], dtype=torch.float64)
    logits = probabilities.log().float().expand(num_samples, -1).contiguous().to(device)
    sampled = sample(logits, **_columns(num_samples, device, top_p=0.8)).cpu()
    expected = probabilities[:3] / probabilities[:3].sum() * num_samples
    counts = torch.bincount(sampled, minlength=4)
    assert counts[3] == 0
    assert ((counts[:3] - expected).square() / expected).sum() < 13.8


def test_non_contiguous_rows(device: torch.device) -> None:
    wide = random(3, 200, like=device, dtype=torch.float32)
    mask = _mask(3, 200, device, part=0.5)
    columns = _columns(3, device, temperature=2.0)
    tokens = sample(wide[:, :100], **columns, mask=mask[:, :4])
    assert torch.equal(tokens, sample(wide[:, :100].clone(), **columns, mask=mask[:, :4].clone()))


def test_no_rows(device: torch.device) -> None:
    assert sample(torch.ones(0, 5, device=device), **_columns(0, device)).shape == (0,)


def test_invalid_arguments_raise(device: torch.device) -> None:
    logits, columns = torch.ones(2, 100, device=device), _columns(2, device)
    with pytest.raises(BadTensor, match=r"logits is torch.float16, not torch.float32"):
        sample(logits.half(), **columns)
    with pytest.raises(BadTensor, match=r"logits has shape \[2, 0\], not \[any, 1 to"):
        sample(logits[:, :0], **columns)
    with pytest.raises(BadTensor, match=r"top_k is torch.int32, not torch.int64"):
        sample(logits, **{**columns, "top_k": columns["top_k"].int()})
    with pytest.raises(BadTensor, match=r"min_p has shape \[1\], not \[2\]"):
        sample(logits, **{**columns, "min_p": columns["min_p"][:1]})
    with pytest.raises(BadTensor, match=r"mask has shape \[2, 3\], not \[2, 4\]"):
        sample(logits, **columns, mask=torch.ones(2, 3, dtype=torch.int32, device=device))
