"""Models that share a marker run the same machine code: loops are called with the same types."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import combinations
from typing import Any

import numba
import pytest
import torch
from numba.core.dispatcher import Dispatcher

import kernels.cpu
from kernels.cpu import warm_parts
from kernels.cpu.attention.prefill_attention import prefill_attention
from kernels.cpu.attention.rotate_and_store import rotate_and_store
from kernels.cpu.compile_plan import CompilePlan, Part
from kernels.ops import cpu_host

Calls = set[tuple[str, tuple[Any, ...]]]
COMPILE = {"attention": warm_parts.compile_attention, "layers": warm_parts.compile_layers}
SIZES = [(32, 16), (96, 64), (64, 8), (80, 16), (80, 32), (20, 4), (16, 16), (576, 64)]


def _plan(dtype: str, head_dim: int = 64, block_size: int = 16, **fields: Any) -> CompilePlan:
    plan = CompilePlan(dtype, head_dim, block_size, False, False, False)
    return replace(plan, **fields)


def _recorder(loop: Dispatcher, calls: Calls) -> Any:
    name = f"{loop.py_func.__module__}.{loop.py_func.__name__}"

    def record(*arguments: Any) -> Any:
        calls.add((name, tuple(map(numba.typeof, arguments))))
        return loop.py_func(*arguments) if name.endswith(".runs_of") else None

    return record


@contextmanager
def _recorded() -> Iterator[Calls]:
    """The loops that Python calls, with their types; they are neither compiled nor run."""
    calls: Calls = set()
    packages = pkgutil.walk_packages(kernels.cpu.__path__, "kernels.cpu.")
    with pytest.MonkeyPatch.context() as patch:
        for module in [importlib.import_module(each.name) for each in packages]:
            for name, value in list(vars(module).items()):
                if isinstance(value, Dispatcher):
                    patch.setattr(module, name, _recorder(value, calls))
        yield calls


def _calls(part: Part, plan: CompilePlan) -> Calls:
    with _recorded() as calls:
        COMPILE[part](plan)
    return calls


@pytest.mark.parametrize("is_fp8", [False, True])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "float16"])
def test_attention_of_one_marker_has_one_code(dtype: str, is_fp8: bool) -> None:
    _assert_markers_match("attention", [_plan(dtype, *size, has_fp8_kv=is_fp8) for size in SIZES])


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_layers_of_one_marker_have_one_code(dtype: str) -> None:
    is_blocked = cpu_host().has_gemm(dtype)
    _assert_markers_match(
        "layers",
        [
            *(_plan(dtype, *size, is_blocked=is_blocked) for size in SIZES),
            *(_plan(dtype, *size) for size in SIZES),
            _plan(dtype, has_gelu=True),
        ],
    )


def _assert_markers_match(part: Part, plans: list[CompilePlan]) -> None:
    found = [(plan.marker(part), _calls(part, plan)) for plan in plans]
    assert all(calls for _, calls in found)
    for (marker, calls), (other, other_calls) in combinations(found, 2):
        assert (marker == other) == (calls == other_calls)


def test_a_block_table_has_one_code_in_any_layout() -> None:
    query, cache = torch.zeros(2, 1, 20), torch.zeros(2, 3, 1, 4, 20)
    table, starts, lens = torch.tensor([[2]]), torch.tensor([0, 1, 2]), torch.tensor([1, 1])
    with _recorded() as calls:
        for each in (table.expand(2, 1), torch.zeros(2, 3).long()[:, ::2], table.repeat(2, 1)):
            prefill_attention(query, cache, each, starts, lens, 1.0)
    assert len([name for name, _ in calls if name.endswith("._attend")]) == 1


def test_attention_has_one_code_for_all_masks() -> None:
    query, cache = torch.zeros(2, 1, 16), torch.zeros(2, 3, 1, 16, 16)
    place = torch.tensor([[2]]), torch.tensor([0, 2]), torch.tensor([2])
    with _recorded() as calls:
        for mask in ({}, {"lower": torch.zeros(2).int()}, {"softcap": 3.0}):
            prefill_attention(query, cache, *place, 1.0, **mask)
    assert len([name for name, _ in calls if name.endswith("._attend")]) == 1


@pytest.mark.parametrize("is_blocked", [False, True], ids=["operations", "fused layer"])
def test_slots_of_a_group_of_layers_have_the_code_of_others(is_blocked: bool) -> None:
    """They can be a column of all groups' slots."""
    plan = _plan("bfloat16" if cpu_host().has_gemm("bfloat16") else "float32")
    if is_blocked and not cpu_host().has_gemm(plan.dtype):
        pytest.skip("this CPU has no fused layers")
    layer = warm_parts._Layer(plan)._kernel if is_blocked else None
    kv_cache, angles = warm_parts._cache(plan), torch.zeros(2, 3, plan.head_dim // 2)
    with _recorded() as calls:
        for slots in (torch.zeros(3).long(), torch.zeros(3, 2).long()[:, 1]):
            if layer is not None:
                layer.pre_attention(warm_parts._zeros(plan, 3, 32), *angles, kv_cache, slots)
            else:
                heads = warm_parts._zeros(plan, 3, 3, plan.head_dim)
                rotate_and_store(heads, *angles, kv_cache, slots)
    assert len(calls) == 1
