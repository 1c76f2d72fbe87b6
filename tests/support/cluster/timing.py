"""Workers on the timing engine, with the demo model's name and vocabulary."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable

import msgspec
import typer

from services.cli.cluster.service_options import service_command
from services.worker.worker import build_worker
from shared.clock import MonotonicClock
from shared.config import WorkerConfig
from shared.engine.executors.timing_executor import STATE_BYTES, StepCost, TimingExecutor
from shared.engine.step import StepInputs, StepOutput
from shared.lifecycle.process import run_service
from shared.messages import Role
from shared.secrets.option_files import read_option_files

VOCAB_SIZE = 2048  # the demo model's: gateways use its tokenizer
SECONDS_PER_TOKEN = 60e-6
ROLES: dict[str, tuple[Role, ...]] = {
    "prefill": ("prefill",),
    "decode": ("decode",),
    "worker": ("prefill", "decode"),
}


class DemoTimingExecutor(TimingExecutor):
    """A timing engine whose steps take the time of `cost`. A token depends on all KV before it."""

    revision = "timing"
    eos_token_ids: tuple[int, ...] = (4,)
    has_head = True

    def __init__(self, config: WorkerConfig, cost: StepCost) -> None:
        assert config.kv_cache_bytes is not None
        super().__init__(
            MonotonicClock(),
            num_blocks=config.kv_cache_bytes // (config.block_size * STATE_BYTES),
            block_size=config.block_size,
            vocab_size=VOCAB_SIZE,
            cost=cost,
            mode="exact" if config.mode == "auto" else config.mode,
        )


class BreakableExecutor(DemoTimingExecutor):
    """A timing engine whose device fails on SIGUSR2: every later step and check raises."""

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
        BreakableExecutor.has_device = False

    threading.Thread(target=wait, daemon=True).start()


def run_timing_worker(role: str, step_s: float) -> None:
    """Takes the options of `hearth ROLE` from the command line."""
    _break_device_on_signal()
    cost = StepCost(base_s=step_s, per_token_s=SECONDS_PER_TOKEN)
    run_worker(role, lambda config: BreakableExecutor(config, cost))


def run_worker(role: str, load: Callable[[WorkerConfig], TimingExecutor]) -> None:
    """Runs a worker of `ROLES[role]` until it is told to leave. Takes the options of `hearth ROLE`
    from the command line.
    """

    def run(config: WorkerConfig) -> int:
        config = msgspec.structs.replace(config, device="cpu")
        return run_service(config, lambda: build_worker(config, ROLES[role], load))

    app = typer.Typer(add_completion=False)
    app.command()(service_command(WorkerConfig, role, run))
    app(obj=read_option_files(os.environ))
