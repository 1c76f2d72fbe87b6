"""Products of the fast mode whose sums the library returns in FP32, or writes in their place."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from kernels import ops
from kernels.reference.linear import per_head_linear as reference
from shared.engine.layers.methods.dense import DenseMethod

BF16, FP32 = torch.bfloat16, torch.float32


class Names(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        self.found.append(str(func).removeprefix("aten."))
        return func(*args, **(kwargs or {}))


@pytest.fixture
def _library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        ops, "_is_for_library", lambda _, *, is_batch_invariant: not is_batch_invariant
    )


@pytest.fixture
def operands() -> Iterator[tuple[Tensor, Tensor]]:
    """As on CUDA: nothing is computed."""
    with FakeTensorMode():
        yield (
            torch.empty(4, 64, dtype=BF16, device="cuda"),
            torch.empty(96, 64, dtype=BF16, device="cuda"),
        )


def test_logits_are_not_rounded_in_the_fast_mode(operands: tuple[Tensor, Tensor]) -> None:
    x, weight = operands
    method = DenseMethod(weight, is_batch_invariant=False)
    with Names() as names:
        logits = method.logits(x)
    assert (logits.dtype, logits.shape) == (FP32, (4, 96))
    assert {each for each in names.found if not each.startswith("prim.")} == {
        "t.default",
        "mm.dtype",
    }


def test_torch_without_wide_products_rounds(
    operands: tuple[Tensor, Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ops, "HAS_WIDE_MM", False)
    with Names() as names:
        logits = ops.wide_linear(*operands)
    assert logits.dtype == FP32
    assert "mm.dtype" not in names.found
    assert "_to_copy.default" in names.found


@pytest.mark.parametrize(
    ("device", "dtype", "is_batch_invariant", "is_wide"),
    [
        ("meta", BF16, False, True),
        ("meta", torch.float16, False, True),
        ("meta", FP32, False, False),
        ("meta", BF16, True, False),
        ("cpu", BF16, False, False),
    ],
)
def test_library_is_wide(
    device: str, dtype: torch.dtype, is_batch_invariant: bool, is_wide: bool
) -> None:
    x = torch.empty(1, 8, dtype=dtype, device=device)
    assert ops.has_wide_library(x, is_batch_invariant=is_batch_invariant) == is_wide


@pytest.mark.usefixtures("_library")
def test_weight_is_narrowed_where_nothing_is_lost() -> None:
    weight = torch.randn(8, 16).bfloat16().float()
    narrow = ops.narrowed(weight, BF16)
    assert narrow is not None
    assert torch.equal(narrow.float(), weight)
    weight[3, 5] += 1e-3 * weight[3, 5]
    assert ops.narrowed(weight, BF16) is None
    assert ops.narrowed(weight, FP32) is None


def test_weight_is_not_narrowed_for_cpus() -> None:
    assert ops.narrowed(torch.ones(8, 16), BF16) is None


@pytest.mark.usefixtures("_library")
@pytest.mark.parametrize("is_batch_invariant", [True, False])
def test_products_of_heads_are_written_in_their_place(is_batch_invariant: bool) -> None:
    x, weight = torch.randn(5, 3, 40)[..., :24], torch.randn(3, 16, 24)
    longer = torch.full((5, 3, 20), 7.0)
    part = longer[..., :16]
    ops.per_head_linear(x, weight, is_batch_invariant=is_batch_invariant, out=part)
    torch.testing.assert_close(longer[..., :16], reference(x, weight))
    assert bool((longer[..., 16:] == 7).all())
    alone = ops.per_head_linear(x, weight, is_batch_invariant=is_batch_invariant)
    assert alone.is_contiguous()  # nothing copies it where it is flattened
    torch.testing.assert_close(alone, reference(x, weight))
