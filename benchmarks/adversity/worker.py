"""A worker with the timing engine whose steps can be made to fail.

Run: python -m benchmarks.adversity.worker ROLE STEP_S FAILS_AFTER_S POISON_SEED OPTIONS…

A token depends on all KV before it, so responses that are equal had equal KV. The options are those
of `hearth ROLE`.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass

import msgspec
import typer
from tokenizers import Tokenizer

from services.cli.cluster.service_options import service_command
from services.worker.worker import build_worker
from shared.clock import MonotonicClock
from shared.config import WorkerConfig
from shared.engine.executors.timing_executor import STATE_BYTES, StepCost, TimingExecutor
from shared.engine.step import StepInputs, StepOutput
from shared.lifecycle.process import run_service
from shared.messages import Role

POISON_OUTPUT_POSITION = 20  # by then, requests that arrived together share their steps
ROLES: dict[str, tuple[Role, ...]] = {
    "prefill": ("prefill",),
    "decode": ("decode",),
    "worker": ("prefill", "decode"),
}


@dataclass(frozen=True, slots=True)
class StepFaults:
    """`after_s`: seconds from the first step, after which every step raises; -1: none does.
    `poison_seed`: the sampling seed of a request that breaks its steps; -1: none.
    """

    after_s: float = -1.0
    poison_seed: int = -1

    def check(self, inputs: StepInputs, since_first_s: float) -> None:
        """Raises RuntimeError if this step fails."""
        if 0 <= self.after_s <= since_first_s:
            raise RuntimeError("the device fails every step")
        rows = inputs.sampling.rows
        is_late = rows["output_position"] >= POISON_OUTPUT_POSITION
        if self.poison_seed >= 0 and (is_late & (rows["seed"] == self.poison_seed)).any():
            raise RuntimeError("a row breaks the step")


class FaultyExecutor(TimingExecutor):
    """Its check passes, so that only failed steps tell the state of the device."""

    revision = "timing"
    eos_token_ids: tuple[int, ...] = (4,)
    has_head = True

    def __init__(self, config: WorkerConfig, step_s: float, faults: StepFaults) -> None:
        tokenizer = Tokenizer.from_file(str(config.model_dir / "tokenizer.json"))
        assert config.kv_cache_bytes is not None
        super().__init__(
            MonotonicClock(),
            num_blocks=config.kv_cache_bytes // (config.block_size * STATE_BYTES),
            block_size=config.block_size,
            vocab_size=tokenizer.get_vocab_size(),
            cost=StepCost(base_s=step_s),
        )
        self._faults = faults
        self._first_step_at: float | None = None

    async def run(self, inputs: StepInputs) -> StepOutput:
        now = self._clock.now()
        if self._first_step_at is None:
            self._first_step_at = now
        self._faults.check(inputs, now - self._first_step_at)
        return await super().run(inputs)


def main() -> None:
    role, step_s, after_s, poison_seed = (sys.argv.pop(1) for _ in range(4))
    faults = StepFaults(after_s=float(after_s), poison_seed=int(poison_seed))

    def run(config: WorkerConfig) -> int:
        config = msgspec.structs.replace(config, device="cpu")
        return run_service(
            config.process_id,
            lambda: build_worker(
                config, ROLES[role], lambda each: FaultyExecutor(each, float(step_s), faults)
            ),
            drain_timeout_s=config.drain_timeout_s,
        )

    app = typer.Typer(add_completion=False)
    app.command()(service_command(WorkerConfig, role, run))
    app()


if __name__ == "__main__":
    main()
