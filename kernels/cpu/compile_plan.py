"""Describes what determines the machine code for a model, and the files that record that it is
compiled.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any, Literal

from kernels.cpu import probe
from kernels.cpu.compile import cache_dir
from kernels.cpu.gemm.gemm_common import BLOCK
from kernels.cpu.simd import cpu_features
from kernels.cpu.simd.intrinsics import SIDE

# "dense", "fp8" in blocks; or "int4", "int8", "e4m3", then "-zeros" with zeros, then "-floats" or
# "-halves" with scales of FP32 or FP16 instead of BF16; or "e2m1", whose scales are exponents
QuantizedKind = str
Part = Literal["attention", "layers", "rows", "steps"]  # steps: all that a worker runs first

_SIZES = "head_dim", "block_size"  # attention alone depends on it; other code is the same for all


@dataclass(frozen=True)
class CompilePlan:
    """See `compile_plan` of shared/engine/executors/loading/cpu_kernels.py."""

    dtype: str  # torch's name
    head_dim: int
    block_size: int
    is_compressed: bool  # the weights
    is_blocked: bool  # layers without experts have a kernel: their matrices are full blocks of 32
    has_gelu: bool
    # Kinds of QKV, output, gate and up, down, if the checkpoint is quantized.
    quantized: tuple[QuantizedKind, ...] = ()
    quantized_experts: tuple[QuantizedKind, ...] = ()  # gate and up, down
    has_experts: bool = False  # some layers have them
    has_latents: bool = False  # instead of keys and values
    has_clamped_gates: bool = False  # of experts with biases, after norms that are rounded once
    has_fp8_kv: bool = False  # then layers have no kernel of all of their operations

    def marker(self, part: Part) -> Path:
        """A file that exists once the part is compiled, the same for all models with its code."""
        described = json.dumps([part, probe.target_key(), self._fields(part)])
        digest = blake2b(described.encode(), digest_size=8).hexdigest()
        return Path(cache_dir(), f"compiled-{part}-{digest}")

    def _fields(self, part: Part) -> dict[str, Any]:
        """Describes what determines the code of a part."""
        fields, form = asdict(self), self._attention_form()
        of_layers = {name: fields[name] for name in fields if name not in _SIZES}
        match part:
            case "attention":
                return {"dtype": self.dtype, "has_fp8_kv": self.has_fp8_kv, "form": form}
            case "steps":
                return {**of_layers, "form": form}
        return of_layers

    def _attention_form(self) -> str:
        """Tiles of AMX, FP32 that is read in place, or copies.

        See `amx_attention.can_attend_on_amx` and `vector_attention.is_direct`.
        """
        cache_dtype = "float32" if self.has_fp8_kv else self.dtype
        if self.block_size % SIDE == 0:
            if cache_dtype == "bfloat16" and self.head_dim % BLOCK == 0 and cpu_features.has_amx():
                return "tiles"
            if cache_dtype == "float32" and self.head_dim % SIDE == 0:
                return "in place"
        return "copied"
