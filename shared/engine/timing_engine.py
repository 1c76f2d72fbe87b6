"""An engine without a model: formula tokens, a cost model for time. Torch-free.

For the simulation and for control-plane benchmarks. Its KV is real: the 16 bytes of a token are a
digest of the token, its position and *the KV before it*, read from the paged cache; and the next
token follows from the last KV alone. So KV that was lost, moved, stale or foreign shows as other
tokens, exactly as with a model.
"""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import blake2b

import numpy as np

from shared.clock import Clock
from shared.engine.runner import StepInputs, StepOutput
from shared.kv_format import KvFormat

STATE_BYTES = 16
FIRST_TOKEN_ID = 16  # below it are the special tokens, which the formula never draws


@dataclass(frozen=True, slots=True)
class StepCost:
    """Seconds: a base per step, a price per computed token and per token of context read."""

    base_s: float = 0.005
    per_token_s: float = 20e-6
    per_context_token_s: float = 10e-9

    def of(self, inputs: StepInputs) -> float:
        num_context = int(inputs.context_lens.sum())
        num_tokens = len(inputs.input_ids)
        return self.base_s + num_tokens * self.per_token_s + num_context * self.per_context_token_s


class TimingRunner:
    def __init__(
        self,
        clock: Clock,
        *,
        num_blocks: int,
        block_size: int = 16,
        max_context_tokens: int = 8192,
        vocab_size: int = 32_000,
        cost: StepCost | None = None,
    ) -> None:
        self.kv_format = KvFormat("uint8", block_size, 1, 1, STATE_BYTES // 2)
        self.num_blocks = num_blocks
        self.max_context_tokens = max_context_tokens
        self.vocab_size = vocab_size
        self._clock = clock
        self._cost = StepCost() if cost is None else cost
        self._kv = np.zeros((num_blocks * block_size, STATE_BYTES), dtype=np.uint8)

    def step_budget_s(self, inputs: StepInputs) -> float:
        return 10 * self._cost.of(inputs)

    async def run(self, inputs: StepInputs) -> StepOutput:
        await self._clock.sleep(self._cost.of(inputs))
        first = 0
        last_states: list[bytes] = []
        for row, query_len in enumerate(inputs.query_lens.tolist()):
            table = inputs.block_tables[row].tolist()
            rows = slice(first, first + query_len)
            states = self._compute(table, inputs.input_ids[rows], inputs.positions[rows])
            last_states += states
            first += query_len
        draws = range(inputs.sampling.num_rows)
        return StepOutput([self._draw(last_states, inputs, draw) for draw in draws])

    async def read_kv(
        self, block_table: list[int], first_token: int, num_tokens: int, out: memoryview
    ) -> None:
        states = self._kv[self._slots(block_table, first_token, num_tokens)]
        # [tokens, 16] to the wire's [layers=1, 2, tokens, heads=1, head_dim=8]
        out[:] = states.reshape(num_tokens, 2, STATE_BYTES // 2).transpose(1, 0, 2).tobytes()

    async def write_kv(
        self, block_table: list[int], first_token: int, num_tokens: int, payload: memoryview
    ) -> None:
        halves = np.frombuffer(payload, dtype=np.uint8).reshape(2, num_tokens, STATE_BYTES // 2)
        states = halves.transpose(1, 0, 2).reshape(num_tokens, STATE_BYTES)
        self._kv[self._slots(block_table, first_token, num_tokens)] = states

    async def close(self) -> None:
        pass

    def _compute(
        self, table: list[int], token_ids: np.ndarray, positions: np.ndarray
    ) -> list[bytes]:
        states = []
        for token_id, position in zip(token_ids.tolist(), positions.tolist(), strict=True):
            before = self._kv[self._slot(table, position - 1)].tobytes() if position else b""
            word = token_id.to_bytes(8, "little") + position.to_bytes(8, "little")
            state = blake2b(word, key=before, digest_size=STATE_BYTES).digest()
            self._kv[self._slot(table, position)] = np.frombuffer(state, dtype=np.uint8)
            states.append(state)
        return states

    def _draw(self, states: list[bytes], inputs: StepInputs, draw: int) -> int:
        sampling = inputs.sampling
        noise = b""
        if sampling.temperature[draw] > 0:
            words = (sampling.seed[draw], sampling.choice_index[draw])
            noise = b"".join(int(word).to_bytes(8, "little") for word in words)
        state = states[int(sampling.logits_indices[draw])]
        number = int.from_bytes(blake2b(state + noise, digest_size=8).digest(), "little")
        banned = {token_id for row, token_id in sampling.banned if row == draw}
        span = self.vocab_size - FIRST_TOKEN_ID
        following = (FIRST_TOKEN_ID + (number + offset) % span for offset in range(span))
        return next(token_id for token_id in following if token_id not in banned)

    def _slot(self, table: list[int], position: int) -> int:
        size = self.kv_format.block_size
        return table[position // size] * size + position % size

    def _slots(self, table: list[int], first_token: int, num_tokens: int) -> list[int]:
        return [self._slot(table, first_token + offset) for offset in range(num_tokens)]
