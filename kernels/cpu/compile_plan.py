"""What determines the machine code for a model, and the files that record that it is compiled."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Literal

from kernels.cpu import probe
from kernels.cpu.compile import cache_dir

# int4 without and with zeros, and with FP32 scales instead of BF16
QuantisedKind = Literal["dense", "int4", "int4-zeros", "int4-floats", "int4-zeros-floats", "fp8"]


@dataclass(frozen=True)
class CompilePlan:
    """See `compile_plan` of shared/engine/executors/loading/cpu_kernels.py."""

    dtype: str  # torch's name
    head_dim: int
    block_size: int
    is_compressed: bool  # the weights
    is_blocked: bool  # layers without experts have a kernel: their matrices are full blocks of 32
    has_plain_attention: bool  # some layer has neither window nor softcap
    has_masked_attention: bool
    has_gelu: bool
    # Of QKV, output, gate and up, down, if the checkpoint is quantised
    quantised: tuple[QuantisedKind, ...] = ()
    quantised_experts: tuple[QuantisedKind, ...] = ()  # gate and up, down
    has_experts: bool = False  # in some layers
    has_latents: bool = False  # instead of keys and values
    has_fp8_kv: bool = False  # then layers have no kernel of all of their operations

    def marker(self, part: str) -> Path:
        """A file that exists once the part is compiled."""
        described = json.dumps([part, probe.target_key(), asdict(self)])
        digest = blake2b(described.encode(), digest_size=8).hexdigest()
        return Path(cache_dir(), f"compiled-{part}-{digest}")
