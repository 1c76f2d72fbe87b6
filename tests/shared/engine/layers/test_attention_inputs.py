"""The split of a step's rows between decode attention and prefill attention."""

from __future__ import annotations

import torch

from shared.engine.layers.attention_inputs import LayerKind, build_attention_inputs
from shared.kv_layout import Chunk, Window
from tests.shared.engine.support.steps import Blocks, Line, step_of

CPU, NOT_CPU = torch.device("cpu"), torch.device("meta")


def mixed(*query_lens: int) -> list[tuple[Line, int]]:
    blocks = Blocks(16)
    return [(blocks.line(range(20)), query_len) for query_len in query_lens]


def test_single_tokens_are_decoded_separately() -> None:
    (inputs,) = build_attention_inputs(step_of(mixed(3, 1, 2, 1)), NOT_CPU)
    assert inputs.prefill is not None
    assert inputs.decode is not None
    assert inputs.prefill.rows is not None
    assert inputs.prefill.rows.shape == (5,)
    assert inputs.decode.rows is not None
    assert inputs.decode.rows.shape == (2,)


def test_cpu_computes_a_mixed_step_as_prefill() -> None:
    (inputs,) = build_attention_inputs(step_of(mixed(3, 1, 2, 1)), CPU)
    assert inputs.decode is None
    assert inputs.prefill is not None
    assert inputs.prefill.rows is None
    assert inputs.prefill.cu_seqlens_q.tolist() == [0, 3, 4, 6, 7]


def test_step_of_single_tokens_is_decoded() -> None:
    (inputs,) = build_attention_inputs(step_of(mixed(1, 1)), CPU)
    assert inputs.prefill is None
    assert inputs.decode is not None
    assert inputs.decode.rows is None


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
