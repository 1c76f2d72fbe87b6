"""A worker whose steps take a stated time: `python -m benchmarks.serving.worker STEP ROLE OPTIONS…`

STEP is the seconds of each step, mostly 0, or a formula (`benchmarks/roles/step_costs.py`).

Only the mathematics is replaced: a token depends on its position alone, and is complete text, so
that each is one event of its response. KV is pushed as usual, 16 bytes per token.
"""

from __future__ import annotations

import sys

from tokenizers import Tokenizer

from benchmarks.roles.step_costs import cost_of
from shared.config import WorkerConfig
from shared.engine.executors.timing_executor import StepCost
from shared.engine.step import StepInputs, StepOutput
from shared.messages import TokenLogprobs
from tests.support.cluster.timing import DemoTimingExecutor, run_worker


class IdleExecutor(DemoTimingExecutor):
    revision = "idle"

    def __init__(self, config: WorkerConfig, cost: StepCost) -> None:
        super().__init__(config, cost)
        tokenizer = Tokenizer.from_file(str(config.model_dir / "tokenizer.json"))
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
        """Returns the top tokens, the same for every position."""
        if count is None:
            return None
        return TokenLogprobs(-1.0, tuple(self._tokens[:count]), (-1.0,) * count)


def whole_tokens(tokenizer: Tokenizer) -> list[int]:
    """Returns the tokens that are text in any context: no special tokens, no parts of
    characters.
    """
    texts = ((each, tokenizer.decode([each])) for each in range(tokenizer.get_vocab_size()))
    return [token_id for token_id, text in texts if text.strip() and text.isascii()]


def main() -> None:
    cost, role = cost_of(sys.argv.pop(1)), sys.argv.pop(1)
    run_worker(role, lambda config: IdleExecutor(config, cost))


if __name__ == "__main__":
    main()
