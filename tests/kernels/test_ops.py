"""The ops compared with their formulas in FP64, both the reference and those compiled for CPUs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from kernels.cpu.attention import decode_attention as cpu_decode_attention
from kernels.cpu.attention import prefill_attention as cpu_prefill_attention
from kernels.cpu.attention import rotate_and_store as cpu_rotate_and_store
from kernels.cpu.layer import add_rms_norm as cpu_add_rms_norm
from kernels.cpu.layer import gated as cpu_gated
from kernels.cpu.layer import rms_norm as cpu_rms_norm
from kernels.reference import add_rms_norm as plain_add_rms_norm
from kernels.reference import decode_attention as plain_decode_attention
from kernels.reference import gated as plain_gated
from kernels.reference import prefill_attention as plain_prefill_attention
from kernels.reference import rms_norm as plain_rms_norm
from kernels.reference import rotate_and_store as plain_rotate_and_store
from kernels.reference.rotary import rotary
from kernels.reference.store_kv import store_kv
from kernels.torch_ops.copy_blocks import copy_blocks
from kernels.torch_ops.gather_blocks import gather_blocks
from kernels.torch_ops.scatter_blocks import scatter_blocks
from shared.kv_layout import Chunk, Reach, Window, first_seen
from tests.kernels.support.compiled_first import compile_first
from tests.kernels.support.lower import lower_of
from tests.support.threads import computing_threads

TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 2e-2, torch.float16: 2e-3}

Op = Callable[..., Tensor]


@pytest.fixture(scope="module", autouse=True)
def _compiled() -> None:
    for head_dim in (20, 32):
        compile_first("float32", head_dim=head_dim)


class Plain:
    add_rms_norm: Op = staticmethod(plain_add_rms_norm.add_rms_norm)
    rms_norm: Op = staticmethod(plain_rms_norm.rms_norm)
    silu_and_mul: Op = staticmethod(plain_gated.silu_and_mul)
    gelu_and_mul: Op = staticmethod(plain_gated.gelu_and_mul)
    rotate_and_store: Op = staticmethod(plain_rotate_and_store.rotate_and_store)
    prefill_attention: Op = staticmethod(plain_prefill_attention.prefill_attention)
    decode_attention: Op = staticmethod(plain_decode_attention.decode_attention)


class Compiled:
    add_rms_norm: Op = staticmethod(cpu_add_rms_norm.add_rms_norm)
    rms_norm: Op = staticmethod(cpu_rms_norm.rms_norm)
    silu_and_mul: Op = staticmethod(cpu_gated.silu_and_mul)
    gelu_and_mul: Op = staticmethod(cpu_gated.gelu_and_mul)
    rotate_and_store: Op = staticmethod(cpu_rotate_and_store.rotate_and_store)
    prefill_attention: Op = staticmethod(cpu_prefill_attention.prefill_attention)
    decode_attention: Op = staticmethod(cpu_decode_attention.decode_attention)


Ops = type[Plain] | type[Compiled]
both = pytest.mark.parametrize("ops", [Plain, Compiled])


def _random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def _near(actual: Tensor, expected: Tensor) -> None:
    tolerance = TOLERANCE[actual.dtype]
    torch.testing.assert_close(actual.double(), expected.double(), rtol=tolerance, atol=tolerance)


@both
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("num_rows", [1, 63, 100])
def test_rms_norm(ops: Ops, num_rows: int, dtype: torch.dtype) -> None:
    x, weight = _random(num_rows, 50, dtype=dtype), _random(50, seed=1, dtype=dtype)
    wide = x.double()
    expected = wide / (wide.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt() * weight.double()
    _near(ops.rms_norm(x, weight, 1e-5), expected)
    shifted = ops.rms_norm(x, weight, 1e-5, has_unit_offset=True)
    _near(shifted, expected / weight.double() * (1 + weight.double()))


@both
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("has_unit_offset", [False, True])
def test_add_rms_norm(ops: Ops, has_unit_offset: bool, dtype: torch.dtype) -> None:
    """The bits equal those of a sum and then a norm; the inputs are unchanged."""
    x, residual = _random(63, 50, dtype=dtype), _random(63, 50, seed=1, dtype=dtype)
    weight, before = _random(50, seed=2, dtype=dtype), (x.clone(), residual.clone())
    out, total = ops.add_rms_norm(x, residual, weight, 1e-5, has_unit_offset=has_unit_offset)
    assert torch.equal(total, before[0] + before[1])
    assert torch.equal(out, ops.rms_norm(total, weight, 1e-5, has_unit_offset=has_unit_offset))
    assert torch.equal(x, before[0])
    assert torch.equal(residual, before[1])


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_rotary(dtype: torch.dtype) -> None:
    x, angles = _random(7, 3, 10, dtype=dtype), _random(7, 5, seed=1).double()
    pairs = torch.complex(x.double()[..., :5], x.double()[..., 5:])
    turned = pairs * torch.polar(torch.ones_like(angles), angles).unsqueeze(1)
    expected = torch.cat((turned.real, turned.imag), dim=-1)
    _near(rotary(x, angles.cos().float(), angles.sin().float()), expected)
    wider = torch.cat((x, x[..., :3]), dim=-1)
    partly = rotary(wider, angles.cos().float(), angles.sin().float())
    _near(partly[..., :10], expected)
    assert torch.equal(partly[..., 10:], x[..., :3])


@both
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("width", [13, 64, 320])
def test_silu_and_mul(ops: Ops, width: int, dtype: torch.dtype) -> None:
    x = _random(9, 2 * width, dtype=dtype) * 8
    gate, up = x.double().chunk(2, dim=-1)
    _near(ops.silu_and_mul(x), torch.nn.functional.silu(gate) * up)
    assert ops.silu_and_mul(torch.tensor([[-200.0, 1.0]])).tolist() == [[-0.0]]


@both
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("width", [13, 64, 320])
def test_gelu_and_mul(ops: Ops, width: int, dtype: torch.dtype) -> None:
    x = _random(9, 2 * width, dtype=dtype) * 4
    gate, up = x.double().chunk(2, dim=-1)
    _near(ops.gelu_and_mul(x), torch.nn.functional.gelu(gate, approximate="tanh") * up)
    assert ops.gelu_and_mul(torch.tensor([[-200.0, 1.0]])).tolist() == [[-0.0]]


def test_store_kv_writes_its_slots_and_skips_minus_one() -> None:
    cache = torch.full((2, 4, 3, 8, 6), torch.nan)
    key, value = _random(5, 3, 6), _random(5, 3, 6, seed=1)
    slots = torch.tensor([31, -1, 0, 17, 9])
    store_kv(key, value, cache, slots)
    by_slot = cache.transpose(1, 2).reshape(2, 3, 32, 6)
    for token in (0, 2, 3, 4):
        assert torch.equal(by_slot[0, :, slots[token]], key[token])
        assert torch.equal(by_slot[1, :, slots[token]], value[token])
    assert int(torch.isfinite(cache).sum()) == 4 * 2 * 3 * 6


@both
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("rotary_dim", [16, 10])
def test_rotate_and_store(ops: Ops, rotary_dim: int, dtype: torch.dtype) -> None:
    heads, angles = _random(5, 7, 16, dtype=dtype), _random(5, rotary_dim // 2, seed=1)
    cos, sin = angles.cos(), angles.sin()
    cache = torch.full((2, 4, 2, 8, 16), torch.nan, dtype=dtype)
    slots = torch.tensor([31, -1, 0, 17, 9])
    query = ops.rotate_and_store(heads, cos, sin, cache, slots)
    expected = torch.full_like(cache, torch.nan)
    rotated = rotary(heads[:, :5], cos, sin)
    store_kv(rotated[:, 3:], heads[:, 5:], expected, slots)
    _near(query, rotated[:, :3])
    assert torch.equal(cache.isnan(), expected.isnan())
    _near(cache.nan_to_num(), expected.nan_to_num())


@both
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_angles_of_zero_rotate_nothing(ops: Ops, dtype: torch.dtype) -> None:
    """As in layers without rope, whose heads are stored bit by bit."""
    heads = torch.randn(9, 6, 16).to(dtype)
    cos, sin = torch.ones(9, 8), torch.zeros(9, 8)
    cache = torch.zeros(2, 2, 2, 16, 16, dtype=dtype)
    query = ops.rotate_and_store(heads, cos, sin, cache, torch.arange(9))
    assert torch.equal(query, heads[:, :2])
    stored = cache[:, 0, :, :9].permute(2, 0, 1, 3)  # [T, planes, heads, D]
    assert torch.equal(stored.flatten(1, 2), heads[:, 2:])


@both
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("has_unit_offset", [False, True])
def test_rotate_and_store_with_norms(ops: Ops, has_unit_offset: bool, dtype: torch.dtype) -> None:
    """The bits equal those of the norms, followed by the rest."""
    heads, angles = _random(70, 7, 16, dtype=dtype), _random(70, 5, seed=1)
    query_norm, key_norm = _random(16, seed=2, dtype=dtype), _random(16, seed=3, dtype=dtype)
    cache = torch.zeros((2, 9, 2, 8, 16), dtype=dtype)
    expected, slots = cache.clone(), torch.arange(70)
    query = ops.rotate_and_store(
        heads,
        angles.cos(),
        angles.sin(),
        cache,
        slots.int(),
        query_norm=query_norm,
        key_norm=key_norm,
        eps=1e-6,
        has_unit_offset=has_unit_offset,
    )
    normed = heads.clone()
    for part, weight in ((slice(0, 3), query_norm), (slice(3, 5), key_norm)):
        normed[:, part] = ops.rms_norm(
            heads[:, part], weight, 1e-6, has_unit_offset=has_unit_offset
        )
    assert torch.equal(
        query, ops.rotate_and_store(normed, angles.cos(), angles.sin(), expected, slots)
    )
    assert torch.equal(cache, expected)


@both
def test_rotate_and_store_to_an_fp8_cache(ops: Ops) -> None:
    heads, angles = _random(5, 7, 16) * 9, _random(5, 8, seed=1)
    scales = torch.tensor([[0.5, 1.0], [2.0, 0.01]])
    unscaled = torch.zeros(2, 4, 2, 8, 16)
    cache, slots = unscaled.to(torch.float8_e4m3fn), torch.tensor([31, -1, 0, 17, 9])
    expected = ops.rotate_and_store(heads, angles.cos(), angles.sin(), unscaled, slots)
    query = ops.rotate_and_store(heads, angles.cos(), angles.sin(), cache, slots, kv_scales=scales)
    assert torch.equal(query, expected)
    stored = cache.float() * scales.view(2, 1, 2, 1, 1)
    bound = 448 * scales.view(2, 1, 2, 1, 1)
    clamped = torch.minimum(torch.maximum(unscaled, -bound), bound)
    torch.testing.assert_close(stored, clamped, rtol=2**-4, atol=2**-9)
    assert bool((clamped[1, :, 1].abs() == bound[1, 0, 1]).any())  # some are saturated


@pytest.mark.parametrize(("first", "count"), [(0, 1), (3, 4), (0, 20), (7, 9), (19, 1)])
def test_gather_and_scatter_blocks(first: int, count: int) -> None:
    cache = _random(2, 2, 9, 3, 4, 6)
    table = torch.tensor([7, 2, 0, 5, 8])
    wire = torch.full((2, 2, count, 3, 6), torch.nan)
    gather_blocks(cache, table.int(), first, count, wire)
    for index in range(count):
        block, offset = table[(first + index) // 4], (first + index) % 4
        assert torch.equal(wire[:, :, index], cache[:, :, block, :, offset])
    other = cache.clone()
    new = _random(2, 2, count, 3, 6, seed=3)
    scatter_blocks(other, table.int(), first, count, new)
    assert int((other != cache).sum()) == new.numel()
    gather_blocks(other, table, first, count, wire)
    assert torch.equal(wire, new)


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_copy_blocks_reads_all_before_it_writes(dtype: torch.dtype) -> None:
    before = _random(3, 2, 7, 3, 4, 6, dtype=dtype)
    cache = before.clone()
    cache[:, :, 1] = torch.nan
    copy_blocks(cache, torch.tensor([4, 4, 2, 0]), torch.tensor([1, 6, 0, 2]))
    for block, origin in ((0, 2), (1, 4), (2, 0), (3, 3), (4, 4), (5, 5), (6, 4)):
        assert torch.equal(cache[:, :, block], before[:, :, origin])


@pytest.mark.parametrize("gate", [Compiled.silu_and_mul, Compiled.gelu_and_mul])
@pytest.mark.parametrize("width", [64, 61])
@pytest.mark.parametrize("num_threads", [1, 2, 3, 4])
def test_bits_do_not_depend_on_the_number_of_threads_nor_of_rows(
    num_threads: int, width: int, gate: Callable[[Tensor], Tensor]
) -> None:
    x = _random(1111, 2 * width)
    expected = torch.cat([gate(row) for row in x.split(1)])
    with computing_threads(num_threads):
        assert torch.equal(gate(x), expected)


def _paged(num_seqs: int, num_blocks: int, heads: int, dim: int) -> tuple[Tensor, Tensor]:
    cache = _random(2, num_seqs * num_blocks, heads, 16, dim)
    order = torch.randperm(num_seqs * num_blocks, generator=torch.Generator().manual_seed(2))
    return cache, order.view(num_seqs, num_blocks)


def _naive(
    query: Tensor,
    cache: Tensor,
    table: Tensor,
    context_len: int,
    *,
    reach: Reach = None,
    softcap: float | None = None,
) -> Tensor:
    """FP64 attention of the last tokens of one sequence. query [Q, num_heads, D]."""
    num_tokens, num_heads, dim = query.shape
    kv = cache[:, table].double().transpose(1, 2).flatten(2, 3)[:, :, :context_len]
    key, value = kv.repeat_interleave(num_heads // kv.shape[1], dim=1)
    scores = query.double().transpose(0, 1) @ key.transpose(1, 2) * dim**-0.5
    if softcap is not None:
        scores = softcap * (scores / softcap).tanh()
    visible = torch.ones(num_tokens, context_len).tril(context_len - num_tokens).bool()
    for row in range(num_tokens):
        visible[row, : first_seen(reach, context_len - num_tokens + row)] = False
    weights = scores.masked_fill(~visible, -torch.inf).softmax(-1)
    return (weights @ value).transpose(0, 1)


@both
@pytest.mark.parametrize("dim", [8, 20, 64])
@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(4, 2), (7, 1), (3, 3)])
def test_attention(ops: Ops, num_heads: int, num_kv_heads: int, dim: int) -> None:
    _check_attention(ops, num_heads, num_kv_heads, dim)


@both
@pytest.mark.parametrize("softcap", [None, 1.5])
@pytest.mark.parametrize(
    "reach",
    [
        None,
        *(Window(tokens) for tokens in (1, 63, 64, 65, 100, 200, 1000)),
        *(Chunk(tokens) for tokens in (1, 16, 50, 64, 128, 1000)),
    ],
)
def test_attention_in_a_reach_with_capped_scores(
    ops: Ops, reach: Reach, softcap: float | None
) -> None:
    _check_attention(ops, 3, 1, 20, reach=reach, softcap=softcap)


@both
@pytest.mark.parametrize("context_len", [15, 16, 17, 33, 200])
def test_attention_in_chunks_of_16(ops: Ops, context_len: int) -> None:
    """A prompt as a whole and its last token alone, beside other contexts."""
    cache, tables = _paged(2, 20, 2, 20)
    query = _random(context_len + 1, 4, 20, seed=5)
    lens = [context_len, 300]
    lower = lower_of(Chunk(16), [context_len, 1], lens, query.device)
    starts = torch.tensor([0, context_len, context_len + 1])
    rest = torch.tensor(lens), 20**-0.5
    out = ops.prefill_attention(query, cache, tables, starts, *rest, lower=lower)
    whole = query[:context_len]
    expected = _naive(whole, cache, tables[0], context_len, reach=Chunk(16))
    _near(out[:context_len], expected)
    last = lower_of(Chunk(16), [1, 1], lens, query.device)
    single = ops.decode_attention(query[-2:], cache, tables, *rest, lower=last)
    _near(single[0], expected[-1])
    if ops is not Plain:
        assert torch.equal(single, out[-2:])


def _check_attention(
    ops: Ops,
    num_heads: int,
    num_kv_heads: int,
    dim: int,
    *,
    reach: Reach = None,
    **options: Any,
) -> None:
    """Compares both functions with FP64, and compiled ones bit for bit with each other."""
    cache, tables = _paged(4, 20, num_kv_heads, dim)
    query_lens, context_lens = [2, 150, 63, 20], [2, 300, 64, 300]
    query = _random(sum(query_lens), num_heads, dim, seed=4)
    starts = [0, 2, 152, 215, 235]
    out = ops.prefill_attention(
        query,
        cache,
        tables,
        torch.tensor(starts),
        torch.tensor(context_lens),
        dim**-0.5,
        lower=lower_of(reach, query_lens, context_lens, query.device),
        **options,
    )
    for index in range(4):
        rows = slice(starts[index], starts[index + 1])
        expected = _naive(
            query[rows], cache, tables[index], context_lens[index], reach=reach, **options
        )
        _near(out[rows], expected)
        lens = torch.arange(context_lens[index] - query_lens[index], context_lens[index]) + 1
        lower = lower_of(reach, [1] * len(lens), lens.tolist(), query.device)
        single = ops.decode_attention(
            query[rows],
            cache,
            tables[index].expand(len(lens), -1),
            lens,
            dim**-0.5,
            **options,
            lower=lower,
        )
        _near(single, expected)
        if ops is Plain:
            continue
        assert torch.equal(single, out[rows])
        for row in (slice(0, 1), slice(-1, None)):  # a single row has more tiles before its reach
            alone = ops.decode_attention(
                query[rows][row],
                cache,
                tables[index : index + 1],
                lens[row],
                dim**-0.5,
                **options,
                lower=None if lower is None else lower[row],
            )
            assert torch.equal(alone, single[row])


@both
def test_attention_of_an_fp8_cache(ops: Ops) -> None:
    """Stored values times their head's scale; keys and values have different scales."""
    cache, tables = _paged(2, 4, 3, 16)
    stored = cache.to(torch.float8_e4m3fn)
    scales = torch.tensor([[0.5, 1.0, 2.0], [3.0, 0.25, 1.5]])
    wide = stored.float() * scales[:, None, :, None, None]
    query, lens, starts = _random(5, 6, 16, seed=4), [40, 64], [0, 4, 5]
    rest = (tables, torch.tensor(starts), torch.tensor(lens), 0.25)
    out = ops.prefill_attention(query, stored, *rest, kv_scales=scales)
    for index in range(2):
        rows = slice(starts[index], starts[index + 1])
        _near(out[rows], _naive(query[rows], wide, tables[index], lens[index]))
    last = query[[3, 4]]
    single = ops.decode_attention(
        last, stored, tables, torch.tensor(lens), 0.25, kv_scales=scales, is_batch_invariant=True
    )
    _near(single, out[[3, 4]].double())


@both
@pytest.mark.parametrize("stale_value", [torch.nan, torch.inf])
def test_attention_ignores_stale_block_contents(ops: Ops, stale_value: float) -> None:
    """After the context's end, in blocks not reached yet, and in the block that pads a table."""
    cache, tables = _paged(2, 20, 2, 8)
    context_lens, starts = torch.tensor([5, 300]), torch.tensor([0, 2, 4])
    tables[0, 1:] = padding = int(tables[1, 19])
    query = _random(4, 4, 8, seed=4)
    prefilled = ops.prefill_attention(query, cache, tables, starts, context_lens, 0.3)
    decoded = ops.decode_attention(query[[1, 3]], cache, tables, context_lens, 0.3)

    cache[:, padding] = stale_value
    cache[:, tables[0, 0], :, 5:] = stale_value
    cache[:, tables[1, 18], :, 300 % 16 :] = stale_value
    assert torch.equal(
        ops.prefill_attention(query, cache, tables, starts, context_lens, 0.3), prefilled
    )
    assert torch.equal(
        ops.decode_attention(query[[1, 3]], cache, tables, context_lens, 0.3), decoded
    )
