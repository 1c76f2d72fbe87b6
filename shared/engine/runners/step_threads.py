"""How many threads a step is worth: waking a second one for each product costs more than it saves
where the products are small, the more so when other processes want its core.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kernels.ops import cpu_host

# Of one core, about: what a step would take alone is compared, so a factor of two does not matter.
MULTIPLICATIONS_PER_S = {torch.float32: 30e9, torch.float16: 30e9, torch.bfloat16: 300e9}
READ_BYTES_PER_S = 10e9
WORTHWHILE_S = 4e-3
OWN_WORTHWHILE_S = 2e-3  # where few calls hand out their tasks: a 4 M model's 16 sequences gain 1.3


@dataclass
class StepThreads:
    """`num_weights`: of all products with weights; `has_custom_gemm`: those are our kernels', and
    torch has only small things to compute. `set_for` is to be called on the step thread, whose
    number OpenMP and numba keep apart from those of others.
    """

    num_threads: int
    num_weights: int
    dtype: torch.dtype
    has_custom_gemm: bool = False
    _num_set: int = 0

    def set_for(self, num_tokens: int) -> None:
        worthwhile_s = OWN_WORTHWHILE_S if self.has_custom_gemm else WORTHWHILE_S
        num_threads = self.num_threads if self.seconds_alone(num_tokens) > worthwhile_s else 1
        if num_threads != self._num_set:
            # torch's threads hold on to their cores for a while, in the way of our kernels' own.
            torch.set_num_threads(1 if self.has_custom_gemm else num_threads)
            cpu_host().set_num_threads(num_threads)
            self._num_set = num_threads

    def seconds_alone(self, num_tokens: int) -> float:
        multiplying_s = num_tokens * self.num_weights / MULTIPLICATIONS_PER_S[self.dtype]
        return max(multiplying_s, self.num_weights * self.dtype.itemsize / READ_BYTES_PER_S)
