"""A worker on the timing engine, with the demo model's name and vocabulary."""

from __future__ import annotations

import signal
import threading
from typing import Literal

import msgspec
import typer

from services.cli.cluster.service_options import service_command
from services.worker.worker import build_worker
from shared.clock import MonotonicClock
from shared.config import WorkerConfig
from shared.engine.executors.timing_executor import STATE_BYTES, StepCost, TimingExecutor
from shared.engine.step import StepInputs, StepOutput
from shared.lifecycle.process import run_service

VOCAB_SIZE = 2048  # of the demo model's tokenizer, which the gateways use
SECONDS_PER_TOKEN = 60e-6


class ModelledTimingExecutor(TimingExecutor):
    """After SIGUSR2 its device fails: every step and check raises."""

    revision = "timing"
    eos_token_ids = (4,)
    has_head = True
    has_device = True

    async def run(self, inputs: StepInputs) -> StepOutput:
        output = await super().run(inputs)
        self._check_device()
        return output

    async def check(self) -> None:
        await super().check()
        self._check_device()

    def _check_device(self) -> None:
        if not self.has_device:
            raise RuntimeError("the device says no")


def _break_device_on_signal() -> None:
    """All threads block the signal: see `tests/support/cluster/monitored_process.py`."""

    def wait() -> None:
        signal.sigwait({signal.SIGUSR2})
        ModelledTimingExecutor.has_device = False

    threading.Thread(target=wait, daemon=True).start()


def run_timing_worker(role: Literal["prefill", "decode"], step_s: float) -> None:
    """Takes the options of `hearth ROLE` from the command line."""
    _break_device_on_signal()

    def load(config: WorkerConfig) -> ModelledTimingExecutor:
        assert config.kv_cache_bytes is not None
        return ModelledTimingExecutor(
            MonotonicClock(),
            num_blocks=config.kv_cache_bytes // (config.block_size * STATE_BYTES),
            block_size=config.block_size,
            vocab_size=VOCAB_SIZE,
            cost=StepCost(base_s=step_s, per_token_s=SECONDS_PER_TOKEN),
            mode="exact" if config.mode == "auto" else config.mode,
        )

    def run(config: WorkerConfig) -> int:
        config = msgspec.structs.replace(config, device="cpu")
        return run_service(
            config.process_id,
            lambda: build_worker(config, (role,), load),
            drain_timeout_s=config.drain_timeout_s,
        )

    app = typer.Typer(add_completion=False)
    app.command()(service_command(WorkerConfig, role, run))
    app()
