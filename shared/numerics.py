"""What determines the bits of a worker's results, besides the model and its weights."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

# exact: a token's bits depend neither on its batch nor on chunking; fast: they may
Mode = Literal["exact", "fast"]
MODES: tuple[Mode, ...] = ("exact", "fast")
# Raise it with every change of kernels or models that changes the bits of any result.
KERNELS_VERSION = 1

_Part = Annotated[str, Meta(min_length=1, max_length=64)]


class Numerics(msgspec.Struct, frozen=True, array_like=True):
    """Workers with equal numerics and one revision of a model compute the same bits.

    `device`: the instruction set or architecture that the kernels use, such as cpu-avx512 or sm90;
    `dtype`: of activations and KV; `kernels`: versions of the kernels and of what compiles them.
    """

    mode: Mode
    device: _Part
    dtype: _Part
    kernels: _Part

    @property
    def kv_key(self) -> str:
        """Equal for workers that may share KV: in the exact mode those of equal numerics, in the
        fast mode those of one dtype; never across modes.
        """
        return str(self) if self.mode == "exact" else f"{self.mode}/{self.dtype}"

    def may_share_kv(self, other: Numerics) -> bool:
        return self.kv_key == other.kv_key

    def __str__(self) -> str:
        return f"{self.mode}/{self.device}/{self.dtype}/{self.kernels}"
