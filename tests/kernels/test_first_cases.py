"""The first cases on a GPU: few, one for each class of launches, and none that cannot fail."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import pytest
import torch

from kernels.device import IS_INTERPRETED

pytest.importorskip("triton")
if IS_INTERPRETED:
    pytest.skip("the interpreter computes all launches", allow_module_level=True)

from triton.runtime.jit import JITFunction

from tests.kernels import test_compiles
from tests.support.kernels.cases.case import Case, Inputs
from tests.support.kernels.cases.sizes import REAL, SMALL
from tests.support.kernels.cases.table import CASES, samples

CPU = torch.device("cpu")
MOST_CASES = 125

Launch = tuple[Any, ...]  # a kernel's name, the types of its tensors, and its constants


@contextmanager
def uncomputed() -> Iterator[set[Launch]]:
    """The classes of launches inside. Nothing is compiled or computed."""
    found: set[Launch] = set()

    def run(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        given = dict(zip((each.name for each in self.params), args, strict=False)) | kwargs
        constants = {each.name for each in self.params if each.is_constexpr}
        found.add((self.__name__, *_described(given, constants)))

    with patch.object(JITFunction, "run", run):
        yield found


def _described(given: dict[str, Any], constants: set[str]) -> Iterator[tuple[str, object]]:
    for name, value in given.items():
        if isinstance(value, torch.Tensor):
            yield name, value.dtype
        elif name in constants:
            yield name, value


def launched_by_cases() -> set[Launch]:
    inputs = Inputs(REAL, CPU, is_computed=False)
    with uncomputed() as found:
        for case in CASES:
            case.launch(inputs)
    return found


def test_cases_are_few_and_have_unique_names() -> None:
    assert len({str(case) for case in CASES}) == len(CASES) <= MOST_CASES


def test_every_compiled_operation_has_cases() -> None:
    compiled = {*test_compiles.LAUNCHES, *test_compiles.FP8_LAUNCHES, "latent_attention"}
    assert compiled - {case.op for case in CASES} == set()


def test_every_compiled_launch_has_a_case() -> None:
    """The kernel with these constants is launched at real sizes, too."""
    with uncomputed() as compiled:
        for launch in test_compiles.LAUNCHES.values():
            launch()
        for launch_fp8 in test_compiles.FP8_LAUNCHES.values():
            launch_fp8(torch.float8_e4m3fn)
        for num_heads in (8, 128):
            test_compiles._launch_latent_attention(num_heads)
    assert len(compiled) > 50
    assert compiled - launched_by_cases() == set()


def test_real_cases_are_launched_without_random_numbers() -> None:
    """A kit without a GPU compiles them, within seconds."""
    with patch.object(torch, "randn", None):
        assert launched_by_cases()


@pytest.mark.parametrize("case", samples(), ids=str)
def test_case_fails_if_its_kernels_compute_nothing(case: Case) -> None:
    with uncomputed() as found, pytest.raises(AssertionError):
        case.check(Inputs(SMALL, CPU))
    assert found
