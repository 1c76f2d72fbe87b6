"""The split of a step's rows between decode attention and prefill attention."""

from __future__ import annotations

import pytest
import torch

from shared.engine.executors.loading.warm_up import idle_step
from shared.engine.layers.attention_inputs import LayerKind, build_attention_inputs
from shared.engine.model_config.model_config import QueryTemperature
from shared.kv_layout import Chunk, Window
from tests.support.engine.steps import Blocks, Line, step_of

CPU, NOT_CPU = torch.device("cpu"), torch.device("meta")


def mixed(*query_lens: int) -> list[tuple[Line, int]]:
    blocks = Blocks(16)
    return [(blocks.line(range(20)), query_len) for query_len in query_lens]


def test_single_tokens_are_decoded_separately() -> None:
    (inputs,) = build_attention_inputs(step_of(mixed(1, 1, 3, 2)), NOT_CPU)
    assert inputs.prefill is not None
    assert inputs.decode is not None
    assert inputs.prefill.context_lens.shape == (2,)
    assert inputs.prefill.cu_seqlens_q.shape == (3,)
    assert inputs.decode.context_lens.shape == (2,)


def test_single_tokens_come_first() -> None:
    with pytest.raises(ValueError, match="single tokens must come first"):
        build_attention_inputs(step_of(mixed(3, 1)), NOT_CPU)


def test_cpu_computes_a_mixed_step_as_prefill() -> None:
    (inputs,) = build_attention_inputs(step_of(mixed(3, 1, 2, 1)), CPU)
    assert inputs.decode is None
    assert inputs.prefill is not None
    assert inputs.prefill.cu_seqlens_q.tolist() == [0, 3, 4, 6, 7]


def test_step_of_single_tokens_is_decoded() -> None:
    (inputs,) = build_attention_inputs(step_of(mixed(1, 1)), CPU)
    assert inputs.prefill is None
    assert inputs.decode is not None
    assert inputs.decode.context_lens.shape == (2,)


def test_queries_grow_with_their_absolute_position() -> None:
    (line, _), *_ = work = mixed(3, 1)
    line.num_computed = 6
    temperature = QueryTemperature(floor_scale=4, scale=0.1)
    found = build_attention_inputs(step_of(work), CPU, (LayerKind(temperature=temperature),))
    steps = torch.tensor([1.0, 2.0, 2.0, 0.0])  # of positions 6, 7, 8 and 0
    expected = torch.log1p(steps) * 0.1 + 1
    assert found[0].query_factors is not None
    torch.testing.assert_close(found[0].query_factors, expected, rtol=1e-7, atol=0)
    assert build_attention_inputs(step_of(work), CPU)[0].query_factors is None


def test_each_reach_has_its_own_lower_bounds() -> None:
    step = step_of(mixed(3, 1))
    found = build_attention_inputs(
        step, CPU, (LayerKind(), LayerKind(reach=Window(2)), LayerKind(reach=Chunk(2)))
    )
    bounds = [each.prefill.lower for each in found if each.prefill is not None]
    assert step.positions.tolist() == [0, 1, 2, 0]
    assert bounds[0] is None
    assert [each.tolist() for each in bounds if each is not None] == [
        [0, 0, 1, 0],
        [0, 0, 2, 0],
    ]


@pytest.mark.parametrize("query_lens", [[1, 1, 1], [5], [1, 3]])
def test_inputs_of_each_group_are_aligned_on_a_device(query_lens: list[int]) -> None:
    """Else Triton compiles a kernel for the group when a request comes. Tables have 32 bits."""
    step = idle_step(16, query_lens, context_tokens=33, num_groups=3)
    kinds = [LayerKind(group) for group in range(3)]
    for each in build_attention_inputs(step, NOT_CPU, kinds):
        rows = [rows for rows in (each.prefill, each.decode) if rows is not None]
        assert {rows.block_tables.dtype for rows in rows} == {torch.int32}
        for tensor in (each.slot_mapping, *(rows.block_tables for rows in rows)):
            assert tensor.storage_offset() * tensor.itemsize % 16 == 0
        assert [rows.block_tables.shape[1] for rows in rows] == [3] * len(rows)
