"""Names what determines the bits of a worker's results, besides the model and its weights."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from shared.errors import ConfigError

# exact: a token's bits depend neither on its batch nor on chunking; fast: they may
Mode = Literal["exact", "fast"]
# auto: exact wherever it is proven and costs little, else fast
ModeChoice = Literal["auto", "exact", "fast"]
MODES: tuple[ModeChoice, ...] = ("auto", "exact", "fast")
# Raise it with every change of kernels or models that changes the bits of any result; where only
# Triton's kernels change them, the second alone, so that workers on CPUs keep their numerics.
KERNELS_VERSION = 2
TRITON_KERNELS_VERSION = 3

# plain: sums of lanes cross ranks in FP32; bf16-exchange: every node of the lane tree that some
# number of ranks sends is rounded to BF16, at every number of ranks: half the bytes, other bits
Activations = Literal["plain", "bf16-exchange"]
ACTIVATIONS: tuple[Activations, ...] = ("plain", "bf16-exchange")

# auto: fp8 if the checkpoint declares it, else as activations; bf16; fp8: e4m3 with scales
KvDtype = Literal["auto", "bf16", "fp8"]
KV_DTYPES: tuple[KvDtype, ...] = ("auto", "bf16", "fp8")
FP8_CAPABILITY = 8, 9  # the first compute capability of CUDA that converts to e4m3

_Part = Annotated[str, Meta(min_length=1, max_length=64)]
_Count = Annotated[int, Meta(ge=0, le=1024)]


class Numerics(msgspec.Struct, frozen=True, array_like=True):
    """The properties that a worker's bits depend on: workers with equal numerics and one revision
    of a model compute the same bits.

    `device` is the instruction set or architecture that the kernels use, such as cpu-avx512 or
    sm90; `dtype` is that of activations; `kernels` are the versions of the kernels and of what
    compiles them. `sum_lanes` are the parts in which a row-parallel product sums over K, 1 for
    none. `activations` is how sums of lanes cross ranks. `tp` are the ranks that a result depends
    on, 0 where it depends on none. `kv_dtype` is that of stored KV; empty means that of
    activations. Scales of KV are part of the model's revision.
    """

    mode: Mode
    device: _Part
    dtype: _Part
    kernels: _Part
    sum_lanes: _Count = 1
    activations: _Part = "plain"
    tp: _Count = 0
    kv_dtype: Annotated[str, Meta(max_length=64)] = ""

    @property
    def kv_key(self) -> str:
        """A key that is equal for workers that may share KV: in the exact mode those of equal
        numerics, in the fast mode those of equal dtypes and one form of activations; never across
        modes.
        """
        if self.mode == "exact":
            return str(self)
        return f"{self.mode}/{self.dtype}/{self.activations}{self._kv_suffix}"

    def may_share_kv(self, other: Numerics) -> bool:
        return self.kv_key == other.kv_key

    def __str__(self) -> str:
        parts = self.mode, self.device, self.dtype, self.kernels
        sums = f"lanes{self.sum_lanes}", self.activations, f"tp{self.tp}"
        return "/".join((*parts, *sums)) + self._kv_suffix

    @property
    def _kv_suffix(self) -> str:
        return f"/kv-{self.kv_dtype}" if self.kv_dtype else ""


def exchange_of(activations: str) -> Literal["fp32", "bf16"]:
    """Returns the form in which ranks send sums of lanes. Raises ConfigError."""
    if activations not in ACTIVATIONS:
        names = " or ".join(ACTIVATIONS)
        raise ConfigError(f"activations {activations!r} is not {names}", param="activations")
    return "bf16" if activations == "bf16-exchange" else "fp32"
