"""The number of threads for a step: for small GEMMs, waking a second thread costs more than it
saves, even more so if other processes use its core.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kernels.ops import cpu_host

# Approximate, of one core: used to estimate a single-threaded step, so a factor of 2 is harmless.
MULTIPLICATIONS_PER_S = {torch.float32: 30e9, torch.float16: 30e9, torch.bfloat16: 300e9}
READ_BYTES_PER_S = 10e9
WORTHWHILE_S = 4e-3
# The same where only our kernels launch tasks: 16 sequences of a 4 M model are 1.3x faster
OWN_WORTHWHILE_S = 2e-3


@dataclass
class StepThreads:
    """Chooses the number of threads of a step. `num_weights` counts weights that every token
    multiplies with; `expert_weights` those of which a token uses `expert_share`. With
    `has_custom_gemm` our kernels compute these GEMMs, and torch only small operations. Call
    `set_for` on the step thread: OpenMP and numba store the number of threads per calling thread.
    """

    num_threads: int
    num_weights: int
    dtype: torch.dtype
    has_custom_gemm: bool = False
    expert_weights: int = 0
    expert_share: float = 0.0
    _num_set: int = 0

    def set_for(self, num_tokens: int) -> None:
        worthwhile_s = OWN_WORTHWHILE_S if self.has_custom_gemm else WORTHWHILE_S
        num_threads = self.num_threads if self.seconds_alone(num_tokens) > worthwhile_s else 1
        if num_threads != self._num_set:
            # torch's threads spin on their cores for a while, which slows our kernels' threads.
            torch.set_num_threads(1 if self.has_custom_gemm else num_threads)
            cpu_host().set_num_threads(num_threads)
            self._num_set = num_threads

    def seconds_alone(self, num_tokens: int) -> float:
        used = self.num_weights + self.expert_share * self.expert_weights
        read = self.num_weights + min(1.0, num_tokens * self.expert_share) * self.expert_weights
        multiplying_s = num_tokens * used / MULTIPLICATIONS_PER_S[self.dtype]
        return max(multiplying_s, read * self.dtype.itemsize / READ_BYTES_PER_S)
