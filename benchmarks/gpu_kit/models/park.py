"""A worker of the 8B shape parks and wakes: its weights go to memory of the host, and come back.

    park 1   locks pages of the host, copies, frees the device's memory
    wake 1   takes it again, copies; KV is empty, graphs are captured by the next steps
    park 2   only frees
    wake 2   as the first one

After each wake the tokens are those before the first park. `first_s` is from the wake's end to the
first token of a prompt, `tokens_s` to the last of all.
"""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.gpu_kit.models.graph_step import model_config
from benchmarks.gpu_kit.models.model_8b import folder_of
from benchmarks.gpu_kit.session import Session

if TYPE_CHECKING:
    from shared.engine.executors.cuda.cuda_executor import CudaExecutor

ROUNDS, NUM_TOKENS = 2, 16
LENGTHS = (300, 130, 40)  # tokens of the prompts
VOCAB = 500


def run(session: Session) -> None:
    """Raises RuntimeError if a token differs, or memory stays on the device."""
    from benchmarks.gpu_kit.model_steps.loading import load

    with folder_of(model_config(session)) as folder:
        executor, _ = load(session, folder, "exact")
    asyncio.run(_Rounds(session, executor).run())  # type: ignore[arg-type]


class _Rounds:
    def __init__(self, session: Session, executor: CudaExecutor) -> None:
        self._session, self._executor = session, executor

    async def run(self) -> None:
        wanted, _ = await self._tokens()
        weight_bytes = sum(each.nbytes for each in self._executor.computer.model.parameters())
        for number in range(1, 1 + ROUNDS):
            free = self._free_bytes()
            await self._resize(f"park {number}", 0)
            freed = self._free_bytes() - free
            if not self._session.is_dry and freed < weight_bytes:
                raise RuntimeError(f"{freed} bytes are free of {weight_bytes} of weights and KV")
            await self._resize(f"wake {number}", self._executor.num_blocks)
            tokens, took = await self._tokens()
            is_equal = self._session.is_dry or tokens == wanted  # a dry run computes none
            self._session.add(case=f"tokens {number}", is_equal=is_equal, **took)
            if not is_equal:
                raise RuntimeError("a woken worker has other tokens")
        await self._executor.close()

    async def _resize(self, case: str, num_blocks: int) -> None:
        started = time.perf_counter()
        await self._executor.resize_kv(num_blocks)
        figures: dict[str, Any] = {}
        if not self._session.is_dry:
            seconds = round(time.perf_counter() - started, 3)
            gib_free = round(self._free_bytes() / 2**30, 2)
            figures = {"seconds": seconds, **self._executor.offload_stages, "gib_free": gib_free}
        num_bytes = self._executor.offloaded_bytes
        self._session.add(case=case, offloaded_bytes=num_bytes, **figures)

    def _free_bytes(self) -> int:
        if self._session.is_dry:
            return 0
        import torch

        return torch.cuda.mem_get_info()[0]

    async def _tokens(self) -> tuple[list[list[int]], dict[str, float]]:
        """Returns the tokens of each prompt, and the seconds until the first and the last."""
        from shared.messages import SamplingParams
        from tests.support.engine.model_worker import Worker
        from tests.support.engine.rig import new_sequence

        is_dry = self._session.is_dry
        sampling = SamplingParams(seed=1, max_tokens=2 if is_dry else NUM_TOKENS, temperature=0.0)
        prompts = [
            [(7 * k + n * k * k) % (VOCAB - 3) + 3 for k in range(length)]
            for n, length in enumerate(LENGTHS[2:] if is_dry else LENGTHS)
        ]
        sequences = [new_sequence(each, sampling) for each in prompts]
        worker = Worker(Path(), "bfloat16", executor=self._executor, budget=512)
        started = time.perf_counter()
        for each in sequences:
            worker.engine.add(each)
        while not any(worker.tokens.values()):
            await worker.turn()
        first_s = time.perf_counter() - started
        await worker.run_on()
        took = {"first_s": first_s, "tokens_s": time.perf_counter() - started}
        found = [worker.tokens[each.sequence_id] for each in sequences]
        return found, {} if is_dry else {name: round(each, 3) for name, each in took.items()}
