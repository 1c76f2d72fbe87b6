"""A worker whose steps take a stated time: `python -m benchmarks.serving.worker STEP ROLE OPTIONS…`

STEP is the seconds of each step, mostly 0, or a formula (`benchmarks/roles/step_costs.py`).

Only the mathematics is replaced: a token depends on its position alone, and is complete text, so
that each is one event of its response. KV is pushed as usual, 16 bytes per token.
"""

from __future__ import annotations

import sys

import msgspec
import typer
from tokenizers import Tokenizer

from benchmarks.roles.step_costs import cost_of
from services.cli.cluster.service_options import service_command
from services.worker.worker import build_worker
from shared.clock import MonotonicClock
from shared.config import WorkerConfig
from shared.engine.executors.timing_executor import STATE_BYTES, StepCost, TimingExecutor
from shared.engine.step import StepInputs, StepOutput
from shared.lifecycle.process import run_service
from shared.messages import Role, TokenLogprobs

ROLES: dict[str, tuple[Role, ...]] = {
    "prefill": ("prefill",),
    "decode": ("decode",),
    "worker": ("prefill", "decode"),
}


class IdleExecutor(TimingExecutor):
    revision = "idle"
    eos_token_ids = (4,)
    has_head = True

    def __init__(self, config: WorkerConfig, cost: StepCost) -> None:
        tokenizer = Tokenizer.from_file(str(config.model_dir / "tokenizer.json"))
        assert config.kv_cache_bytes is not None
        super().__init__(
            MonotonicClock(),
            num_blocks=config.kv_cache_bytes // (config.block_size * STATE_BYTES),
            block_size=config.block_size,
            vocab_size=tokenizer.get_vocab_size(),
            cost=cost,
        )
        self._tokens = whole_tokens(tokenizer)

    async def run(self, inputs: StepInputs) -> StepOutput:
        await self._clock.sleep(self._cost.of(inputs))
        sampling = inputs.sampling
        positions = inputs.positions[sampling.logits_indices].tolist()
        tokens = [self._tokens[each % len(self._tokens)] for each in positions]
        if sampling.bias is not None:  # as at a high temperature, the largest bias decides
            for row, token_id in zip(sampling.bias.rows, sampling.bias.token_ids, strict=True):
                tokens[row] = int(token_id)
        requested = {**sampling.raw_logprobs, **sampling.processed_logprobs}
        if not requested:
            return StepOutput(tokens)
        return StepOutput(
            tokens, [self._top_tokens(requested.get(row)) for row in range(len(tokens))]
        )

    def _top_tokens(self, count: int | None) -> TokenLogprobs | None:
        """The same for every position."""
        if count is None:
            return None
        return TokenLogprobs(-1.0, tuple(self._tokens[:count]), (-1.0,) * count)


def whole_tokens(tokenizer: Tokenizer) -> list[int]:
    """Tokens that are text in any context: no special tokens, no parts of characters."""
    texts = ((each, tokenizer.decode([each])) for each in range(tokenizer.get_vocab_size()))
    return [token_id for token_id, text in texts if text.strip() and text.isascii()]


def main() -> None:
    cost, role = cost_of(sys.argv.pop(1)), sys.argv.pop(1)

    def run(config: WorkerConfig) -> int:
        config = msgspec.structs.replace(config, device="cpu")
        return run_service(
            config.process_id,
            lambda: build_worker(config, ROLES[role], lambda each: IdleExecutor(each, cost)),
            drain_timeout_s=config.drain_timeout_s,
        )

    app = typer.Typer(add_completion=False)
    app.command()(service_command(WorkerConfig, role, run))
    app()


if __name__ == "__main__":
    main()
