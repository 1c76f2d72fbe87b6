"""What determines the machine code for a model, and the files that record that it is compiled."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from hashlib import blake2b
from pathlib import Path

from kernels.cpu import probe
from kernels.cpu.compile import cache_dir


@dataclass(frozen=True)
class CompilePlan:
    """See `compile_plan` of shared/engine/runners/cpu_kernels.py."""

    dtype: str  # torch's name
    head_dim: int
    block_size: int
    is_compressed: bool  # the weights
    is_blocked: bool  # all matrices consist of full blocks of 32: layers have a kernel
    has_plain_attention: bool  # some layer has neither window nor softcap
    has_masked_attention: bool
    has_gelu: bool
    has_latents: bool = False  # instead of keys and values

    def marker(self, part: str) -> Path:
        """A file that exists once the part is compiled."""
        described = json.dumps([part, probe.target_key(), asdict(self)])
        digest = blake2b(described.encode(), digest_size=8).hexdigest()
        return Path(cache_dir(), f"compiled-{part}-{digest}")
