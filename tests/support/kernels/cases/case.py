"""A case of the table: a function that launches an operation's kernels and returns their results
beside what they must be.

It only makes tensors and launches; a reference is computed where a result is checked. So a kit
without a GPU can count and compile the same launches.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product
from typing import NamedTuple

import torch
from torch import Tensor

from tests.support.kernels import contexts
from tests.support.kernels.cases.sizes import Sizes
from tests.support.kernels.inputs import poisoned_outputs, random
from tests.support.kernels.tolerance import assert_near


class Result(NamedTuple):
    """A result `found`, and how it is compared.

    `wanted` computes the reference on the device of the inputs. `check` compares the two and raises
    AssertionError. A case's results are checked in order: one reference may compute several.
    """

    found: Tensor
    wanted: Callable[[], Tensor]
    check: Callable[[Tensor, Tensor], None] = assert_near


Results = tuple[Result, ...]


@dataclass(frozen=True)
class Inputs:
    """Makes a case's tensors on `device`. If nothing is computed they are uninitialised, and no
    memory of a large one is touched.
    """

    sizes: Sizes
    device: torch.device
    is_computed: bool = True

    def random(
        self, *shape: int, dtype: torch.dtype | None = None, scale: float = 1.0, seed: int = 0
    ) -> Tensor:
        """Returns normal numbers in the dtype of the sizes, or in `dtype`."""
        dtype = dtype or self.sizes.dtype
        if not self.is_computed:
            return torch.empty(shape, dtype=dtype, device=self.device)
        drawn = random(*shape, like=self.device, dtype=torch.float32, seed=seed)
        return drawn.mul_(scale).to(dtype)

    def weight(self, shape: tuple[int, int], *, seed: int = 1) -> Tensor:
        """[N, K], whose products with normal numbers have a standard deviation of 1."""
        return self.random(*shape, scale=shape[1] ** -0.5, seed=seed)

    def angles(self, num_tokens: int, half: int) -> tuple[Tensor, Tensor]:
        """Cosines and sines."""
        angles = self.random(num_tokens, half, dtype=torch.float32, seed=7)
        return angles.cos(), angles.sin()

    def copy(self, tensor: Tensor) -> Tensor:
        """Returns a copy to compute the reference in."""
        return tensor.clone() if self.is_computed else tensor

    def integers(self, values: Sequence[int], dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.tensor(values, dtype=dtype, device=self.device)

    def paged(
        self,
        context_lens: Sequence[int],
        *,
        num_kv_heads: int,
        head_dim: int,
        block_size: int,
        dtype: torch.dtype | None = None,
    ) -> contexts.Paged:
        dtype, lens = dtype or self.sizes.dtype, self.integers(context_lens)
        if self.is_computed:
            return contexts.paged(
                context_lens,
                num_kv_heads=num_kv_heads,
                head_dim=head_dim,
                block_size=block_size,
                dtype=dtype,
                device=self.device,
                index_dtype=torch.int32,
            )
        counts = [-(-length // block_size) for length in context_lens]
        shape = (2, sum(counts) + 1, num_kv_heads, block_size, head_dim)
        tables = torch.empty(len(counts), max(counts) + 2, dtype=torch.int32, device=self.device)
        return contexts.Paged(self.random(*shape, dtype=dtype), tables, lens)


@dataclass(frozen=True)
class Case:
    """A call of an operation with some options. `kernels` are the operations whose kernels it
    launches.
    """

    op: str
    function: Callable[..., Results]
    options: tuple[tuple[str, object], ...]
    kernels: tuple[str, ...]

    def __str__(self) -> str:
        labels = (_label(name, value) for name, value in self.options)
        return "-".join((self.function.__name__, *labels))

    @property
    def is_exact(self) -> bool:
        """The bits of the result depend on nothing but the inputs and the kind of card."""
        return bool(dict(self.options).get("is_exact", True))

    def launch(self, inputs: Inputs) -> Results:
        return self.function(inputs, **dict(self.options))

    def check(self, inputs: Inputs) -> None:
        with poisoned_outputs():
            results = self.launch(inputs)
        for found, wanted, check in results:
            check(found, wanted())


def cases(
    function: Callable[..., Results],
    *,
    op: str | None = None,
    kernels: tuple[str, ...] | None = None,
    **options: Sequence[object],
) -> list[Case]:
    """Returns a case for each combination of options. The operation is named after the function,
    and launches the kernels of that name.
    """
    op = op or function.__name__
    chosen = (tuple(zip(options, each, strict=True)) for each in product(*options.values()))
    return [Case(op, function, each, kernels or (op,)) for each in chosen]


def _label(name: str, value: object) -> str:
    if not isinstance(value, bool):
        return str(value)
    return ("" if value else "not ") + name.split("_", 1)[1]
